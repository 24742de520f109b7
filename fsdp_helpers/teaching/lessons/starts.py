"""Ways to start a sharded model, each with what it needs on a rank: what notebook 08 shows, and then runs.

`build` is any function that returns a model with its blocks in `model.blocks`.
"""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import distribute_tensor

from fsdp_helpers.measuring.memory import trace_memory
from fsdp_helpers.models.shapes import ViTShape
from fsdp_helpers.models.vit import Block, ViT
from fsdp_helpers.ranks.group import rank_device
from fsdp_helpers.records import MemoryCurve

SEED = 0
Build = Callable[[], nn.Module]


class WaveViT(ViT):
    """A ViT whose positions are fixed waves instead of trained ones: a buffer, computed once, and kept in no file."""

    def __init__(self, shape: ViTShape) -> None:
        super().__init__(shape)
        del self.positions
        self.register_buffer("positions", torch.empty(1, shape.num_tokens, shape.width), persistent=False)
        self.fill_buffers()

    def fill_buffers(self) -> None:
        num_tokens, width = self.positions.shape[1:]
        tokens, columns = (torch.arange(size, device=self.positions.device) for size in (num_tokens, width))
        self.positions.copy_(torch.sin(tokens[:, None] / 10_000 ** (columns / width)))


def shard_blocks(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Make each block a unit, and the root a unit of all that is left."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def start_whole(build: Build, mesh: DeviceMesh) -> nn.Module:
    """Build the model whole on every rank, as everyone does at first, and then shard it."""
    torch.manual_seed(SEED)
    return shard_blocks(build().to(rank_device()), mesh)


def start_on_meta(build: Build, mesh: DeviceMesh) -> nn.Module:
    """Start with shapes, then allocate this rank's shards. Their content is garbage, in buffers too."""
    with torch.device("meta"):
        model = build()
    return shard_blocks(model, mesh).to_empty(device=rank_device())


def fill_buffers(model: nn.Module) -> None:
    """Fill the buffers that no file has. The method's name is ours; each module with such buffers needs one."""
    for module in model.modules():
        if hasattr(module, "fill_buffers"):
            module.fill_buffers()


def draw_own_shards(build: Build, mesh: DeviceMesh) -> nn.Module:
    """Let every rank draw the values of its own shards."""
    model = start_on_meta(build, mesh)
    torch.manual_seed(SEED + dist.get_rank())  # with one seed for all, every rank would draw the same rows
    warnings.filterwarnings(
        "ignore", message="DTensor random operators"
    )  # on CPUs each rank draws its own values, as intended
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    fill_buffers(model)
    return model


def draw_layer_by_layer(build: Build, mesh: DeviceMesh) -> nn.Module:
    """Get the values of a plain start: every rank draws each layer whole, keeps its rows, and frees the rest."""
    model = start_on_meta(build, mesh)
    with torch.device("meta"):
        plain = build()
    torch.manual_seed(SEED)  # the same on all ranks
    for name, layer in in_order_of_construction(plain):
        if hasattr(layer, "reset_parameters"):
            layer.to_empty(device="cpu", recurse=False)  # as a plain start; a GPU would draw other numbers
            layer.reset_parameters()
            keep_own_rows(layer, model.get_submodule(name))
            layer.to_empty(device="meta", recurse=False)
    fill_buffers(model)
    return model


def in_order_of_construction(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield names and modules, children before their parent: a module draws its values when its children are there."""
    for name, child in module.named_children():
        yield from in_order_of_construction(child, f"{prefix}{name}.")
    yield prefix.removesuffix("."), module


@torch.no_grad()
def keep_own_rows(layer: nn.Module, sharded: nn.Module) -> None:
    """Copy this rank's part of each whole parameter; `src_data_rank=None` takes it from here, and nothing is sent."""
    for name, whole in layer.named_parameters(recurse=False):
        own = sharded.get_parameter(name)
        own.copy_(distribute_tensor(whole.detach(), own.device_mesh, own.placements, src_data_rank=None))


def take_from_rank_0(build: Build, mesh: DeviceMesh) -> nn.Module:
    """Keep the whole model in rank 0's host memory, and send it tensor by tensor."""
    whole = {}
    if dist.get_rank() == 0:
        torch.manual_seed(SEED)
        whole = build().state_dict()
    return receive(build, mesh, whole)


def load_from_file(build: Build, mesh: DeviceMesh, path: str) -> nn.Module:
    """Map the file into rank 0's memory, so that a tensor is read when it is sent."""
    whole = torch.load(path, mmap=True, weights_only=True) if dist.get_rank() == 0 else {}
    return receive(build, mesh, whole)


def read_own_rows(build: Build, mesh: DeviceMesh, path: str) -> nn.Module:
    """Let each rank read its own rows from a safetensors file: no rank has more of a tensor, and nothing is sent."""
    model = start_on_meta(build, mesh)
    with safe_open(path, framework="np") as file, torch.no_grad():  # as "pt" the mapped file would count as allocated
        for name, parameter in model.named_parameters():
            own, num_rows = parameter.to_local(), len(parameter)
            first = mesh.get_local_rank() * -(-num_rows // mesh.size())  # all ranks but the last have equally many
            if len(own):
                own.copy_(torch.from_numpy(file.get_slice(name)[first : first + len(own)]))
    fill_buffers(model)
    return model


def receive(build: Build, mesh: DeviceMesh, whole: dict[str, torch.Tensor]) -> nn.Module:
    """Keep this rank's rows of every tensor that rank 0 sends; `whole` is empty on all other ranks."""
    model = start_on_meta(build, mesh)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, whole, options=options)
    fill_buffers(model)
    return model


def start_fsdp1(build: Build, mesh: DeviceMesh) -> nn.Module:
    """Start FSDP1, which asks for a unit's values when it wraps the unit: whole, and then cut."""

    def draw(module: nn.Module) -> None:
        module.to_empty(device=rank_device(), recurse=False)
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()

    torch.manual_seed(SEED)  # the same on all ranks: each keeps its part of one and the same unit
    with torch.device("meta"):
        model = build()
    model = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        param_init_fn=draw,
        device_id=rank_device(),
        device_mesh=mesh,
        use_orig_params=True,
    )
    fill_buffers(model)
    return model


# ---------------------------------------------------------------- measured

WAYS: dict[str, Callable[..., nn.Module]] = {
    "whole, then sharded": start_whole,
    "on meta, own shards drawn": draw_own_shards,
    "on meta, layer by layer": draw_layer_by_layer,
    "on meta, sent by rank 0": take_from_rank_0,
    "on meta, FSDP1 unit by unit": start_fsdp1,
    "from a file, sent by rank 0": load_from_file,
    "from a file, own rows": read_own_rows,
}


@dataclass(frozen=True, kw_only=True)
class StartRecord:
    """One start of one model on one rank."""

    curve: MemoryCurve  # bytes allocated while it starts
    shards_bytes: int  # of the parameters that the rank keeps
    num_tensors: int
    num_equal: int  # of those, equal to a plain start in every bit
    buffers_right: bool


def measure_start(rank: int, world_size: int, way: str, shape: ViTShape, *path: str) -> StartRecord:
    """Start a `WaveViT` in one of the `WAYS` (some need the path of a file), beside a plain start."""
    mesh = init_device_mesh(rank_device().type, (world_size,))

    def build() -> nn.Module:
        return WaveViT(shape)

    with trace_memory(rank_device()) as trace:
        model = WAYS[way](build, mesh, *path)
    curve = trace.whole().curve
    torch.manual_seed(SEED)
    plain = build()
    found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    equal = [torch.equal(found[name].cpu(), tensor) for name, tensor in plain.state_dict().items()]
    (buffer,) = model.buffers()
    return StartRecord(
        curve=curve,
        shards_bytes=curve.held_bytes - buffer.nbytes,
        num_tensors=len(equal),
        num_equal=sum(equal),
        buffers_right=torch.equal(buffer.cpu(), plain.positions),
    )
