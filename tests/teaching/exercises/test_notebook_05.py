"""The exercises of notebook 05: right answers pass, plausible wrong ones do not."""

import math

from builds import BuildTests
from small_exercises import FunctionTests, table

from fsdp_helpers.teaching.exercises import notebook_05


class TestOffloadSplit(FunctionTests):
    checker = staticmethod(notebook_05.check_offload_split)
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
    checker = staticmethod(notebook_05.check_images_to_hide)
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


# ---------------------------------------------------------------- the build

OTHER_WAY = """
import math

def blocks_to_offload(num_blocks, block_params, world_size, activation_bytes, device_bytes, host_bytes):
    left = device_bytes - activation_bytes - 8 * block_params
    if left < 0:
        return None
    staying = min(num_blocks, math.floor(left * world_size / (16 * block_params)))
    leaving = num_blocks - staying
    return leaving if 16 * block_params * leaving <= host_bytes else None
"""


class TestPlan(BuildTests):
    name = "my_plan"
    checker = staticmethod(notebook_05.check_plan)
    starter = "replace the ... with your answer"
    wrong = [
        ([("range(num_blocks + 1)", "range(1, num_blocks + 1)")], "fits with fewer blocks|with the right number"),
        ([("range(num_blocks + 1)", "reversed(range(num_blocks + 1))")], "also fits with fewer blocks on the host"),
        ([("<= device_bytes", "< device_bytes")], "with the right number|fits with fewer"),
        ([("range(num_blocks + 1)", "range(num_blocks)")], "with the right number of offloaded blocks, the model fits"),
        (
            [("on_host = offloaded * state_bytes", "on_host = offloaded * state_bytes / world_size")],
            "the host would be",
        ),
        ([("    return None\n", "    return 0\n")], "would be too small"),
        ([("            return offloaded\n", "            return str(offloaded)\n")], "it should be a number"),
        ([("at_work = 8", "at_work = none")], "fails: NameError"),
    ]

    def test_another_way_is_accepted(self, write):
        write(OTHER_WAY)
        self.accept(**self.settings)

    def test_lookup_tables_of_sizes_are_refused(self, write):
        write("def blocks_to_offload(*sizes):\n    return {(8, 1000, 2, 0, 0, 0): 3}.get(sizes)\n")
        self.refuse(".")
