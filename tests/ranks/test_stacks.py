"""Where a rank hangs: the reader's line, wherever the libraries are installed."""

import pytest

from fsdp_helpers.ranks import stacks

VENV, HOME = "/venv/lib64/python3.11/site-packages", "/home/j\\xf6rg"  # `faulthandler` escapes what is not ASCII
PACKAGE = f"{HOME}/project/fsdp_helpers"
COLLECTIVE = [
    ("{library}/torch/distributed/distributed_c10d.py", 4181, "all_reduce"),
    ("{library}/torch/distributed/c10d_logger.py", 83, "wrapper"),
]
BODY = [(f"{PACKAGE}/ranks/launch.py", 40, "run_worker"), ("<string>", 1, "<module>")]
READERS = (f"{HOME}/my_ddp.py", 7, "train")
OURS = (f"{PACKAGE}/sharding/gradients.py", 9, "reduce")


def stack(frames: list[tuple], library: str = VENV) -> str:
    lines = [f'  File "{path.format(library=library)}", line {line} in {name}\n' for path, line, name in frames]
    return "Current thread 0x00007f (most recent call first):\n" + "".join(lines)


@pytest.mark.parametrize(
    "library",
    [VENV, "/usr/lib/python3/dist-packages", f"{HOME}/.local/lib/python3.11/site-packages", "/elsewhere"],
)
def test_packages_are_libraries_wherever_they_are(library):
    written = stack([*COLLECTIVE, READERS, *BODY], library)
    assert stacks.describe(written) == "was waiting in all_reduce(), called from my_ddp.py line 7, in train"
    assert stacks.is_in_collective(written) and written.endswith(stacks.ENDS)
    assert not stack([*COLLECTIVE, READERS], library).endswith(stacks.ENDS)


@pytest.mark.parametrize(
    "frames, place",
    [
        ([READERS], "was at my_ddp.py line 7, in train"),
        (COLLECTIVE, "was waiting in all_reduce()"),
        ([*COLLECTIVE, OURS], "was waiting in all_reduce(), called from gradients.py line 9, in reduce"),
        ([*COLLECTIVE, OURS, READERS], "was waiting in reduce(), called from my_ddp.py line 7, in train"),
        ([("Cell In[3]", 2, "<module>")], "was at Cell In[3] line 2"),
        ([], "was still starting"),
    ],
)
def test_a_place_is_a_line_of_the_readers_if_there_is_one(frames, place):
    assert stacks.describe(stack([*frames, *BODY])) == place
