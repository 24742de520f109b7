"""From FSDP1 to FSDP2: one training in both, line by line, and where each argument went. For notebook 14."""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.models.series import build_model
from fsdp_helpers.models.vit import Block
from fsdp_helpers.ranks.group import rank_device
from fsdp_helpers.training.worker import first_batches

Parts = list[tuple[Tensor, Tensor]]
loss_of = nn.CrossEntropyLoss()
CONFIG = TrainConfig(model="vit-mnist", global_batch_size=24, max_steps=4, train_images=480, test_images=60)


# Short lines, ended by commas: the two stand side by side in the notebook.
def train_with_fsdp1(
    model: nn.Module,
    mesh: DeviceMesh,
    steps: list[Parts],
) -> list[Tensor]:
    bf16 = MixedPrecision(
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
    )
    model = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_mesh=mesh,
        device_id=rank_device(),
        mixed_precision=bf16,
        use_orig_params=True,
    )
    optimizer = torch.optim.Adam(model.parameters())
    norms = []
    for first, last in steps:
        optimizer.zero_grad()
        with model.no_sync():
            loss_of(model(first[0]), first[1]).backward()
        loss_of(model(last[0]), last[1]).backward()
        norm = model.clip_grad_norm_(1.0)
        norms.append(norm)
        optimizer.step()
    return norms


def train_with_fsdp2(
    model: nn.Module,
    mesh: DeviceMesh,
    steps: list[Parts],
) -> list[Tensor]:
    bf16 = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
    )
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=bf16)
    fully_shard(model, mesh=mesh, mp_policy=bf16)
    optimizer = torch.optim.Adam(model.parameters())
    norms = []
    for first, last in steps:
        optimizer.zero_grad()
        model.set_requires_gradient_sync(False)
        loss_of(model(first[0]), first[1]).backward()
        model.set_requires_gradient_sync(True)
        loss_of(model(last[0]), last[1]).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norms.append(norm.full_tensor())
        optimizer.step()
    return norms


def norms_by_both(rank: int, world_size: int, config: TrainConfig = CONFIG) -> dict[str, list[float]]:
    """Return each step's gradient norm in both trainings, of the same model on the same images, in two parts each."""
    mesh = init_device_mesh(rank_device().type, (world_size,))
    batches = first_batches(rank, world_size, config)
    steps = [list(zip(images.chunk(2), labels.chunk(2), strict=True)) for images, labels in batches]
    norms = {}
    for name, train in {"FSDP1": train_with_fsdp1, "FSDP2": train_with_fsdp2}.items():
        torch.manual_seed(config.seed)
        norms[name] = [float(norm) for norm in train(build_model(config.model).to(rank_device()), mesh, steps)]
    return norms


# Each argument of FullyShardedDataParallel, what FSDP2 has instead, and what to watch.
ARGUMENTS = [
    ("module", "the same argument", "changed in place and returned; there is no wrapper, and no `.module`"),
    ("process_group", "`mesh`", "`init_device_mesh`; also says on which device"),
    ("device_mesh", "`mesh`", "one dimension, or two for hybrid sharding"),
    ("sharding_strategy=FULL_SHARD", "`reshard_after_forward=True`", "the root stays unsharded unless you pass True"),
    ("sharding_strategy=SHARD_GRAD_OP", "`reshard_after_forward=False`", "a number N keeps one shard in N"),
    ("sharding_strategy=HYBRID_SHARD", "a mesh of two dimensions", "copies first, shards second"),
    ("sharding_strategy=NO_SHARD", "`DistributedDataParallel`", ""),
    ("cpu_offload", "`offload_policy=CPUOffloadPolicy()`", "the optimizer then steps on the host"),
    ("auto_wrap_policy", "a loop over the units", "inner ones first, the root last"),
    ("backward_prefetch", "built in", "otherwise `set_modules_to_backward_prefetch`"),
    ("forward_prefetch", "`set_modules_to_forward_prefetch`", "on each unit"),
    ("mixed_precision", "`mp_policy=MixedPrecisionPolicy(...)`", "per unit; `buffer_dtype` is gone"),
    ("ignored_modules", "`ignored_params`", "a set of parameters"),
    ("ignored_states", "`ignored_params`", "a set of parameters"),
    ("param_init_fn", "`to_empty`, then `reset_parameters`", "after sharding; buffers are yours to fill"),
    ("device_id", "`mesh`", "it moves each unit there itself; or start on meta"),
    ("sync_module_states", "`set_model_state_dict`", "with `broadcast_from_rank0=True`"),
    ("limit_all_gathers", "nothing", "memory is freed in a fixed order, so no limit is needed"),
    ("use_orig_params", "nothing", "always the original parameters"),
]
METHODS = [
    ("with model.no_sync()", "`set_requires_gradient_sync(False)`", "until it is set to True again"),
    ("model.clip_grad_norm_(m)", "`nn.utils.clip_grad_norm_`", "returns a DTensor: call `full_tensor()`"),
    ("summon_full_params(model)", "`unshard()`, or `full_tensor()`", "one parameter at a time needs less"),
    ("state_dict_type(...)", "`get_model_state_dict(model, ...)`", "`state_dict()` alone returns the shards"),
    ("optim_state_dict(...)", "`get_optimizer_state_dict(...)`", "the same names as the model's"),
]
