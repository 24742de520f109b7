"""The exercises of notebook 02: right answers pass, plausible wrong ones do not."""

import math

from small_exercises import FunctionTests, table

from fsdp_helpers.teaching.exercises import ddp


class TestSmallestBucket(FunctionTests):
    checker = staticmethod(ddp.check_smallest_bucket)
    # latency / (latency + part / speed) = 1 / 10, so a part is sent in nine times the latency
    right = [lambda n, latency, speed: 9 * n * latency * speed, lambda *link: math.ceil(9 * math.prod(link))]
    wrong = [
        lambda n, latency, speed: 10 * n * latency * speed,  # a tenth of the sending alone
        lambda n, latency, speed: 9 * latency * speed,  # a part, not the bucket
        lambda n, latency, speed: 9 * 2 * (n - 1) * latency * speed,  # the whole bucket in every pass
        lambda n, latency, speed: 25 * 2**20,  # DDP's default
        lambda n, latency, speed: -9 * n * latency * speed,
        table({(2, 1e-5, 1e10): 1.8e6, (8, 1e-5, 1e10): 7.2e6, (8, 2e-5, 1e10): 14.4e6}),  # the lazy one
    ]
    far_off = staticmethod(lambda n, latency, speed: 5)
    right_says = "1,800,000"
