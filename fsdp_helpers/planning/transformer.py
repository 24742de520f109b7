"""The memory of a transformer block and of a stack of equal blocks in a step, from arithmetic alone: no torch import."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fsdp_helpers.planning.profile import ROOT, Moment, StepProfile
from fsdp_helpers.planning.state import FP32_BYTES


@dataclass(frozen=True, kw_only=True)
class BlockBytes:
    """One block's bytes in a step, for one micro-batch of one rank."""

    kept_bytes: int  # what autograd keeps from forward to backward, the block's input included
    input_bytes: int  # of those, the input: all that activation checkpointing keeps
    products_bytes: int  # the outputs of its matrix products: what selective checkpointing keeps besides
    working_bytes: int  # the most that backward has in flight within the block, on top of what is kept
    leaving_bytes: int = 0  # kept and in flight at the block's first product, when all later gradients are there

    def waiting_bytes(self, activation_checkpointing: str) -> int:
        """Return the bytes kept of the block until backward reaches it."""
        if activation_checkpointing == "units":
            return self.input_bytes
        return self.kept_bytes if activation_checkpointing == "none" else self.input_bytes + self.products_bytes


def transformer_block_bytes(
    *, images: int, tokens: int, width: int, num_heads: int, dropout: bool = True
) -> BlockBytes:
    """Count an fp32 `nn.TransformerEncoderLayer` (norm first, ReLU, hidden layer 4 x width) on the CPU.

    The count of Korthikanti et al. 2022, arXiv:2205.05198, section 4.1, redone for this layer: fp32 instead of
    16-bit values, a second dropout in the hidden layer, masks of 4 bytes instead of 1, attention written out (with
    dropout) or fused (without). In values a token, h the width, a heads, s tokens:

    - attention: norm's input h and output h; q and k h each; v within q, k, v 3 h; scores, mask and product a s each;
      the input of the output projection h; its dropout mask h
    - hidden layer: norm's input h and output h; ReLU's output, its mask and their product 4 h each; the last mask h
    - both norms: mean and standard deviation, 4
    """
    values = images * tokens
    with_masks = 24 * width + 3 * num_heads * tokens + 4
    fused = 12 * width + num_heads + 4  # no masks, dropout's input is its output, the scores are never written
    scores = num_heads * tokens + width if dropout else 0
    return BlockBytes(
        kept_bytes=FP32_BYTES * values * (with_masks if dropout else fused),
        input_bytes=FP32_BYTES * values * width,
        products_bytes=FP32_BYTES * values * (9 * width + scores),  # q, k, v; scores and product; output; 4 h; h
        working_bytes=transformer_working_bytes(images=images, tokens=tokens, width=width),
    )


def transformer_working_bytes(*, images: int, tokens: int, width: int, value_bytes: int = FP32_BYTES) -> int:
    """Return the bytes in flight at the highest point of such a block's backward, where it enters the hidden layer.

    In values a token: the gradient that came in, h; the same behind the last mask, h, when that mask, h, is freed; and
    the hidden layer's, 4 h. Beside them the gradient of the second weight, 4 h x h.
    """
    return value_bytes * (images * tokens * 5 * width + 4 * width * width)


@dataclass(frozen=True, kw_only=True)
class HeadBytes:
    """The layers after the blocks: the last norm, the head, the loss."""

    kept_bytes: int = 0  # from forward to backward
    forward_bytes: int = 0  # in flight in the head's forward, on top of what is kept
    working_bytes: int = 0  # in flight when backward goes through the loss, on top of what is kept
    entering_bytes: int | None = None  # what is there when backward enters the head; what is kept, if left out
    inside_bytes: int = 0  # in flight in the head's backward, on top of that
    parameters: tuple[str, ...] = ()  # whose gradients are finished before backward enters a block


def stack_profile(
    blocks: Sequence[str],
    block_shapes: dict[str, tuple[int, ...]],
    root_shapes: dict[str, tuple[int, ...]],
    block: BlockBytes,
    activation_checkpointing: str = "none",
    head: HeadBytes | None = None,
    *,
    outer_units: Sequence[str] = (),
    tied: dict[str, str] | None = None,
) -> StepProfile:
    """One step of a model of equal blocks, called `blocks`, for one rank's images; without a `head` all else is small.

    Backward walks from the last block to the first. At each it holds what the earlier blocks keep and all of this one,
    because what was not kept has been recomputed. Its gradients are finished one after the other; a wide block with few
    tokens peaks with the last of them. The modules `outer_units`, if there are two, are in front of the blocks and
    behind them.
    """
    head = head or HeadBytes()
    waiting = block.waiting_bytes(activation_checkpointing)
    shapes = {f"{name}.{parameter}": shape for name in blocks for parameter, shape in block_shapes.items()}
    late = [name for name in root_shapes if name not in head.parameters]
    first, last = outer_units or (None, None)
    return StepProfile(
        shapes=root_shapes | shapes,
        moments=(
            _moment("enter_forward", ROOT, 0),
            *_forward_of(first, 0),
            *_forward(blocks, waiting),
            *_around_the_loss(last, len(blocks) * waiting, head),
            *_backward(blocks, block_shapes, block, waiting),
            *((_moment("enter_backward", first, 0),) if first else ()),
            *(_moment("gradient", name, 0) for name in late),
        ),
        tied=tied or {},
    )


def _around_the_loss(name: str | None, blocks_bytes: int, head: HeadBytes) -> Iterator[Moment]:
    """Yield the events of the head's forward, the loss in both directions, and the head's backward."""
    at_the_end = blocks_bytes + head.kept_bytes
    entering = at_the_end if head.entering_bytes is None else blocks_bytes + head.entering_bytes
    yield from _forward_of(name, at_the_end, at_the_end + head.forward_bytes)
    yield _moment("leave_forward", ROOT, at_the_end, at_the_end + max(head.forward_bytes, head.working_bytes))
    yield _moment("enter_backward", ROOT, entering)
    yield _moment("enter_backward", name or ROOT, entering, entering + head.inside_bytes)
    for parameter in head.parameters:
        yield _moment("gradient", parameter, blocks_bytes)
        if name and parameter.startswith(f"{name}."):
            yield _moment("leave_backward", name, blocks_bytes)


def _forward_of(name: str | None, kept_bytes: int, highest_bytes: int = 0) -> Iterator[Moment]:
    """Go through one of the outer units, if it is one."""
    if name:
        yield _moment("enter_forward", name, kept_bytes, highest_bytes)
        yield _moment("leave_forward", name, kept_bytes)


def _forward(blocks: Sequence[str], waiting: int) -> Iterator[Moment]:
    for before, name in enumerate(blocks):
        yield _moment("enter_forward", name, before * waiting)
        yield _moment("leave_forward", name, (before + 1) * waiting)


def _backward(
    blocks: Sequence[str], block_shapes: dict[str, tuple[int, ...]], block: BlockBytes, waiting: int
) -> Iterator[Moment]:
    for before, name in reversed(list(enumerate(blocks))):
        whole = before * waiting + block.kept_bytes + block.working_bytes
        yield _moment("enter_backward", name, (before + 1) * waiting, whole)
        *finished, last = (f"{name}.{parameter}" for parameter in reversed(block_shapes))
        yield from (_moment("gradient", parameter, before * waiting) for parameter in finished)
        yield _moment("gradient", last, before * waiting, before * waiting + block.leaving_bytes)
        yield _moment("leave_backward", name, before * waiting)


def _moment(event: str, name: str, activation_bytes: int, highest_bytes: int = 0) -> Moment:
    highest_bytes = max(activation_bytes, highest_bytes)
    return Moment(event=event, name=name, activation_bytes=activation_bytes, highest_bytes=highest_bytes)
