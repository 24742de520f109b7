"""What the memory levers leave of a step's peak, from arithmetic alone: no torch import.

The model is a stack of equal blocks, each a unit, with little around them, as a transformer is. Backward walks through
the stack from the last block to the first. At each block it holds the state, the gradients of the blocks behind it, what
is kept of the blocks before it, and the block it is in: whole. The highest point of that walk is the peak.

What FSDP gathers, copies and frees, and in which order, is read from its traces on CPU ranks (notebook 07). Padding is
left aside, and so is what attention computes in fp32 under bf16: measured peaks are within 1 % in fp32, 2 % in bf16.
"""

from dataclasses import dataclass

from fsdp_helpers.config import is_sharded
from fsdp_helpers.planning.state import FP32_BYTES, WITHOUT_GRADIENT_BYTES


@dataclass(frozen=True, kw_only=True)
class BlockBytes:
    """What one block needs in a step, for the images of one micro-batch of one rank."""

    kept_bytes: int  # what autograd keeps from forward to backward, the block's input included
    input_bytes: int  # of those, the input: all that activation checkpointing keeps
    products_bytes: int  # the outputs of its matrix products: what selective checkpointing keeps besides
    working_bytes: int  # the most that backward has in flight within the block, on top of what is kept

    def waiting_bytes(self, activation_checkpointing: str) -> int:
        """What is kept of the block while it waits for its turn in backward."""
        if activation_checkpointing == "units":
            return self.input_bytes
        return self.kept_bytes if activation_checkpointing == "none" else self.input_bytes + self.products_bytes


def transformer_block_bytes(
    *, images: int, tokens: int, width: int, num_heads: int, dropout: bool = True
) -> BlockBytes:
    """An fp32 `nn.TransformerEncoderLayer` (norm first, ReLU, hidden layer 4 x width) on the CPU.

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
    """What backward has in flight at the highest point of such a block, where it enters the hidden layer from behind.

    In values a token: the gradient that came in, h; the same behind the last mask, h, when that mask, h, is freed; and
    the hidden layer's, 4 h. Beside them the gradient of the second weight, 4 h x h.
    """
    return value_bytes * (images * tokens * 5 * width + 4 * width * width)


@dataclass(frozen=True, kw_only=True)
class Stack:
    """The model: equal blocks, and the parameters around them, which belong to the root unit."""

    num_blocks: int
    block_params: int
    root_params: int
    block: BlockBytes

    @property
    def num_params(self) -> int:
        return self.num_blocks * self.block_params + self.root_params


@dataclass(frozen=True, kw_only=True)
class Levers:
    """How a step is run; the words are those of `TrainConfig`."""

    strategy: str  # local, ddp, or fsdp-auto-wrap with each block a unit
    api: str = "fsdp2"
    world_size: int = 1
    precision: str = "fp32"
    activation_checkpointing: str = "none"
    micro_batches: int = 1
    sync_micro_batches: bool = False

    @property
    def value_bytes(self) -> int:
        """Of a gathered parameter, and of its gradient until it is reduced."""
        return 2 if self.precision == "bf16" else FP32_BYTES

    @property
    def sum_bytes(self) -> int:
        """Of a gradient that waits for more micro-batches: FSDP1 adds up in the gathered precision, FSDP2 in fp32."""
        return self.value_bytes if self.api == "fsdp1" else FP32_BYTES


def peak_of_step(stack: Stack, levers: Levers) -> int:
    """The highest point of a step, in bytes on one rank; `stack.block` is for the images of one micro-batch.

    Raises ValueError for a strategy whose units are not the blocks.
    """
    if levers.strategy not in ("local", "ddp", "fsdp-auto-wrap"):
        raise ValueError(f"no formula for strategy {levers.strategy!r}; there is one for local, ddp, fsdp-auto-wrap")
    walk = range(stack.num_blocks)  # how many blocks still wait for their backward
    if is_sharded(levers.strategy):
        return max(_peak_at_unit(stack, levers, before, held) for held in _gradients_held(levers) for before in walk)
    return max(_peak_at_block(stack, levers, before) for before in walk)


def _peak_at_block(stack: Stack, levers: Levers, before: int) -> int:
    """Every rank a whole model; `before` blocks wait, one is in backward, the others have their gradients."""
    with_gradients = stack.num_blocks - 1 - before if levers.micro_batches == 1 else stack.num_blocks
    buckets = stack.num_params if levers.strategy == "ddp" else 0
    return (
        WITHOUT_GRADIENT_BYTES * stack.num_params
        + FP32_BYTES * (buckets + with_gradients * stack.block_params + stack.root_params)
        + _activations(stack, levers, before)
    )


def _peak_at_unit(stack: Stack, levers: Levers, before: int, held: tuple[str, str]) -> int:
    """FSDP: the highest of three moments at a unit, beside slices, gradients, and the root gathered whole.

    `held` says what there is of the gradients of the units behind this one, and of this one and those before it.
    """
    behind = stack.num_blocks - 1 - before
    unit = stack.block_params
    of_slice = FP32_BYTES * unit // levers.world_size
    gathered = levers.value_bytes * unit
    fetched = gathered if before else 0  # the next unit's parameters come while this one is in backward
    waiting = stack.block.waiting_bytes(levers.activation_checkpointing)
    gradient = {"none": 0, "slice": of_slice, "whole": levers.sum_bytes * unit}
    behind_holds, rest_holds = held
    own = gradient[rest_holds]
    # FSDP2 keeps what went into a reduce-scatter until the next one.
    sent = FP32_BYTES * unit if levers.api == "fsdp2" and behind and behind_holds == "slice" else 0

    gathering = gathered + 2 * fetched + sent + own + (before + 1) * waiting  # gathered into a buffer, then copied
    computing = gathered + fetched + sent + own + _activations(stack, levers, before)
    reducing = 0
    if behind_holds == "slice":
        # What is sent and its copy, in fp32, beside the slice that comes out; the parameters are freed already.
        reducing = fetched + 2 * FP32_BYTES * unit + of_slice + before * waiting
    if reducing and levers.api == "fsdp1":  # and what it added up before, and what it converted to fp32
        reducing += own + (gathered if levers.precision == "bf16" else 0)
    return (
        WITHOUT_GRADIENT_BYTES * stack.num_params // levers.world_size
        + 2 * levers.value_bytes * stack.root_params
        + behind * gradient[behind_holds]
        + before * gradient[rest_holds]
        + max(gathering, computing, reducing)
    )


def _gradients_held(levers: Levers) -> list[tuple[str, str]]:
    """For each kind of micro-batch: the gradients of units behind in the walk, and of the other units."""
    if levers.micro_batches == 1:
        return [("slice", "none")]
    if levers.sync_micro_batches:
        return [("slice", "slice")]  # from the second on
    return [("whole", "whole"), ("slice", "whole")]  # one in the middle, and the last, which reduces


def _activations(stack: Stack, levers: Levers, before: int) -> int:
    """The blocks that wait, and the one in backward, which is whole: what was not kept has been recomputed."""
    block = stack.block
    return before * block.waiting_bytes(levers.activation_checkpointing) + block.kept_bytes + block.working_bytes
