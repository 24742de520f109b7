"""The exercises of notebook 05: right answers pass, plausible wrong ones do not."""

import math

from small_exercises import FunctionTests, table

from fsdp_helpers.teaching.exercises import offload


class TestOffloadSplit(FunctionTests):
    checker = staticmethod(offload.check_offload_split)
    right = [lambda p, n: (0, 16 * p / n), lambda p, n: [0.0, 16 * p // n]]
    wrong = [
        lambda p, n: (4 * p / n, 12 * p / n),
        lambda p, n: (0, 16 * p),
        lambda p, n: (16 * p / n, 0),
        table({(1_000_000, 1): (0, 16_000_000), (94_104_234, 2): (0, 752_833_872)}),  # the lazy one
    ]
    far_off = staticmethod(lambda p, n: (0, 5))
    right_says = "16,000,000"


class TestImagesToHide(FunctionTests):
    checker = staticmethod(offload.check_images_to_hide)
    right = [
        lambda p, root, n, image_s, speed: math.ceil(4 * (2 * p - root) / n / speed / image_s),
        lambda p, root, n, image_s, speed: next(
            images for images in range(1, 10**4) if images * image_s >= 4 * ((p - root) * 2 + root) / (n * speed)
        ),
    ]
    wrong = [
        lambda p, root, n, image_s, speed: math.ceil(4 * p / n / speed / image_s),  # gathered once
        lambda p, root, n, image_s, speed: math.ceil(8 * p / n / speed / image_s),  # the root twice as well
        lambda p, root, n, image_s, speed: math.ceil(4 * (3 * p - root) / n / speed / image_s),  # one way at a time
        lambda p, root, n, image_s, speed: math.ceil(4 * (2 * p - root) / speed / image_s),  # whole tensors
        lambda p, root, n, image_s, speed: int(4 * (2 * p - root) / n / speed / image_s),  # rounded down
        lambda p, root, n, image_s, speed: 4 * (2 * p - root) / n / speed / image_s,  # a part of an image
        table({(1_000_000, 0, 1, 1e-3, 1e9): 8, (1_000_000, 1_000_000, 1, 1e-3, 1e9): 4}),  # the lazy one
    ]
    far_off = staticmethod(lambda *link: 5)
    right_says = "8 images"
