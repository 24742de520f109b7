"""The memory of a transformer block and of a stack of equal blocks in a step, calculated. No torch import."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

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
        """Return the block's bytes that wait until backward reaches it."""
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
    waiting_bytes: int = 0  # of a tied head's gradient, until backward has come to the embedding


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A block: its parameters' shapes by name, in the order of forward, and its bytes in a step."""

    shapes: dict[str, tuple[int, ...]]
    bytes: BlockBytes


def stack_profile(
    blocks: Sequence[str],
    block_shapes: dict[str, tuple[int, ...]],
    root_shapes: dict[str, tuple[int, ...]],
    block: BlockBytes,
    activation_checkpointing: str = "none",
    head: HeadBytes | None = None,
    **others,
) -> StepProfile:
    """Return one step of a model of equal blocks, called `blocks`; the rest is as in `layers_profile`."""
    layer = Layer(shapes=block_shapes, bytes=block)
    return layers_profile(dict.fromkeys(blocks, layer), root_shapes, activation_checkpointing, head, **others)


def layers_profile(
    layers: Mapping[str, Layer],
    root_shapes: dict[str, tuple[int, ...]],
    activation_checkpointing: str = "none",
    head: HeadBytes | None = None,
    *,
    outer_units: Sequence[str] = (),
    tied: dict[str, str] | None = None,
    frozen: Collection[str] = (),
) -> StepProfile:
    """Return one step of a model of blocks, for one rank's images or tokens; without a `head`, the rest is small.

    Backward walks from the last block to the first. At each it holds what the earlier blocks keep and all of this one,
    because the rest has been recomputed. Gradients are finished one after the other; a wide block with few
    tokens peaks with the last of them. The modules `outer_units`, if there are two, are in front of the blocks and
    behind them. Parameters in `frozen` get no gradient.
    """
    head = head or HeadBytes()
    waiting = [layer.bytes.waiting_bytes(activation_checkpointing) for layer in layers.values()]
    before = [0, *accumulate(waiting)]  # bytes that wait when forward enters a block, and at the end
    shapes = {f"{name}.{part}": shape for name, layer in layers.items() for part, shape in layer.shapes.items()}
    late = [name for name in root_shapes if name not in head.parameters]
    first, last = outer_units or (None, None)
    moments = (
        _moment("enter_forward", ROOT, 0),
        *_forward_of(first, 0),
        *_forward(layers, before),
        *_around_the_loss(last, before[-1], head),
        *_backward(layers, [size + head.waiting_bytes for size in before]),
        *((_moment("enter_backward", first, 0),) if first else ()),
        *(_moment("gradient", name, 0, head.waiting_bytes) for name in late),
    )
    return StepProfile(
        shapes=root_shapes | shapes,
        moments=tuple(moment for moment in moments if moment.event != "gradient" or moment.name not in frozen),
        frozen=frozenset(frozen),
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
        yield _moment("gradient", parameter, blocks_bytes + head.waiting_bytes)
        if name and parameter.startswith(f"{name}."):
            yield _moment("leave_backward", name, blocks_bytes)


def _forward_of(name: str | None, kept_bytes: int, highest_bytes: int = 0) -> Iterator[Moment]:
    """Go through one of the outer units, if it is one."""
    if name:
        yield _moment("enter_forward", name, kept_bytes, highest_bytes)
        yield _moment("leave_forward", name, kept_bytes)


def _forward(layers: Mapping[str, Layer], before: Sequence[int]) -> Iterator[Moment]:
    for number, name in enumerate(layers):
        yield _moment("enter_forward", name, before[number])
        yield _moment("leave_forward", name, before[number + 1])


def _backward(layers: Mapping[str, Layer], before: Sequence[int]) -> Iterator[Moment]:
    for number, (name, layer) in reversed(list(enumerate(layers.items()))):
        block, earlier = layer.bytes, before[number]
        yield _moment("enter_backward", name, before[number + 1], earlier + block.kept_bytes + block.working_bytes)
        *finished, last = (f"{name}.{parameter}" for parameter in reversed(layer.shapes))
        yield from (_moment("gradient", parameter, earlier) for parameter in finished)
        yield _moment("gradient", last, earlier, earlier + block.leaving_bytes)
        yield _moment("leave_backward", name, earlier)


def _moment(event: str, name: str, activation_bytes: int, highest_bytes: int = 0) -> Moment:
    highest_bytes = max(activation_bytes, highest_bytes)
    return Moment(event=event, name=name, activation_bytes=activation_bytes, highest_bytes=highest_bytes)
