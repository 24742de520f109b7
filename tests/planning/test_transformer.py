"""A transformer block's bytes and a stack of blocks, worked by hand."""

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.planning.peak import peak_of_step
from fsdp_helpers.planning.transformer import BlockBytes, HeadBytes, stack_profile

# Autograd keeps 100 bytes of a block, 8 of them its input; backward has 60 more in flight. 10 parameters each.
BLOCK = BlockBytes(kept_bytes=100, input_bytes=8, products_bytes=40, working_bytes=60)


def two_blocks(checkpointing: str = "none"):
    return stack_profile(["a", "b"], {"weight": (10,)}, {"root.weight": (4,)}, BLOCK, checkpointing)


def peak(checkpointing: str, world_size: int = 1, **settings) -> int:
    return peak_of_step(two_blocks(checkpointing), TrainConfig(**settings), world_size, ["a", "b"]).bytes


def test_what_is_kept_of_a_waiting_block():
    kinds = ("none", "units", "selective")
    assert [BLOCK.waiting_bytes(kind) for kind in kinds] == [100, 8, 48]


def test_a_stack_in_one_process():
    # Parameters and moments 12 x 24 = 288. In the last block nothing has a gradient yet: 2 x 100 + 60.
    assert two_blocks().num_params == 24
    assert peak("none", strategy="local") == 288 + 260
    # Checkpointed: in the last block 8 + 100 + 60 = 168; in the first 160, and the last one's gradient, 40: more.
    assert peak("units", strategy="local") == 288 + 200
    # selective: in the last block 48 + 160 = 208, still above 200
    assert peak("selective", strategy="local") == 288 + 208


def test_a_head_at_the_beginning_of_backward():
    # Two blocks keep 100 each, the head 30, and backward begins with 500 more in flight; nothing has a gradient yet.
    head = HeadBytes(kept_bytes=30, working_bytes=500, parameters=("head.weight",))
    profile = stack_profile(["a", "b"], {"weight": (10,)}, {"root.weight": (4,), "head.weight": (2,)}, BLOCK, head=head)
    found = peak_of_step(profile, TrainConfig(strategy="local"), 1)
    assert (found.bytes, found.when) == (12 * 26 + 2 * 100 + 30 + 500, "the loss")
    # The head's gradient is the first that is finished: before backward enters a block.
    events = [(moment.event, moment.name) for moment in profile.moments]
    assert events.index(("gradient", "head.weight")) < events.index(("enter_backward", "b"))
    assert events[-1] == ("gradient", "root.weight")
