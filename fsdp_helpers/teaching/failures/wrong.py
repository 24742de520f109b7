"""Wrong results without an error: the gradients and weights don't match a single-process run."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from fsdp_helpers.teaching.failures.entry import Failure, Numbers
from fsdp_helpers.teaching.failures.small_job import (
    WIDTH,
    cpu_mesh,
    gradient_norm,
    images,
    in_units,
    small_model,
    whole,
)

# ---------------------------------------------------------------- which images, which loss


def gradient_of_all_images() -> Numbers:
    model = small_model()
    model(images()).square().mean().backward()
    return {"gradient norm": gradient_norm(model)}


def train_on_the_same_images(rank: int, world_size: int) -> Numbers:
    model = DistributedDataParallel(small_model())
    batch = images()[: 8 // world_size]  # the first half, on every rank
    model(batch).square().mean().backward()
    return {"gradient norm": gradient_norm(model)}


def train_on_own_images(rank: int, world_size: int) -> Numbers:
    model = DistributedDataParallel(small_model())
    batch = images()[rank::world_size]
    model(batch).square().mean().backward()
    return {"gradient norm": gradient_norm(model)}


def sum_the_loss(rank: int, world_size: int) -> Numbers:
    model = in_units(small_model())
    model(images()[rank::world_size]).square().sum().backward()
    return {"gradient norm": gradient_norm(model)}


def sum_the_loss_and_scale(rank: int, world_size: int) -> Numbers:
    model = in_units(small_model())
    loss = model(images()[rank::world_size]).square().sum()
    (loss * world_size).backward()  # FSDP divides by the number of ranks
    return {"gradient norm": gradient_norm(model)}


def gradient_of_the_sum() -> Numbers:
    model = small_model()
    model(images()).square().sum().backward()
    return {"gradient norm": gradient_norm(model)}


def tokens_of(rank: int) -> Tensor:
    return images()[:6] if rank == 0 else images()[6:]  # six tokens and two


def mean_of_means(rank: int, world_size: int) -> Numbers:
    model = in_units(small_model())
    model(tokens_of(rank)).square().mean().backward()
    return {"gradient norm": gradient_norm(model)}


def mean_over_all_tokens(rank: int, world_size: int) -> Numbers:
    model, tokens = in_units(small_model()), tokens_of(rank)
    num_tokens = torch.tensor(float(len(tokens)))
    dist.all_reduce(num_tokens)
    loss = model(tokens).square().mean(dim=1).sum() / num_tokens
    (loss * world_size).backward()
    return {"gradient norm": gradient_norm(model)}


# ---------------------------------------------------------------- the gradient

MOST = 0.01  # of the gradient's norm


def with_gradients() -> nn.Module:
    model = in_units(small_model())
    model(images()).square().mean().backward()
    return model


def clip_by_own_shard(rank: int, world_size: int) -> Numbers:
    model = with_gradients()
    shards = [parameter.grad.to_local() for parameter in model.parameters()]
    norm = nn.utils.get_total_norm(shards)
    for part in shards:
        part.mul_(min(1.0, MOST / norm))
    return {"norm after clipping": gradient_norm(model)}


def clip_by_the_whole_norm(rank: int, world_size: int) -> Numbers:
    model = with_gradients()
    nn.utils.clip_grad_norm_(model.parameters(), MOST)
    return {"norm after clipping": gradient_norm(model)}


def clipped() -> Numbers:
    return {"norm after clipping": MOST}


def log_local_norm(rank: int, world_size: int) -> Numbers:
    shards = [parameter.grad.to_local() for parameter in with_gradients().parameters()]
    return {"gradient norm": nn.utils.get_total_norm(shards).item()}


def log_full_norm(rank: int, world_size: int) -> Numbers:
    gradients = [parameter.grad for parameter in with_gradients().parameters()]
    return {"gradient norm": nn.utils.get_total_norm(gradients).full_tensor().item()}


def reduce_in_bf16(rank: int, world_size: int) -> Numbers:
    model, policy = small_model(), MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    fully_shard(model, mesh=cpu_mesh(), mp_policy=policy)
    model(images()[rank::world_size]).square().mean().backward()
    return {"gradient norm": gradient_norm(model)}


def reduce_in_fp32(rank: int, world_size: int) -> Numbers:
    model, policy = small_model(), MixedPrecisionPolicy(reduce_dtype=torch.float32)
    fully_shard(model, mesh=cpu_mesh(), mp_policy=policy)
    model(images()[rank::world_size]).square().mean().backward()
    return {"gradient norm": gradient_norm(model)}


# ---------------------------------------------------------------- an optimizer that needs full matrices

LEARNING_RATE = 0.1


def matrix_with_gradient(sharded: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    if sharded:
        fully_shard(layer, mesh=cpu_mesh())
    layer(images()).square().mean().backward()
    return layer


def muon(matrices: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Muon(matrices, lr=LEARNING_RATE, weight_decay=0.0)


def orthogonalize_own_rows(rank: int, world_size: int) -> Numbers:
    weight = matrix_with_gradient().weight
    before, rows = whole(weight).detach().clone(), nn.Parameter(weight.to_local().detach())
    rows.grad = weight.grad.to_local()
    muon([rows]).step()
    return {"norm of the update": (whole(weight) - before).norm().item()}


def orthogonalize_the_matrix(rank: int, world_size: int) -> Numbers:
    weight = matrix_with_gradient().weight
    before = whole(weight).detach().clone()
    muon([weight]).step()
    return {"norm of the update": (whole(weight) - before).norm().item()}


def orthogonalized_alone() -> Numbers:
    weight = matrix_with_gradient(sharded=False).weight
    before = weight.detach().clone()
    muon([weight]).step()
    return {"norm of the update": (weight - before).norm().item()}


WRONG = (
    Failure(
        name="wrong-same-data",
        title="Eight ranks learn no faster than one",
        why=(
            "Without a sampler, or with a sampler that isn't given the rank, every process reads the same images. All "
            "ranks then have the same gradient, and averaging doesn't change it."
        ),
        tell=(
            "Every rank logs the same loss in every step. Print the first indices, or the sum of the first batch, on "
            "each rank."
        ),
        fix="Give every rank its own images: `DistributedSampler(dataset)`, or `images[rank::world_size]`.",
        numbers=("eight ranks learn no faster than one; the first loss is equal on all ranks",),
        behavior=(
            "an IterableDataset without a split gives every rank the same samples",
            "every GPU sees the same data; no DistributedSampler; one epoch has as many steps as on a single GPU",
            "all GPUs have the same loss value in each step or epoch",
            "no speedup in steps: the number of iterations per epoch doesn't decrease with more GPUs",
            (
                "duplicate data: all ranks process the same batches; the sampler is missing or has the wrong rank or "
                "num_replicas"
            ),
            "a streaming dataset (WebDataset, IterableDataset) isn't split by rank and worker; split_dataset_by_node",
            "training with N GPUs takes N times as many steps; each rank goes over the full data set",
        ),
        broken=train_on_the_same_images,
        fixed=train_on_own_images,
        right=gradient_of_all_images,
    ),
    Failure(
        name="wrong-summed-loss",
        title="A single-GPU recipe learns too slowly on eight GPUs",
        why=(
            "DDP and FSDP average the gradients over the ranks. If the loss is a sum, you get the full batch's "
            "gradient divided by the number of ranks."
        ),
        tell="With N ranks, the gradient norm is exactly 1/N of the norm in one process.",
        fix="Use the mean over the batch. If the loss has to be a sum, call `(loss * world_size).backward()`.",
        numbers=(
            "the gradient norm is N times smaller than in one process; the model learns too slowly",
            "the effective batch size grows with the number of GPUs; the learning rate no longer fits",
        ),
        behavior=(
            "the gradient or learning rate has to be scaled by the world size; a loss with sum reduction",
            "wrong gradients with DistributedDataParallel: averaged instead of summed across ranks",
            "DDP does not get the same gradients as a single process",
            "gradients are averaged, so the effective learning rate is N times smaller; loss with reduction=sum",
            "should I scale the learning rate with the number of GPUs",
        ),
        broken=sum_the_loss,
        fixed=sum_the_loss_and_scale,
        right=gradient_of_the_sum,
    ),
    Failure(
        name="wrong-mean-of-means",
        title="The loss depends on how texts are split among the ranks",
        why=(
            "Each rank takes the mean over its own tokens, and the mean of those means gives a token more weight if "
            "its rank has fewer tokens. Here, one rank has six tokens and the other has two."
        ),
        tell="Compare the first step's gradient with the one that a single process computes from all the tokens.",
        fix="Call `dist.all_reduce(num_tokens)`, then `(loss_sum * world_size / num_tokens).backward()`.",
        numbers=(
            "the loss or the gradient depends on how tokens are split among the ranks",
            "the logged loss or grad_norm is multiplied by gradient_accumulation_steps, or by the number of GPUs",
        ),
        behavior=(
            "fine-tuning results depend on the number of GPUs",
            (
                "gradient accumulation gives a different loss from the full batch; the loss is averaged per "
                "micro-batch or per device instead of per token"
            ),
            (
                "padding, sequence length or number of tokens differs per rank; the loss isn't normalized by the "
                "global number of tokens"
            ),
            (
                "num_items_in_batch, average_tokens_across_devices; the loss is N times larger or smaller than on a "
                "single GPU"
            ),
            "gradient accumulation isn't equivalent to a larger batch for language models",
        ),
        broken=mean_of_means,
        fixed=mean_over_all_tokens,
        right=gradient_of_all_images,
    ),
    Failure(
        name="wrong-clip-local-norm",
        title="Gradients are clipped by a different factor on each rank",
        why=(
            "The norm of one rank's shards isn't the norm of the full gradient. Each rank scales its shards by a "
            "different factor, so the gradient's direction changes."
        ),
        tell="Compute the gradient norm again after clipping: it's above the limit.",
        fix="Use `nn.utils.clip_grad_norm_`, which handles DTensors. With FSDP1, call `model.clip_grad_norm_`.",
        numbers=("the norm is above the limit after clipping; each rank clips by a different factor",),
        behavior=(
            "gradient clipping doesn't work, or has no effect, with FSDP",
            "clip_grad_norm_ gives a different norm on each rank, or a non-finite gradient norm isn't noticed",
            (
                "clip_grad_norm_ on sharded parameters; a different total norm on each GPU; training is unstable with "
                "FSDP and clipping"
            ),
            "clip_grad_value or max_grad_norm has no effect",
        ),
        quotes={
            "a run on the CPU": ("`clip_grad_norm_()` should only be called on the root FSDP instance",),
            "pytorch-lightning": ("Gradient clipping with FSDP is not supported",),
            "accelerate": ("do not support `clip_grad_value_`",),
        },
        broken=clip_by_own_shard,
        fixed=clip_by_the_whole_norm,
        right=clipped,
    ),
    Failure(
        name="wrong-local-norm-logged",
        title="The logged gradient norm shrinks with the number of ranks",
        why=(
            "The norm of a rank's local gradients covers only its own shards, so it's about the full norm divided by "
            "the square root of N."
        ),
        tell="Each rank logs a different norm.",
        fix=(
            "On every rank, compute the norm of the DTensors (`clip_grad_norm_` returns it), and call `full_tensor()` "
            "on it."
        ),
        numbers=("the gradient norm is off by √N: ranks log different norms, smaller with more GPUs or nodes",),
        behavior=(
            "the logged gradient norm is too small: a local, partial or sharded norm; off by a factor of √N",
            "grad norm differs from DDP's, and changes with the number of GPUs",
        ),
        broken=log_local_norm,
        fixed=log_full_norm,
        right=gradient_of_all_images,
    ),
    Failure(
        name="wrong-muon-local-rows",
        title="Muon on shards: updates of the wrong size and direction",
        why=(
            "Muon orthogonalizes a full matrix. If you give it only one rank's rows, the update is off by 30 to 69% of "
            "its norm (on random matrices from 8 x 8 to 1,024 x 256, with 2 to 8 ranks). No error is raised. "
            "`torch.optim.Muon` handles DTensors correctly, but at a price: it all-gathers each matrix in every "
            "iteration of its Newton-Schulz loop."
        ),
        tell="Compare one step's update of one matrix with the update in one process.",
        fix=(
            "Pass the DTensors to `torch.optim.Muon(matrices)`, not the result of `to_local()`. Use AdamW for "
            "everything else."
        ),
        numbers=("Muon's updates differ from those in one process by a third or more",),
        broken=orthogonalize_own_rows,
        fixed=orthogonalize_the_matrix,
        right=orthogonalized_alone,
        tolerance=0.02,  # its loop computes in bf16
    ),
    Failure(
        name="wrong-bf16-reduction",
        title="Convergence is a little worse than in one process",
        why=(
            "Through PyTorch 2.14, `MixedPrecisionPolicy(param_dtype=torch.bfloat16)` also reduces gradients in bf16, "
            "which keeps 8 significant bits. Since 2.15, it reduces them in fp32. FSDP1 still reduces in bf16. The "
            "more ranks there are, the more is lost to rounding."
        ),
        tell="Compare one step's gradient norm with the fp32 norm. Here, the norms differ in the fourth digit.",
        fix=(
            "Use `MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)`. This doubles the "
            "number of bytes that are reduced."
        ),
        numbers=("the gradient norm differs from fp32's in the third or fourth digit",),
        behavior=(
            (
                "gradients are reduced in bf16; reduce_dtype; FSDP's loss is slightly different from DDP's, or "
                "diverges late"
            ),
            "mixed precision with a large number of ranks: precision is lost in the reduce-scatter",
        ),
        broken=reduce_in_bf16,
        fixed=reduce_in_fp32,
        right=gradient_of_all_images,
    ),
)
