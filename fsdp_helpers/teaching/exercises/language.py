"""Exercises of notebook 13: a loss that counts tokens, logits in chunks, and adapters that are saved alone."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
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
from fsdp_helpers.ranks.exchange import gather_over_ranks
from fsdp_helpers.teaching.exercises.answers import exercise, expect
from fsdp_helpers.teaching.exercises.on_ranks import RANKS, TOLERANCE, first_of, in_words, run_on_ranks
from fsdp_helpers.teaching.exercises.own_module import import_own, read_module
from fsdp_helpers.teaching.lessons.language import rank_parts, whole_gradient
from fsdp_helpers.teaching.lessons.language_memory import ADAPTERS, add_adapters

SHAPE = LlamaShape(width=32, depth=2, num_heads=4, num_kv_heads=2, mlp_width=64, vocabulary=256, rope_base=1e4)
NUM_UNITS = SHAPE.depth + 1
LENGTHS = (40, 3, 17, 9, 30, 25, 6, 12, 50, 21, 8, 35)  # of a batch's documents: 2 and 3 ranks have 6 and 4
PARTS = 2
WORDS, NUM_TOKENS = 4_000, 256  # of the logits in chunks
LOGITS_BYTES = 4 * WORDS * NUM_TOKENS  # 4.1 MB; a plain loss needs them three times
CHUNKED_PEAK_BYTES = LOGITS_BYTES + 4 * WORDS * SHAPE.width  # four chunks, 3 / 4 of it, and the head's gradient
ADAPTER_RANK = 4

# ---------------------------------------------------------------- tokens


@exercise("13")
def check_token_loss(module: str = "my_tokens", ranks: tuple[int, ...] = RANKS) -> str:
    """Notebook 13: `backward_by_tokens(model, parts)`, the gradient of the mean over all ranks' tokens, and the mean."""
    read_module(module, "backward_by_tokens")
    for world_size in ranks:
        for rank, found in enumerate(run_on_ranks(tokens_by_reader, module, world_size)):
            _expect_tokens(found, f"on {world_size} ranks, rank {rank}: ")
    return f"Right: every token counts once, on {in_words(ranks)} ranks, with one reduction of each unit."


def _expect_tokens(found: dict[str, float], says: str) -> None:
    expect(found["reduced"] > 0, f"{says}nothing was reduced; which backward sends the gradients?")
    expect(
        found["reduced"] <= NUM_UNITS,
        f"{says}{found['reduced']} reduce-scatters were seen; the model has {NUM_UNITS} units",
    )
    expect(
        abs(found["length"] - 1) < TOLERANCE,
        f"{says}the gradient is {found['length']:.3f} times as long as in one process",
        "wrong-summed-loss",
    )
    expect(
        found["error"] < TOLERANCE,
        f"{says}the gradient is {found['error']:.1%} off that of one process; does every token have the same weight?",
        "wrong-mean-of-means",
    )
    expect(
        abs(found["given"] - found["right"]) < TOLERANCE,
        f"{says}the loss returned is {found['given']:.5f}, that of one process {found['right']:.5f}",
    )


def tokens_by_reader(rank: int, world_size: int, module: str) -> dict[str, float]:
    """Compare the reader's gradient and loss of one batch with those of one process."""
    backward_by_tokens = import_own(module, "backward_by_tokens")
    documents = [chr(97 + index) * (length // 2) + "z" * (length - length // 2) for index, length in enumerate(LENGTHS)]
    plain, model = build_llama(), shard_llama(build_llama(), world_size)
    (batch,) = rank_parts(documents, 1, 0, 1)
    right = plain(*batch) / (batch[1] != IGNORED).sum()
    right.backward()
    with trace_collectives() as seen:
        given = backward_by_tokens(model, rank_parts(documents, PARTS, rank, world_size))
    reduced = sum(event.op == "reduce_scatter" for event in seen)
    if not reduced:
        return {"reduced": 0}
    mine, whole = whole_gradient(model), whole_gradient(plain)
    return {
        "reduced": reduced,
        "length": (mine.norm() / whole.norm()).item(),
        "error": ((mine - whole).norm() / whole.norm()).item(),
        "given": float(given) if isinstance(given, int | float | Tensor) else float("nan"),
        "right": right.item(),
    }


def build_llama() -> Llama:
    """Build a small Llama, the same on every rank, with weights large enough that tokens differ."""
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
    """Notebook 13: `chunked_loss(hidden, head, targets)`: the same sum and gradients, at a third of the bytes."""
    read_module(module, "chunked_loss")
    for world_size in ranks:
        for rank, found in enumerate(run_on_ranks(chunks_by_reader, module, world_size)):
            _expect_chunks(found, f"on {world_size} ranks, rank {rank}: ")
    return f"Right: {format_bytes(found['peak_bytes'])} in place of {format_bytes(3 * LOGITS_BYTES)}, the same numbers."


def _expect_chunks(found: dict[str, float], says: str) -> None:
    expect(
        abs(found["loss"] - found["right"]) < TOLERANCE * abs(found["right"]),
        f"{says}the sum of the losses is {found['loss']:.3f} instead of {found['right']:.3f}",
    )
    expect(found["error"] < TOLERANCE, f"{says}the gradient is {found['error']:.1%} off that of the plain loss")
    expect(
        found["peak_bytes"] < 1.05 * CHUNKED_PEAK_BYTES,
        f"{says}head and loss peak at {format_bytes(found['peak_bytes'])}, the target is below "
        f"{format_bytes(1.05 * CHUNKED_PEAK_BYTES)}; which logits does backward still have?",
    )


def chunks_by_reader(rank: int, world_size: int, module: str) -> dict[str, float]:
    """Run the reader's loss in a sharded model, and measure its memory alone."""
    chunked_loss = import_own(module, "chunked_loss")
    plain, model = build_llama(), shard_llama(build_llama(), world_size)
    random = torch.Generator().manual_seed(1)
    numbers = torch.randint(SHAPE.vocabulary, (2, 26), generator=random)
    targets = numbers.roll(-1, dims=1).masked_fill(numbers < 30, IGNORED)
    right, given = plain(numbers, targets), model(numbers, targets, chunked_loss)
    if not isinstance(given, Tensor):
        raise TypeError(f"chunked_loss returns a {type(given).__name__}; a tensor is asked for")
    for loss in (right, given):
        loss.backward()
    mine, whole = whole_gradient(model), whole_gradient(plain)
    return {
        "loss": given.item(),
        "right": right.item(),
        "error": ((mine - whole).norm() / whole.norm()).item(),
        "peak_bytes": peak_of(chunked_loss),
    }


def peak_of(loss: Callable[..., Tensor] = summed_loss) -> int:
    """Return the peak bytes of a loss and its head, above weights and hidden states."""
    torch.manual_seed(0)
    head, hidden = nn.Linear(SHAPE.width, WORDS, bias=False), torch.randn(1, NUM_TOKENS, SHAPE.width)
    hidden.requires_grad_()
    targets = torch.randint(WORDS, (1, NUM_TOKENS))
    with trace_memory("cpu") as trace:
        loss(hidden, head, targets).backward()
    return trace.whole().curve.peak_bytes


# ---------------------------------------------------------------- adapters


@dataclass(frozen=True, kw_only=True)
class SavedByReader:
    """The content of the reader's file, and the result of loading it, on one rank."""

    problem: str | None  # with the file
    names: tuple[str, ...] = ()  # in the file
    restored: float = 0.0  # the largest difference of logits after loading from those before saving
    base_kept: bool = False


@exercise("13")
def check_adapters(module: str = "my_adapters", ranks: tuple[int, ...] = RANKS) -> str:
    """Notebook 13: `save_adapters(model, path)` and `load_adapters(model, path)`: what is trained, and nothing else."""
    for name in ("save_adapters", "load_adapters"):
        read_module(module, name)
    expected = {name for name, own in add_adapters(Llama(SHAPE), ADAPTER_RANK).named_parameters() if own.requires_grad}
    with tempfile.TemporaryDirectory() as folder:
        for world_size in ranks:
            path = str(Path(folder, f"adapters-{world_size}.safetensors"))
            for rank, found in enumerate(run_on_ranks(adapters_by_reader, module, world_size, path)):
                _expect_adapters(found, expected, f"on {world_size} ranks, rank {rank}: ")
    return f"Right: {len(expected)} tensors and nothing else, saved and loaded on {in_words(ranks)} ranks."


def _expect_adapters(found: SavedByReader, expected: set[str], says: str) -> None:
    expect(found.problem is None, f"{says}{found.problem}")
    extra, lacking = sorted(set(found.names) - expected), sorted(expected - set(found.names))
    expect(not lacking, f"{says}the file lacks {len(lacking)} trained tensors, {first_of(lacking)} among them")
    expect(not extra, f"{says}the file has {len(extra)} tensors that are not trained, {first_of(extra)} among them")
    expect(found.restored < TOLERANCE, f"{says}after loading, logits are {found.restored:.2f} off those before saving")
    expect(found.base_kept, f"{says}loading changes frozen weights")


def adapters_by_reader(rank: int, world_size: int, module: str, path: str) -> SavedByReader:
    """Let the reader save adapters, set them to zero, and let the reader load them."""
    save_adapters, load_adapters = (import_own(module, name) for name in ("save_adapters", "load_adapters"))
    model = add_adapters(build_llama(), ADAPTER_RANK)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(ADAPTERS):
                parameter.normal_(std=0.3)
    shapes = {name: own.shape for name, own in model.named_parameters() if own.requires_grad}
    model = shard_llama(model, world_size)
    numbers = torch.arange(24).view(2, 12)
    right = logits_of(model, numbers)
    save_adapters(model, path)
    gather_over_ranks(None)  # rank 0 may still be writing
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        return SavedByReader(problem=f"{Path(path).name} cannot be read: {type(error).__name__}; is it safetensors?")
    if any(tensors[name].shape != shape for name, shape in shapes.items() if name in tensors):
        return SavedByReader(problem="the file's tensors are not whole; a rank has its rows only")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.zero_()
    gather_over_ranks(None)
    load_adapters(model, path)
    frozen = {name: own.full_tensor() for name, own in model.named_parameters() if not own.requires_grad}
    before = dict(build_llama().named_parameters())
    return SavedByReader(
        problem=None,
        names=tuple(tensors),
        restored=(logits_of(model, numbers) - right).abs().max().item(),
        base_kept=all(torch.equal(value, before[name]) for name, value in frozen.items()),
    )


@torch.no_grad()
def logits_of(model: Llama, numbers: Tensor) -> Tensor:
    """Return logits, and leave the root sharded, so that its parameters can be changed."""
    logits = model(numbers)
    model.reshard()
    return logits
