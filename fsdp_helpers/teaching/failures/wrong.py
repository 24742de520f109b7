"""It trains, but wrongly: gradients and weights that differ from those of one process."""

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
        broken=train_on_the_same_images,
        fixed=train_on_own_images,
        right=gradient_of_all_images,
    ),
    Failure(
        name="wrong-summed-loss",
        broken=sum_the_loss,
        fixed=sum_the_loss_and_scale,
        right=gradient_of_the_sum,
    ),
    Failure(
        name="wrong-mean-of-means",
        broken=mean_of_means,
        fixed=mean_over_all_tokens,
        right=gradient_of_all_images,
    ),
    Failure(
        name="wrong-clip-local-norm",
        broken=clip_by_own_shard,
        fixed=clip_by_the_whole_norm,
        right=clipped,
    ),
    Failure(
        name="wrong-local-norm-logged",
        broken=log_local_norm,
        fixed=log_full_norm,
        right=gradient_of_all_images,
    ),
    Failure(
        name="wrong-muon-local-rows",
        broken=orthogonalize_own_rows,
        fixed=orthogonalize_the_matrix,
        right=orthogonalized_alone,
        tolerance=0.02,  # its loop computes in bf16
    ),
    Failure(
        name="wrong-bf16-reduction",
        broken=reduce_in_bf16,
        fixed=reduce_in_fp32,
        right=gradient_of_all_images,
    ),
)
