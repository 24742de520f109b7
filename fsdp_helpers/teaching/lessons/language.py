"""Rank functions about a pretrained language model: its start, its loss by tokens, its voice. Notebook 13."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from fsdp_helpers.checkpointing.hugging_face import load_hugging_face, read_config
from fsdp_helpers.models.llama import IGNORED, Llama, Loss, generate
from fsdp_helpers.models.shapes import llama_from_config
from fsdp_helpers.ranks.exchange import sum_over_ranks
from fsdp_helpers.ranks.group import rank_device
from fsdp_helpers.teaching.lessons.starts import fill_buffers

Batch = tuple[Tensor, Tensor]  # token numbers and targets, (N, length) each
LEARNING_RATE = 0.1  # of SGD, which sees whether a gradient is right; Adam would hide a wrong factor

# ---------------------------------------------------------------- the start


def start_from_folder(folder: str, mesh: DeviceMesh) -> Llama:
    """Start a sharded Llama from a Hugging Face folder; no rank ever holds more than its own rows of it."""
    with torch.device("meta"):
        model = Llama(llama_from_config(read_config(folder)))  # shapes without bytes
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=rank_device())  # room for this rank's rows
    load_hugging_face(model, folder)  # each rank reads them from several files
    fill_buffers(model)  # the rotary frequencies are in no file
    return model


def start_plain(folder: str) -> Llama:
    """Start the same model in one process."""
    model = Llama(llama_from_config(read_config(folder)))
    load_hugging_face(model, folder)
    return model.to(rank_device())


@dataclass(frozen=True, kw_only=True)
class Started:
    """One rank's findings after a start."""

    own_bytes: int  # of the parameters that the rank keeps
    is_tied: bool
    difference: float  # of logits, from those of the plain model
    without_buffers: float  # the same, if nobody fills the buffers


def look_at_start(rank: int, world_size: int, folder: str, text: str) -> Started:
    """Start from `folder`, and compare the logits of `text` with a plain model's."""
    model = start_from_folder(folder, init_device_mesh(rank_device().type, (world_size,)))
    own_bytes = sum(parameter.to_local().nbytes for parameter in model.parameters())  # before a forward
    numbers = torch.tensor([list(text.encode())], device=rank_device())
    right = start_plain(folder)(numbers)
    difference = (model(numbers) - right).abs().max().item()
    for buffer in model.buffers():
        buffer.zero_()  # what `to_empty` leaves is arbitrary; zeros are the mildest case
    return Started(
        own_bytes=own_bytes,
        is_tied=model.lm_head.weight is model.model.embed_tokens.weight,
        difference=difference,
        without_buffers=(model(numbers) - right).abs().max().item(),
    )


# ---------------------------------------------------------------- sequences of unequal length


def pad(documents: Sequence[str]) -> Batch:
    """Return documents as rows of equal length; a target that counts for nothing stands where a document has ended."""
    texts = [torch.tensor(list(document.encode())) for document in documents]
    numbers = nn.utils.rnn.pad_sequence([text[:-1] for text in texts], batch_first=True)
    targets = nn.utils.rnn.pad_sequence([text[1:] for text in texts], batch_first=True, padding_value=IGNORED)
    return numbers, targets


def pack(documents: Sequence[str]) -> tuple[Tensor, Tensor, Tensor]:
    """Return documents in a row, without a gap: numbers, targets, and to which document each token belongs, (1, T)."""
    texts = [torch.tensor(list(document.encode())) for document in documents]
    numbers = torch.cat([text[:-1] for text in texts])
    targets = torch.cat([text[1:] for text in texts])
    owners = torch.cat([torch.full((len(text) - 1,), index) for index, text in enumerate(texts)])
    return numbers[None], targets[None], owners[None]


def backward_by_tokens(model: nn.Module, parts: Sequence[Batch], loss: Loss | None = None) -> Tensor:
    """Add up the gradient of the mean over all tokens, whatever the lengths, the parts and the ranks; return the mean.

    FSDP averages over ranks, so each sum is multiplied by their number and divided by the number of all tokens.
    """
    num_own = sum((targets != IGNORED).sum() for _, targets in parts)
    num_tokens = sum_over_ranks(num_own)  # the only extra collective: one number
    scale = dist.get_world_size() / num_tokens
    total = torch.zeros((), device=rank_device())
    for index, (numbers, targets) in enumerate(parts):
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(index == len(parts) - 1)  # the last backward reduces the sum
        part = model(numbers, targets, loss)  # a sum
        (part * scale).backward()
        total += part.detach()
    return sum_over_ranks(total) / num_tokens


def backward_by_means(model: nn.Module, parts: Sequence[Batch], loss: Loss | None = None) -> Tensor:
    """Make the usual mistake: a mean over the tokens of each part, then over the parts, then over the ranks."""
    total = torch.zeros((), device=rank_device())
    for index, (numbers, targets) in enumerate(parts):
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(index == len(parts) - 1)
        part = model(numbers, targets, loss) / (targets != IGNORED).sum() / len(parts)
        part.backward()
        total += part.detach()
    return sum_over_ranks(total) / dist.get_world_size()


WAYS = {"means": backward_by_means, "tokens": backward_by_tokens}


def rank_parts(documents: Sequence[str], num_parts: int, rank: int, world_size: int) -> list[Batch]:
    """Return this rank's documents of a batch, as `num_parts` padded micro-batches."""
    share = len(documents) // world_size
    own = documents[rank * share : (rank + 1) * share]
    size = len(own) // num_parts
    parts = [pad(own[start : start + size]) for start in range(0, len(own), size)]
    return [(numbers.to(rank_device()), targets.to(rank_device())) for numbers, targets in parts]


def whole_gradient(model: nn.Module) -> Tensor:
    """Return the whole gradient as one vector, on every rank."""
    return torch.cat([getattr(p.grad, "full_tensor", lambda grad=p.grad: grad)().flatten() for p in model.parameters()])


def error_of_gradient(rank: int, world_size: int, folder: str, documents: Sequence[str], num_parts: int) -> dict:
    """For each way, how far the gradient of a batch is from that of one process: relative, as a norm."""
    plain = start_plain(folder)
    numbers, targets = pad(documents)
    (plain(numbers.to(rank_device()), targets.to(rank_device())) / (targets != IGNORED).sum()).backward()
    right = whole_gradient(plain)
    found = {}
    for name, backward in WAYS.items():
        model = start_from_folder(folder, init_device_mesh(rank_device().type, (world_size,)))
        backward(model, rank_parts(documents, num_parts, rank, world_size))
        found[name] = ((whole_gradient(model) - right).norm() / right.norm()).item()
    return found


def losses_by_tokens(
    rank: int, world_size: int, folder: str, batches: Sequence[Sequence[str]], num_parts: int, loss: Loss | None = None
) -> list[float]:
    """Train a step on each batch of documents; plain in one process, sharded on several. Returns the losses."""
    mesh = init_device_mesh(rank_device().type, (world_size,))
    model = start_plain(folder) if world_size == 1 else start_from_folder(folder, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for documents in batches:
        optimizer.zero_grad()
        losses.append(backward_by_tokens(model, rank_parts(documents, num_parts, rank, world_size), loss))
        optimizer.step()
    return torch.stack(losses).tolist()


def compare_packing(rank: int, world_size: int, folder: str, documents: Sequence[str]) -> dict[str, tuple[int, float]]:
    """Of padded and of packed documents: tokens computed, and the mean loss. Packed without its mask, too."""
    model = start_plain(folder)
    numbers, targets = (rows.to(rank_device()) for rows in pad(documents))
    packed, packed_targets, owners = (row.to(rank_device()) for row in pack(documents))
    count = (targets != IGNORED).sum()
    with torch.no_grad():
        return {
            "padded": (numbers.numel(), (model(numbers, targets) / count).item()),
            "packed": (packed.numel(), (model(packed, packed_targets, documents=owners) / count).item()),
            "packed, no mask": (packed.numel(), (model(packed, packed_targets) / count).item()),
        }


# ---------------------------------------------------------------- it speaks


def unshard_all(model: nn.Module) -> None:
    """Gather every unit, on every rank, and keep it: forwards then need no collective."""
    model.set_reshard_after_forward(False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()


def reshard_all(model: nn.Module) -> None:
    """Undo `unshard_all`. The root never reshards after its forward, since backward begins with it."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    model.set_reshard_after_forward(True)
    model.set_reshard_after_forward(False, recurse=False)


def speak_on_rank_0(rank: int, world_size: int, folder: str, prompt: str, num_bytes: int) -> str | None:
    """Let rank 0 alone generate, while the others go on: every unit was gathered once, before."""
    model = start_from_folder(folder, init_device_mesh(rank_device().type, (world_size,)))
    unshard_all(model)  # a collective: all ranks
    said = generate(model, prompt, num_bytes, context=model.shape.context) if rank == 0 else None  # none in here
    reshard_all(model)
    mean = backward_by_tokens(model, [tuple(rows.to(rank_device()) for rows in pad([prompt]))])  # training goes on
    assert torch.isfinite(mean)
    return said


def mean_loss(model: nn.Module, documents: Sequence[str]) -> float:
    """Return the mean loss over the tokens of all documents, on every rank."""
    numbers, targets = (rows.to(rank_device()) for rows in pad(documents))
    with torch.no_grad():
        return (model(numbers, targets) / (targets != IGNORED).sum()).item()
