"""Rank functions about the memory of a language model: logits in chunks, and adapters on a frozen base. Notebook 13."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from fsdp_helpers.checkpointing.hugging_face import load_hugging_face, read_config
from fsdp_helpers.measuring.memory import state_bytes, trace_memory
from fsdp_helpers.models.llama import Llama, summed_loss
from fsdp_helpers.models.shapes import LlamaShape, llama_from_config
from fsdp_helpers.ranks.group import rank_device
from fsdp_helpers.records import MemoryCurve, StateBytes
from fsdp_helpers.teaching.lessons.language import (
    backward_by_tokens,
    mean_loss,
    rank_parts,
    start_from_folder,
    start_plain,
)
from fsdp_helpers.teaching.lessons.starts import fill_buffers

# ---------------------------------------------------------------- logits in chunks


def chunked_loss(hidden: Tensor, head: nn.Module, targets: Tensor, num_chunks: int = 8) -> Tensor:
    """Return the same sum, with the logits of one chunk at a time: backward computes them again."""
    total = torch.zeros((), device=hidden.device)
    chunks = zip(hidden.flatten(0, 1).chunk(num_chunks), targets.flatten().chunk(num_chunks), strict=True)
    for part, wanted in chunks:
        total = total + checkpoint(summed_loss, part, head, wanted, use_reentrant=False)
    return total


def curve_of_loss(rank: int, world_size: int, shape: LlamaShape, num_tokens: int, num_chunks: int) -> MemoryCurve:
    """Return the memory of a head and its loss alone, forward and backward, above the hidden states and the weights."""
    torch.manual_seed(0)
    head = nn.Linear(shape.width, shape.vocabulary, bias=False, device=rank_device())
    hidden = torch.randn(1, num_tokens, shape.width, device=rank_device(), requires_grad=True)
    targets = torch.randint(shape.vocabulary, (1, num_tokens), device=rank_device())
    loss = summed_loss if num_chunks == 1 else partial(chunked_loss, num_chunks=num_chunks)
    with trace_memory(rank_device()) as trace:
        loss(hidden, head, targets).backward()
    return trace.whole().curve


def peak_of_step(
    rank: int, world_size: int, shape: LlamaShape, num_sequences: int, num_chunks: int
) -> tuple[float, MemoryCurve]:
    """Take two steps of a sharded model; return the second's loss and memory."""
    torch.manual_seed(0)
    model = Llama(shape).to(rank_device())
    mesh = init_device_mesh(rank_device().type, (world_size,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    random = torch.Generator().manual_seed(rank)
    numbers = torch.randint(shape.vocabulary, (num_sequences, shape.context), generator=random).to(rank_device())
    loss = summed_loss if num_chunks == 1 else partial(chunked_loss, num_chunks=num_chunks)
    for _ in range(2):
        optimizer.zero_grad()
        with trace_memory(rank_device()) as trace:
            mean = backward_by_tokens(model, [(numbers, numbers.roll(-1, dims=1))], loss)
            optimizer.step()
    return mean.item(), trace.whole().curve


# ---------------------------------------------------------------- adapters

ADAPTED = ("q_proj", "v_proj")  # as in Hu et al. 2021, arXiv:2106.09685
ADAPTERS = ("lora_a", "lora_b")
SCALE = 2.0


def add_adapters(model: nn.Module, rank: int, names: tuple[str, str] = ADAPTERS) -> nn.Module:
    """Freeze the model, and add to some of its layers the product of two thin matrices, which starts at zero.

    The names of what was there do not change, so its files still fit. An adapter that is there already, under other
    names, is frozen and counts.
    """
    model.requires_grad_(False)
    for name, layer in model.named_modules():
        if name.endswith(ADAPTED):
            like = {"device": layer.weight.device, "dtype": torch.float32}  # what is trained stays fp32
            layer.register_parameter(names[0], nn.Parameter(torch.empty(rank, layer.in_features, **like)))
            layer.register_parameter(names[1], nn.Parameter(torch.empty(layer.out_features, rank, **like)))
            layer.register_forward_hook(partial(add_low_rank, names))
    return model


def add_low_rank(names: tuple[str, str], layer: nn.Linear, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    first, second = (getattr(layer, name) for name in names)
    thin = F.linear(inputs[0].to(first.dtype), first)
    return output + (SCALE * F.linear(thin, second)).to(output.dtype)


@torch.no_grad()
def first_adapters(model: nn.Module) -> None:
    """Draw the first matrix of each pair, the same on every rank, and set the second to zero: no change yet."""
    random = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_b"):
            parameter.zero_()
        if name.endswith("lora_a"):
            whole = torch.randn(parameter.shape, generator=random) / parameter.shape[1] ** 0.5
            load_whole(parameter, whole)


def load_whole(parameter: Tensor, whole: Tensor) -> None:
    """Copy this rank's rows of a whole tensor that every rank has."""
    if hasattr(parameter, "device_mesh"):
        own = parameter.to_local()
        rows = -(-len(whole) // parameter.device_mesh.size())
        first = parameter.device_mesh.get_local_rank() * rows
        own.copy_(whole[first : first + len(own)])
    else:
        parameter.copy_(whole)


def start_with_adapters(folder: str, mesh: DeviceMesh, rank: int, dtype: torch.dtype) -> Llama:
    """Start a sharded model whose base is frozen, in `dtype`, with fp32 adapters of that rank."""
    with torch.device("meta"):
        model = add_adapters(Llama(llama_from_config(read_config(folder))).to(dtype), rank)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh).to_empty(device=rank_device())
    load_hugging_face(model, folder, without=ADAPTERS)
    fill_buffers(model)
    first_adapters(model)
    return model


def save_adapters(model: nn.Module, path: str) -> None:
    """Write what is trained, and nothing else: every rank takes part, rank 0 writes."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    tensors = get_model_state_dict(model, options=options)  # empty on all ranks except rank 0
    # By name: of a frozen tensor with two names, torch leaves out the first only.
    adapters = {name: tensor for name, tensor in tensors.items() if name.endswith(ADAPTERS)}
    if adapters:
        save_file(adapters, path)


@torch.no_grad()
def merge_adapters(model: nn.Module, path: str) -> nn.Module:
    """Add the adapters of a file to a plain model's own weights; it then needs neither file nor hook."""
    adapters = load_file(path)
    for name in {name.rpartition(".")[0] for name in adapters}:
        thin = adapters[f"{name}.lora_b"] @ adapters[f"{name}.lora_a"]
        weight = model.get_submodule(name).weight
        weight += (SCALE * thin).to(weight)
    return model


@dataclass(frozen=True, kw_only=True)
class Adapted:
    """The bytes that a rank held while it trained adapters, and the result."""

    state: StateBytes
    losses: list[float]
    loss_after: float  # of the sharded model, on the last batch
    loss_merged: float  # of a plain model that loaded the file of the adapters, on the same batch


def train_adapters(
    rank: int,
    world_size: int,
    folder: str,
    batches: Sequence[Sequence[str]],
    path: str,
    adapter_rank: int = 8,
    dtype: torch.dtype = torch.float32,
) -> Adapted:
    """Train adapters alone, save them alone, and load them into a plain model."""
    model = start_with_adapters(folder, init_device_mesh(rank_device().type, (world_size,)), adapter_rank, dtype)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=5e-3, fused=True)
    losses = []
    for documents in batches:
        optimizer.zero_grad()
        losses.append(backward_by_tokens(model, rank_parts(documents, 1, rank, world_size)))
        optimizer.step()
    save_adapters(model, path)
    torch.distributed.barrier()
    merged = merge_adapters(start_plain(folder), path)
    return Adapted(
        state=state_bytes(model, optimizer),
        losses=torch.stack(losses).tolist(),
        loss_after=mean_loss(model, batches[-1]),
        loss_merged=mean_loss(merged, batches[-1]),
    )


def train_whole(rank: int, world_size: int, folder: str, documents: Sequence[str]) -> StateBytes:
    """Take one step with everything trained, in fp32: the bytes to compare with."""
    model = start_from_folder(folder, init_device_mesh(rank_device().type, (world_size,)))
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    backward_by_tokens(model, rank_parts(documents, 1, rank, world_size))
    optimizer.step()
    return state_bytes(model, optimizer)
