"""Exercises for notebook 13: average the loss over documents, cap logits in chunks, and save just the adapters."""

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_helpers.measuring.collectives import trace_collectives
from fsdp_helpers.measuring.memory import trace_memory
from fsdp_helpers.models.llama import IGNORED, Llama, summed_loss
from fsdp_helpers.models.shapes import LlamaShape
from fsdp_helpers.quantities import format_bytes
from fsdp_helpers.ranks.group import gather_over_ranks
from fsdp_helpers.teaching.exercises.answers import exercise
from fsdp_helpers.teaching.exercises.on_ranks import (
    RANKS,
    TOLERANCE,
    Findings,
    first_of,
    judge_on_ranks,
    norm_differs,
    reduced_early,
)
from fsdp_helpers.teaching.exercises.small_net import full_gradient

SHAPE = LlamaShape(
    width=32, depth=2, num_heads=4, num_kv_heads=2, mlp_width=64, vocabulary=256, rope_base=1e4, tied=True
)
NUM_UNITS = SHAPE.depth + 1
# The lengths of a batch's documents, by rank and micro-batch; their number and their lengths vary. A zero is an
# empty row.
LENGTHS = {
    2: (((40, 3, 17, 0), (9,)), ((30,), (25, 6))),
    3: (((40, 3, 17), (9,)), ((30,), (25, 6, 0)), ((12, 50), (21, 8, 35, 4))),
}
WORDS, NUM_TOKENS = 4_000, 256  # for the logits in chunks: the vocabulary's size, and the number of tokens
CAP = 5.0  # for the capped logits
LOGITS_BYTES = 4 * WORDS * NUM_TOKENS  # 4.1 MB
# With four chunks: four tensors, each a quarter of the logits' size, and the head's gradient.
CHUNKED_PEAK_BYTES = LOGITS_BYTES + 4 * WORDS * SHAPE.width
ADAPTED = ("q_proj", "v_proj")  # as in Hu et al. 2021, arXiv:2106.09685
ADAPTERS = ("lora_a", "lora_b")
SCALE = 2.0
ADAPTER_RANK = 4
SECOND = ("second_a", "second_b")  # the adapter that is trained; the first is frozen

# ---------------------------------------------------------------- documents


@exercise("13")
def check_document_loss(module: str = "my_documents", ranks: tuple[int, ...] = RANKS) -> str:
    """Notebook 13: check that `backward_by_documents(model, parts)` averages the loss over all documents."""
    return judge_on_ranks(documents_by_reader, module, ("backward_by_documents",), ranks)


def documents_by_reader(rank: int, world_size: int, backward_by_documents: Callable) -> Findings:
    """Compare the gradient and loss from the reader's code on one batch with the results of a single process."""
    plain, model = build_llama(), shard_llama(build_llama(), world_size)
    parts = [[pad_lengths(lengths) for lengths in own] for own in LENGTHS[world_size]]
    rows = [row for own in LENGTHS[world_size] for lengths in own for row in lengths]
    right = sum(plain(*part) for own in parts for part in own) / sum(length > 0 for length in rows)
    right.backward()
    computed = []
    model.register_forward_pre_hook(lambda _, inputs: computed.append(inputs[0].numel()))
    with trace_collectives() as seen:
        given = backward_by_documents(model, parts[rank])
    reduced = sum(event.op == "reduce_scatter" for event in seen)
    yield reduced == 0, "no gradients were reduced; which backward pass should reduce them?"
    mine, full = full_gradient(model), full_gradient(plain)
    own = sum(numbers.numel() for numbers, _ in parts[rank])
    too_many = f"the model processed {sum(computed)} tokens, but this rank's parts have only {own}"
    yield sum(computed) > own, too_many
    too_often = f"there were {reduced} reduce-scatters, but the model has only {NUM_UNITS} units"
    yield reduced > NUM_UNITS, too_often
    yield reduced_early(seen)
    # The direction before the norm, since only the direction reveals a mean of means.
    along = (mine @ full) / (full @ full)  # how much of it points in the right direction
    turned = ((mine - along * full).norm() / full.norm()).item()
    off = (
        f"the gradient's direction is off by {turned:.0%} of its norm; does every token have the same weight, no matter "
        "which part or rank it's in?"
    )
    yield not turned < TOLERANCE, off, "wrong-mean-of-means"
    yield norm_differs(mine.norm().item(), full.norm().item(), world_size)
    given = float(given) if isinstance(given, int | float | Tensor) else float("nan")
    right = right.item()
    yield not abs(given - right) < TOLERANCE * abs(right), f"the returned loss is {given:.5f} instead of {right:.5f}"
    return "Right: every document counts once, on {ranks} ranks, with one reduction per unit."


def pad_lengths(lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return tokens and targets (documents, longest), with `lengths` tokens to predict; a document may have none."""
    longest = max(lengths)
    numbers, targets = (
        torch.zeros(len(lengths), longest, dtype=torch.long),
        torch.full((len(lengths), longest), IGNORED),
    )
    for row, length in enumerate(lengths):
        tokens = (torch.arange(length + 1) * (row + 3) + 31 * length) % SHAPE.vocabulary
        numbers[row, :length], targets[row, :length] = tokens[:-1], tokens[1:]
    return numbers, targets


def build_llama() -> Llama:
    """Build a small Llama, the same on every rank, whose weights give tokens clearly different logits."""
    torch.manual_seed(0)
    model = Llama(SHAPE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5 if parameter.dim() == 2 else 1)
    return model


def shard_llama(model: Llama, world_size: int) -> Llama:
    mesh = init_device_mesh("cpu", (world_size,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


# ---------------------------------------------------------------- chunks


@exercise("13")
def check_chunks(module: str = "my_chunks", ranks: tuple[int, ...] = RANKS) -> str:
    """Notebook 13: check that `chunked_loss(hidden, head, targets, cap)` caps logits and works chunk by chunk."""
    return judge_on_ranks(chunks_by_reader, module, ("chunked_loss",), ranks)


def capped_loss(hidden: Tensor, head: nn.Module, targets: Tensor, cap: float = CAP) -> Tensor:
    """Return `summed_loss` (which has the shapes) on logits capped to -cap..cap by a tanh, as in Gemma 2."""
    return summed_loss(hidden, lambda inputs: cap * torch.tanh(head(inputs) / cap), targets)


def chunks_by_reader(rank: int, world_size: int, chunked_loss: Callable) -> Findings:
    """Run the reader's loss function in a sharded model, and measure its memory use."""
    chunked_loss = partial(chunked_loss, cap=CAP)
    plain, model = build_llama(), shard_llama(build_llama(), world_size)
    random = torch.Generator().manual_seed(1)
    numbers = torch.randint(SHAPE.vocabulary, (2, 26), generator=random)
    targets = numbers.roll(-1, dims=1).masked_fill(numbers < 30, IGNORED)
    right, given = plain(numbers, targets, capped_loss), model(numbers, targets, chunked_loss)
    if not isinstance(given, Tensor):
        raise TypeError(f"chunked_loss returns an object of type {type(given).__name__}; it should be a tensor")
    for loss in (right, given):
        loss.backward()
    mine, whole = full_gradient(model), full_gradient(plain)
    error = ((mine - whole).norm() / whole.norm()).item()
    given, right, peak_bytes = given.item(), right.item(), peak_of(chunked_loss)
    wrong_sum = f"the sum of the losses is {given:.3f} instead of {right:.3f}"
    yield not abs(given - right) < TOLERANCE * abs(right), wrong_sum
    yield not error < TOLERANCE, f"the gradient differs from the plain loss's gradient by {error:.1%}"
    limit_bytes = 1.05 * CHUNKED_PEAK_BYTES
    too_high = (
        f"the head and the loss peak at {format_bytes(peak_bytes)}; the target is below {format_bytes(limit_bytes)}"
    )
    yield peak_bytes >= limit_bytes, f"{too_high}. Which logits are still in memory in backward?"
    plain_bytes = peak_of(capped_loss)
    return f"Right: a peak of {format_bytes(peak_bytes)}, not {format_bytes(plain_bytes)}, and the same loss."


def peak_of(loss: Callable[..., Tensor]) -> int:
    """Return the peak bytes that a loss and its head add to the weights and hidden states."""
    torch.manual_seed(0)
    head, hidden = nn.Linear(SHAPE.width, WORDS, bias=False), torch.randn(1, NUM_TOKENS, SHAPE.width)
    hidden.requires_grad_()
    targets = torch.randint(WORDS, (1, NUM_TOKENS))
    with trace_memory("cpu") as trace:
        loss(hidden, head, targets).backward()
    return trace.whole().curve.peak_bytes


# ---------------------------------------------------------------- adapters


@exercise("13")
def check_adapters(module: str = "my_adapters", ranks: tuple[int, ...] = RANKS) -> str:
    """Notebook 13: check `save_adapters(model, path)` and `load_adapters(model, path)` on the trained adapter."""
    with tempfile.TemporaryDirectory() as folder:
        return judge_on_ranks(adapters_by_reader, module, ("save_adapters", "load_adapters"), ranks, folder)


def adapters_by_reader(
    rank: int, world_size: int, save_adapters: Callable, load_adapters: Callable, folder: str
) -> Findings:
    """Save the adapters with the reader's code, set them to zero, and load them with the reader's code."""
    path = Path(folder, f"adapters-{world_size}.safetensors")
    model = two_adapters()
    trained = {name: own.detach().clone() for name, own in model.named_parameters() if own.requires_grad}
    before = {name: own.detach().clone() for name, own in model.named_parameters() if not own.requires_grad}
    model = shard_llama(model, world_size)
    numbers = torch.arange(24).view(2, 12)
    right = logits_of(model, numbers)
    save_adapters(model, str(path))
    gather_over_ranks(None)  # rank 0 may still be writing
    tensors = problem = None
    try:
        tensors = load_file(path)
    except FileNotFoundError:
        problem = f"save_adapters didn't write {path.name}"
    except (OSError, SafetensorError) as error:
        problem = f"{path.name} can't be read as safetensors: {type(error).__name__}"
    yield tensors is None, problem
    shards = any(tensors[name].shape != own.shape for name, own in trained.items() if name in tensors)
    yield shards, "the file's tensors don't have their full shapes; a rank has only its shard"
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.zero_()
    gather_over_ranks(None)
    load_adapters(model, str(path))
    frozen = {name: own.full_tensor() for name, own in model.named_parameters() if not own.requires_grad}
    restored = (logits_of(model, numbers) - right).abs().max().item()

    lacking, extra = sorted(trained.keys() - tensors.keys()), sorted(tensors.keys() - trained.keys())
    yield bool(lacking), f"the file lacks {len(lacking)} trained tensors, including {first_of(lacking)}"
    yield bool(extra), f"the file has {len(extra)} tensors that aren't trained, including {first_of(extra)}"
    wrong = first_of([name for name, own in trained.items() if not equal(tensors[name], own)])
    yield bool(wrong), f"in the file, {wrong} differs from the model's values at the time of saving"
    differ = f"after loading, the logits differ by up to {restored:.2f} from the logits before saving"
    yield not restored < TOLERANCE, differ
    kept = all(torch.equal(value, before[name]) for name, value in frozen.items())
    yield not kept, "loading changes frozen weights"
    return f"Right: {len(trained)} tensors and nothing else, saved and loaded on {{ranks}} ranks."


def two_adapters() -> Llama:
    """Build the model with two adapters in some layers, each the product of two thin matrices; only one is trainable."""
    model = build_llama().requires_grad_(False)
    for path, layer in model.named_modules():
        for names in (ADAPTERS, SECOND) if path.endswith(ADAPTED) else ():
            shapes = (ADAPTER_RANK, layer.in_features), (layer.out_features, ADAPTER_RANK)
            for name, shape in zip(names, shapes, strict=True):
                values = torch.empty(shape).normal_(std=0.3)
                layer.register_parameter(name, nn.Parameter(values, requires_grad=names is SECOND))
            layer.register_forward_hook(partial(add_low_rank, names))
    return model


def add_low_rank(names: tuple[str, str], layer: nn.Linear, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    """Add the adapters' product to the layer's output (..., out_features), as a forward hook."""
    first, second = (getattr(layer, name) for name in names)
    return output + SCALE * F.linear(F.linear(inputs[0], first), second)


def equal(first: Tensor, second: Tensor) -> bool:
    """Return True if the dtype, the shape and all values are equal."""
    return first.dtype == second.dtype and torch.equal(first, second)


@torch.no_grad()
def logits_of(model: Llama, numbers: Tensor) -> Tensor:
    """Return the logits (N, length, vocabulary), and reshard the root so that its parameters can be changed."""
    logits = model(numbers)
    model.reshard()
    return logits
