"""The exercises of notebook 02: right answers pass, plausible wrong ones do not."""

import math

import pytest
from builds import BuildTestsOnRanks
from small_exercises import FunctionTests, table

from fsdp_helpers.teaching.exercises import notebook_02, on_ranks
from fsdp_helpers.teaching.exercises.answers import NotYet


class TestSmallestBucket(FunctionTests):
    checker = staticmethod(notebook_02.check_smallest_bucket)
    # latency / (latency + part / speed) = 1 / 10, so a part is sent in nine times the latency
    right = [lambda n, latency, speed: 9 * n * latency * speed, lambda *link: math.ceil(9 * math.prod(link))]
    wrong = [
        lambda n, latency, speed: 10 * n * latency * speed,  # a tenth of the sending alone
        lambda n, latency, speed: 4 * n * latency * speed,  # a fifth of the time
        lambda n, latency, speed: 9 * latency * speed,  # a part, not the bucket
        lambda n, latency, speed: 9 * 2 * (n - 1) * latency * speed,  # the whole bucket in every pass
        lambda n, latency, speed: 25 * 2**20,  # DDP's default
        lambda n, latency, speed: -9 * n * latency * speed,
        table({(2, 1e-5, 1e10): 1.8e6, (8, 1e-5, 1e10): 7.2e6, (8, 2e-5, 1e10): 14.4e6}),  # the lazy one
    ]
    far_off = staticmethod(lambda n, latency, speed: 5)
    right_says = "1,800,000"


# ---------------------------------------------------------------- the build

OTHER_WAY = """
import torch
import torch.distributed as dist

def average_gradients(model, bucket_bytes):
    gradients = [parameter.grad for parameter in model.parameters()]
    flat = torch.cat([gradient.flatten() for gradient in gradients]) / dist.get_world_size()
    for part in flat.split(bucket_bytes // 4):
        dist.all_reduce(part)
    start = 0
    for parameter in model.parameters():
        parameter.grad = flat[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
"""
STUCK = """
import torch.distributed as dist

def average_gradients(model, bucket_bytes):
    if dist.get_rank() == 0:
        dist.barrier()
"""


class TestAverageGradients(BuildTestsOnRanks):
    name = "my_ddp"
    checker = staticmethod(notebook_02.check_average_gradients)
    starter = "on 2 ranks.*there was no collective"
    wrong = [
        ([("    flat /= dist.get_world_size()\n", "")], "the gradients are sums over 2 ranks, not means$"),
        ([("size + parameter.grad.nbytes > bucket_bytes", "bucket")], "a step runs 6 collectives"),
        # one all-reduce per gradient and a sum: the gradients come first, as the first hint does
        (
            [("size + parameter.grad.nbytes > bucket_bytes", "bucket"), ("    flat /= dist.get_world_size()\n", "")],
            "the gradients are sums",
        ),
        ([("size + parameter.grad.nbytes > bucket_bytes", "False")], "one collective sends 47.7 kB"),
        (
            [("    average(bucket)  # the last one, full or not\n", "")],
            "608 of 11,923 gradients aren't the ranks' mean; are all",
        ),
        (
            [("gradient.copy_(part.view_as(gradient))", "gradient = part.view_as(gradient)")],
            "1.,.* of 11,923 .* means copied back",
        ),
        (
            [("dist.all_reduce(flat)", "dist.reduce(flat, 0)")],
            "rank 0: .* first gradients are right, but the losses aren't DDP's",
        ),
        (
            [("    dist.all_reduce(flat)", "    dist.get_rank() or dist.all_reduce(flat)")],
            "collectives don't match: does every rank run the same",
        ),
        ([("dist.all_reduce(flat)", "dist.all_sum(flat)")], r"my_ddp.py fails on line 18: AttributeError"),
    ]

    def test_another_way_is_accepted(self, write):
        """All gradients as one tensor, cut wherever a bucket is full."""
        write(OTHER_WAY)
        self.accept(**self.settings)

    def test_ranks_that_wait_for_one_another_are_refused_with_the_place(self, write, monkeypatch):
        monkeypatch.setattr(on_ranks, "STALL_S", 2.0)
        write(STUCK)
        with pytest.raises(NotYet) as caught:
            self.checker(self.name)
        assert "rank 0 was waiting in barrier(), called from my_ddp.py line 6, in average_gradients;" in str(
            caught.value
        )
        assert "rank 1 was waiting in all_reduce(), called from group.py" in str(caught.value)
        assert str(caught.value).endswith("(failures: hang-order, hang-gather-on-rank-0)")
        assert "\n" not in str(caught.value)
