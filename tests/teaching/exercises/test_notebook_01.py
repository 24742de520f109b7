"""The exercises of notebook 01: right answers pass, plausible wrong ones do not."""

import math
from fractions import Fraction

from small_exercises import UNDER_LIMITS, AnswerTests, FunctionTests, RunTests, attempt, table

from fsdp_helpers.teaching.exercises import notebook_01


def local(batch, peak_bytes, **settings):
    return attempt(peak_bytes, world_size=1, held_bytes=19_200_000, global_batch_size=batch, **settings)


class TestParameterCount(AnswerTests):
    checker = staticmethod(notebook_01.check_parameter_count)
    # 64 x 5 x 5 = 1,600 weights a kernel; 128 kernels and 128 biases: 204,800 + 128
    right = [204_928, 204_928.0]
    wrong = [
        204_800,
        64 * 5 * 5 + 128,
        128 * 64 * 25 + 64,
        0,  # the lazy one
    ]
    far_off = 1
    right_says = "204,928"


class TestLargestModel(FunctionTests):
    checker = staticmethod(notebook_01.check_largest_model)
    right = [lambda size: size // 16, lambda size: math.floor(Fraction(size, 16))]
    wrong = [
        lambda size: size / 16,
        lambda size: size // 4,
        lambda size: size // 20,
        lambda size: size // 16 + 1,
        table({(0,): 0, (15,): 0, (16,): 1, (31,): 1, (8 * 10**9,): 5 * 10**8}),  # the lazy one
    ]
    far_off = staticmethod(lambda size: size // 4)
    right_says = "16 "


class TestLargestBatch(RunTests):
    checker = staticmethod(notebook_01.check_largest_batch)
    # 19.2 MB are held and 0.55 MB an image comes on top: 54.4 MB with 64 images, 89.6 MB with 128
    right = [local(64, 54_400_000), local(64, 54_400_000, seed=1, max_steps=5)]
    missed = [
        (local(128, 89_600_000), "every rank has to stay below 60.0 MB"),
        (local(1, 19_750_000), "next power of two would still fit"),
        (local(32, 36_800_000), "next power of two would still fit"),
        (local(72, 58_800_000), "isn't a power of two"),
        (local(64, None), "one-step run"),
        (local(128, 50_000_000, dropout=False), "keeps dropout at True; your run has False"),
        (attempt(UNDER_LIMITS, strategy="ddp"), "asks for the local strategy; your run uses 'ddp'"),
    ]
    wrong = [local(64, 54_400_000, model="simple")]  # it changes what the text leaves as it is
