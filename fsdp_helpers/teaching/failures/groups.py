"""Groups, meshes and models that don't match across ranks or are set up twice."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.functional import pad
from torch.nn.parallel import DistributedDataParallel

from fsdp_helpers.teaching.failures.entry import Failure, Numbers
from fsdp_helpers.teaching.failures.small_job import cpu_mesh, images, small_model

# ---------------------------------------------------------------- a second start


def start_again(rank: int, world_size: int) -> Numbers:
    dist.init_process_group("gloo")  # as the framework, or a cell, already did
    return {"ranks": dist.get_world_size()}


def start_if_needed(rank: int, world_size: int) -> Numbers:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return {"ranks": dist.get_world_size()}


def two_ranks() -> Numbers:
    return {"ranks": 2}


# ---------------------------------------------------------------- a mesh of the wrong size


def mesh_for_eight(rank: int, world_size: int) -> Numbers:
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    return {"ranks": mesh.size()}


def mesh_for_all(rank: int, world_size: int) -> Numbers:
    tp = 2
    mesh = init_device_mesh("cpu", (world_size // tp, tp), mesh_dim_names=("dp", "tp"))
    return {"ranks": mesh.size()}


# ---------------------------------------------------------------- a source outside the group


def name_a_global_rank(rank: int, world_size: int) -> Numbers:
    last, value = dist.new_group([world_size - 1]), torch.ones(1)
    if dist.get_rank(last) >= 0:
        dist.broadcast(value, src=0, group=last)
    return {"value": value.item()}


def name_a_rank_of_the_group(rank: int, world_size: int) -> Numbers:
    last, value = dist.new_group([world_size - 1]), torch.ones(1)
    if dist.get_rank(last) >= 0:
        dist.broadcast(value, group_src=0, group=last)
    return {"value": value.item()}


def the_value() -> Numbers:
    return {"value": 1.0}


# ---------------------------------------------------------------- a model of each rank's own


def grow_on_rank_0(rank: int, world_size: int) -> Numbers:
    model, grows = small_model(), rank == 0  # only rank 0 has read the settings
    if grows:
        model.append(nn.Linear(2, 2))
    return {"parameters": len(list(DistributedDataParallel(model).parameters()))}


def grow_on_every_rank(rank: int, world_size: int) -> Numbers:
    model, grows = small_model(), [rank == 0]
    dist.broadcast_object_list(grows)
    if grows[0]:
        model.append(nn.Linear(2, 2))
    return {"parameters": len(list(DistributedDataParallel(model).parameters()))}


def four_layers() -> Numbers:
    return {"parameters": 4 * 2}


# ---------------------------------------------------------------- predictions of different lengths


def predictions_of(rank: int) -> torch.Tensor:
    return torch.arange(3.0) if rank == 0 else torch.arange(2.0)  # the last batch is smaller


def gather_as_they_are(rank: int, world_size: int) -> Numbers:
    mine = predictions_of(rank)
    gathered = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(gathered, mine)
    return {"predictions": sum(map(len, gathered)), "sum": float(sum(part.sum() for part in gathered))}


def pad_and_gather(rank: int, world_size: int) -> Numbers:
    mine = predictions_of(rank)
    lengths = [torch.tensor(0) for _ in range(world_size)]
    dist.all_gather(lengths, torch.tensor(len(mine)))
    gathered = [torch.empty(int(max(lengths))) for _ in range(world_size)]
    dist.all_gather(gathered, pad(mine, (0, int(max(lengths)) - len(mine))))
    gathered = [part[:length] for part, length in zip(gathered, lengths, strict=True)]
    return {"predictions": sum(map(len, gathered)), "sum": float(sum(part.sum() for part in gathered))}


def all_predictions() -> Numbers:
    both = torch.cat([predictions_of(0), predictions_of(1)])
    return {"predictions": len(both), "sum": both.sum().item()}


# ---------------------------------------------------------------- units in the wrong order


def shard_each_module(rank: int, world_size: int) -> Numbers:
    model = small_model()
    for module in model.modules():  # the root comes first
        fully_shard(module, mesh=cpu_mesh())
    return {"sum of outputs": model(images()).sum().item()}


def shard_blocks_then_the_root(rank: int, world_size: int) -> Numbers:
    model = small_model()
    for module in model.children():
        if isinstance(module, nn.Linear) and not isinstance(module, FSDPModule):
            fully_shard(module, mesh=cpu_mesh())
    fully_shard(model, mesh=cpu_mesh())
    return {"sum of outputs": model(images()).sum().item()}


def outputs_alone() -> Numbers:
    return {"sum of outputs": small_model()(images()).sum().item()}


# ---------------------------------------------------------------- parameters on two meshes


def half_parallel() -> nn.Module:
    """Return a model whose first layer is tensor-parallel, with this layer's parameters on a two-dimensional mesh."""
    mesh, model = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp")), small_model()
    parallelize_module(model[0], mesh["tp"], ColwiseParallel())
    fully_shard(model, mesh=mesh["dp"])
    model(images()).square().mean().backward()
    return model


def clip_all_at_once(rank: int, world_size: int) -> Numbers:
    model = half_parallel()
    return {"gradient norm": nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor().item()}


def clip_mesh_by_mesh(rank: int, world_size: int) -> Numbers:
    by_mesh = {}
    for parameter in half_parallel().parameters():
        by_mesh.setdefault(parameter.device_mesh, []).append(parameter)
    norms = [nn.utils.get_total_norm([p.grad for p in group]).full_tensor() for group in by_mesh.values()]
    norm = nn.utils.get_total_norm(norms)
    for group in by_mesh.values():
        nn.utils.clip_grads_with_norm_(group, 1.0, norm)
    return {"gradient norm": norm.item()}


def norm_alone() -> Numbers:
    model = small_model()
    model(images()).square().mean().backward()
    return {"gradient norm": nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()}


GROUPS = (
    Failure(
        name="crash-group-twice",
        title="trying to initialize the default process group twice",
        why=(
            "Something else has already created the process group: `Accelerator`, a Trainer, Lightning, or a cell "
            "that ran twice."
        ),
        tell="`dist.is_initialized()` is True before your call.",
        fix=(
            "Write `if not dist.is_initialized(): dist.init_process_group(...)`. If you use a framework, let the "
            "framework make this call."
        ),
        messages=(
            "trying to initialize the default process group twice!",
            "initialize the default process group twice",
        ),
        behavior=(
            "init_process_group is called twice",
            "init_process_group twice: in the script and in the Trainer, Accelerator, Lightning or a notebook cell",
        ),
        quotes={
            "torch/distributed/distributed_c10d.py": ("The specified group name has already been created",),
            "accelerate": ("AcceleratorState has already been initialized and cannot be changed",),
        },
        broken=start_again,
        fixed=start_if_needed,
        right=two_ranks,
        says="trying to initialize the default process group twice!",
    ),
    Failure(
        name="crash-mesh-size",
        title="The mesh's size doesn't match the number of ranks",
        why=(
            "The product of the mesh's dimensions mustn't be larger than the world size, and should be equal to it: a "
            "smaller mesh raises no error here, but leaves ranks out. If you ask for a mesh of eight ranks and "
            "the job has only one rank, you forgot to use torchrun."
        ),
        tell="Print `dist.get_world_size()` and the mesh's shape.",
        fix=(
            "Use `init_device_mesh('cuda', (world_size // tp, tp), mesh_dim_names=('dp', 'tp'))`, and start "
            "`world_size` ranks with torchrun."
        ),
        messages=("Mesh should not be bigger than default world size",),
        behavior=(
            "the tensor parallel degree times the data parallel degree isn't the number of GPUs",
            "world size isn't divisible by the tensor, pipeline, context or replica degree",
            "device mesh: wrong shape, missing mesh_dim_names, or a name that doesn't exist",
            "hybrid sharding needs a 2-D mesh",
        ),
        quotes={
            "a run on the CPU": (
                "Cannot slice a DeviceMesh without mesh_dim_names",
                "Invalid mesh_dim_name",
                "Valid mesh_dim_names are",
                "expects a 1D or 2D DeviceMesh",
                "Expected device_mesh to have ndim=2 but got",
                "Please init the 2D mesh for HSDP with mesh_dim_names specified",
                "should be less or equal to the world size",
            ),
            "torchtitan": (
                "Invalid parallel dims: dp_replicate",
                "WORLD_SIZE(8)",
            ),
            "torch/distributed/device_mesh.py": ("Available mesh dimensions are",),
            "torch/distributed/distributed_c10d.py": ("must be divisible by 'group_size",),
            "accelerate": ("does not match num_processes",),
        },
        broken=mesh_for_eight,
        fixed=mesh_for_all,
        right=two_ranks,
        says="Mesh should not be bigger than default world size",
    ),
    Failure(
        name="crash-not-in-group",
        title="A rank is not part of the group",
        why=(
            "In a smaller group, `src` and `dst` are still *global* ranks: `broadcast(t, src=0, group=g)` on a group "
            "of ranks 4 to 7 names a rank outside the group. Also, a rank that isn't a member only gets a placeholder "
            "from `new_group`, and can't communicate through it."
        ),
        tell=(
            "`dist.get_process_group_ranks(group)` doesn't contain the rank named in the call, or the rank making the "
            "call."
        ),
        fix=(
            "Use `dist.broadcast(t, group=group, group_src=0)`, or `src=dist.get_global_rank(group, 0)`. Put `if "
            "dist.get_rank(group) >= 0:` around any calls that only members should make."
        ),
        messages=("is not part of group",),
        behavior=(
            "broadcast, scatter, send or recv uses the wrong src in a sub-group; tensor-parallel or node-local groups",
        ),
        quotes={
            "a run on the CPU": ("which does not belong to the given group",),
            "torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py": ("was not included in process group",),
            "torch/distributed/distributed_c10d.py": ("is not part of the group",),
        },
        broken=name_a_global_rank,
        fixed=name_a_rank_of_the_group,
        right=the_value,
        says="is not part of group",
    ),
    Failure(
        name="crash-models-differ",
        title="DDP expects same model across all ranks",
        why=(
            "The ranks built different models: each rank built a vocabulary from its own data, the code branches on "
            "the rank, only rank 0 froze or resized something, or two nodes have different package versions."
        ),
        tell=(
            "The message names a rank with a different number of parameters, or the first parameter whose size "
            "differs. Print `[(n, p.shape) for n, p in model.named_parameters()]` on every rank."
        ),
        fix=(
            "Decide on rank 0 and broadcast the decision: `dist.broadcast_object_list([config])`. Then build, freeze "
            "and resize on every rank."
        ),
        messages=(
            "DDP expects same model across all ranks, but Rank",
            "DDP expects same model across all ranks",
            "has inconsistent 0 params",
            "params, while rank 0 has inconsistent",
        ),
        behavior=(
            "the model has a different number of parameters on one rank",
            "parameters are frozen or layers are added on rank 0 only",
            (
                "the number or shape of parameters differs between ranks; a tokenizer or vocabulary built per rank; "
                "random architecture"
            ),
            "ranks loaded different checkpoints or versions",
        ),
        quotes={
            "torch's reducer.cpp": (
                "appears not to match sizes of the same param in process 0",
                "appears not to match strides of the same param in process 0",
            ),
        },
        broken=grow_on_rank_0,
        fixed=grow_on_every_rank,
        right=four_layers,
        says="DDP expects same model across all ranks",
    ),
    Failure(
        name="crash-gather-shapes",
        title="all_gather with tensors of different shapes",
        why=(
            "A collective doesn't send shapes, so every rank has to pass a tensor of the same shape and dtype. The "
            "shapes differ if the last batch is smaller, or if texts or lists of boxes have different lengths."
        ),
        tell=(
            "Print `tensor.shape, tensor.dtype` on every rank just before the call. gloo aborts the process that "
            "receives too much. NCCL may not report anything: the numbers come back mixed up, or the call hangs."
        ),
        fix=(
            "All-gather the lengths, pad the tensors to the longest, all-gather them, and truncate. In Accelerate, "
            "`pad_across_processes` does the padding. For Python objects of any size, use `dist.all_gather_object`."
        ),
        messages=("Received data size doesn't match expected size",),
        behavior=(
            "gathering predictions in evaluation fails or hangs when the last batch is smaller",
            "gather or all_gather hangs or fails when ranks have a different number of samples",
            "all_gather of variable-length tensors; pad before gathering; predictions of different shapes",
            "outputs are garbled after all_gather because shapes or dtypes differ between ranks",
        ),
        quotes={
            "a run on the CPU": ("invalid tensor size at index",),
            "torch's ProcessGroupNCCL.cpp": ("output tensor size must be equal to world_size times input tensor size",),
            "torch's c10d": (
                "Tensors must be contiguous",
                "must be contiguous",
                "must have the same number of elements",
            ),
            "torch/distributed/distributed_c10d.py": ("Invalid usage of tensors with different dtypes",),
            "an older PyTorch": (
                "All tensor operands to scatter/gather must have the same number of elements",
                "tensor list operands to scatter/gather must have the same size as process group",
                "wrong size output",
                "expected to have size equal to first tensor",
            ),
            "accelerate": (
                "Cannot apply desired operation due to shape mismatches",
                "Impossible to apply the desired operation due to inadequate shapes",
                "due to shape mismatches",
                "You can't use batches of different size with `dispatch_batches=True`",
            ),
        },
        broken=gather_as_they_are,
        fixed=pad_and_gather,
        right=all_predictions,
        says="(?s)SIGABRT.*doesn't match expected size",
    ),
    Failure(
        name="crash-sharded-twice",
        title="A module or a mesh is used for FSDP twice",
        why=(
            "Running a cell twice, or calling a framework's `prepare` on a sharded model, shards a unit again. Or a "
            "loop over `model.modules()` starts with the root, which takes all the parameters. The layers' parameters "
            "are then already DTensors, so `fully_shard` takes them for tensor-parallel parameters and tries to "
            "combine their mesh with its own, which is the same mesh. If the mesh has no dimension names, that gives "
            "this message; if it does, *Cannot concatenate overlapping meshes*."
        ),
        tell="`isinstance(model, FSDPModule)` is True before your call.",
        fix=(
            "Shard each block once, then the root once: `for block in model.layers: fully_shard(block)`, then "
            "`fully_shard(model)`. If you use `accelerator.prepare`, leave the sharding to it."
        ),
        messages=("Invariant encountered: value was None when it should not be",),
        behavior=("fully_shard or FSDP is applied twice to the same module; nested wrapping; a cell that ran twice",),
        quotes={
            "a run on the CPU": (
                "can only be applied to a module once",
                "FSDP auto wrapping requires modules to not already have FSDP applied",
                "already managed by `fully_shard`",
            ),
            "torch/distributed/fsdp/_fully_shard/_fsdp_param.py": (
                "FSDP requires the DP and model parallel TP/EP mesh to be not None but got",
            ),
            "torch/distributed/fsdp/wrap.py": ("is already wrapped by",),
            "an older PyTorch": ("FSDP requires the DP and TP mesh to have the same parent mesh but got",),
        },
        broken=shard_each_module,
        fixed=shard_blocks_then_the_root,
        right=outputs_alone,
        says="Invariant encountered|to be not None but got",
    ),
    Failure(
        name="crash-cross-mesh",
        title="Clipping or the optimizer combines DTensors on two meshes",
        why=(
            "With FSDP and a second dimension (`tp`, `ep`), some parameters are on a one-dimensional mesh and others "
            "are on a two-dimensional mesh. Clipping stacks the norms of all gradients, and in older versions, DTensor "
            "also rejects the optimizers' foreach and fused kernels, which take all parameters in one call."
        ),
        tell=(
            "`{getattr(p, 'device_mesh', None) for p in model.parameters()}` contains more than one mesh. (If it "
            "contains None, plain tensors are mixed in, and the message is *got mixed torch.Tensor and DTensor*.)"
        ),
        fix=(
            "Use one parameter group or one optimizer per mesh, or pass `foreach=False, fused=False`. To clip, call "
            "`torch.nn.utils.get_total_norm` on each mesh's gradients and then on the resulting norms, and call "
            "`clip_grads_with_norm_(group, max_norm, norm)` for each mesh."
        ),
        messages=("must have the same mesh, but got DeviceMesh",),
        behavior=(
            "optimizer.step() or clip_grad_norm_ fails with FSDP and tensor parallelism",
            (
                "tensor parallelism with FSDP: some parameters are plain tensors or on a different mesh, in clipping "
                "or the fused optimizer"
            ),
        ),
        quotes={
            "an older PyTorch; pytorch PR #134551": ("DTensor does not support cross-mesh operation yet",),
            "an older PyTorch; pytorch PR #153268": ("Could not run pointwise computation across different mesh",),
            "an older PyTorch": ("aten._foreach_mul_.Scalar",),
        },
        broken=clip_all_at_once,
        fixed=clip_mesh_by_mesh,
        right=norm_alone,
        says="must have the same mesh|cross-mesh|different mesh",
    ),
)
