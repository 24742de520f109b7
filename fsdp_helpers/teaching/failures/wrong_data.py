"""It trains, but wrongly: images, statistics and metrics that differ from those of one process."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DistributedSampler

from fsdp_helpers.teaching.failures.entry import Failure, Numbers
from fsdp_helpers.teaching.failures.small_job import WIDTH, cpu_mesh, gradient_norm, images, small_model

# ---------------------------------------------------------------- the sampler


def new_places(orders: Sequence[list[int]]) -> Numbers:
    return {"images in a new place": sum(before != after for before, after in zip(*orders, strict=True))}


def forget_set_epoch(rank: int, world_size: int) -> Numbers:
    sampler, orders = DistributedSampler(range(8), world_size, 0, shuffle=True), []
    for _ in range(2):
        orders.append(list(sampler))
    return new_places(orders)


def call_set_epoch(rank: int, world_size: int) -> Numbers:
    sampler, orders = DistributedSampler(range(8), world_size, 0, shuffle=True), []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
    return new_places(orders)


def drawn_by_hand() -> Numbers:
    orders = [torch.randperm(8, generator=torch.Generator().manual_seed(epoch)).tolist()[::2] for epoch in (0, 1)]
    return new_places(orders)


def count_padded_images(rank: int, world_size: int) -> Numbers:
    sampler = DistributedSampler(range(5), world_size, rank, shuffle=False)
    count = torch.tensor(float(len(list(sampler))))
    dist.all_reduce(count)
    return {"images evaluated": count.item()}


def count_each_image_once(rank: int, world_size: int) -> Numbers:
    mine = range(5)[rank::world_size]
    count = torch.tensor(float(len(mine)))
    dist.all_reduce(count)
    return {"images evaluated": count.item()}


def five_images() -> Numbers:
    return {"images evaluated": 5}


# ---------------------------------------------------------------- a metric of one rank

HITS = (3.0, 1.0)  # of four images on each rank


def report_own_accuracy(rank: int, world_size: int) -> Numbers:
    return {"accuracy": HITS[rank] / 4}


def report_common_accuracy(rank: int, world_size: int) -> Numbers:
    hits_and_images = torch.tensor([HITS[rank], 4.0])
    dist.all_reduce(hits_and_images)
    hits, num_images = hits_and_images
    return {"accuracy": (hits / num_images).item()}


def accuracy_alone() -> Numbers:
    return {"accuracy": sum(HITS) / 8}


# ---------------------------------------------------------------- a batch without a label

IGNORED = -100  # `cross_entropy` leaves these labels out
LABELS = (torch.tensor([0, 1] * 4), torch.full((8,), IGNORED))  # rank 1's texts are all prompt


def mean_of_no_labels(rank: int, world_size: int) -> Numbers:
    model = fully_shard(small_model(), mesh=cpu_mesh())
    loss = cross_entropy(model(images()), LABELS[rank], ignore_index=IGNORED)
    loss.backward()
    return {"loss": mean_over_ranks(loss), "gradient norm": gradient_norm(model)}


def mean_of_all_labels(rank: int, world_size: int) -> Numbers:
    model = fully_shard(small_model(), mesh=cpu_mesh())
    loss_sum = cross_entropy(model(images()), LABELS[rank], ignore_index=IGNORED, reduction="sum")
    num_labels = (LABELS[rank] != IGNORED).sum()
    dist.all_reduce(num_labels)
    loss = loss_sum * world_size / num_labels.clamp(min=1)
    loss.backward()
    return {"loss": mean_over_ranks(loss), "gradient norm": gradient_norm(model)}


def mean_over_ranks(loss: Tensor) -> float:
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    return mean.item()


def labels_alone() -> Numbers:
    model = small_model()
    loss = cross_entropy(model(images().repeat(2, 1)), torch.cat(LABELS), ignore_index=IGNORED)
    loss.backward()
    return {"loss": loss.item(), "gradient norm": gradient_norm(model)}


# ---------------------------------------------------------------- statistics and metrics


def trained_batchnorm(rank: int, world_size: int) -> nn.BatchNorm1d:
    layer = nn.BatchNorm1d(WIDTH)
    layer(images()[rank::world_size])
    return layer


def keep_own_statistics(rank: int, world_size: int) -> Numbers:
    layer = trained_batchnorm(rank, world_size)
    return statistics(layer)


def average_statistics(rank: int, world_size: int) -> Numbers:
    layer = trained_batchnorm(rank, world_size)
    for buffer in (layer.running_mean, layer.running_var):
        dist.all_reduce(buffer)
        buffer /= world_size
    return statistics(layer)


def statistics(layer: nn.BatchNorm1d) -> Numbers:
    return {"running means": layer.running_mean.sum().item(), "running variances": layer.running_var.sum().item()}


def statistics_alone() -> Numbers:
    """Return the statistics of the two halves of the images, averaged, as computed in one process."""
    halves = [statistics(trained_batchnorm(half, 2)) for half in range(2)]
    return {name: sum(half[name] for half in halves) / 2 for name in halves[0]}


def reduce_in_own_order(rank: int, world_size: int) -> Numbers:
    metrics = {"loss": torch.tensor(0.5), "images": torch.tensor(4.0)}
    names = ["loss", "images"] if rank == 0 else ["images", "loss"]
    for name in names:
        dist.all_reduce(metrics[name])
    return {name: value.item() for name, value in metrics.items()}


def reduce_in_sorted_order(rank: int, world_size: int) -> Numbers:
    metrics = {"loss": torch.tensor(0.5), "images": torch.tensor(4.0)}
    names = ["loss", "images"] if rank == 0 else ["images", "loss"]
    for name in sorted(names):
        dist.all_reduce(metrics[name])
    return {name: value.item() for name, value in metrics.items()}


def metrics_by_hand() -> Numbers:
    return {"loss": 1.0, "images": 8.0}


WRONG_DATA = (
    Failure(
        name="wrong-set-epoch",
        broken=forget_set_epoch,
        fixed=call_set_epoch,
        right=drawn_by_hand,
    ),
    Failure(
        name="wrong-sampler-padding",
        broken=count_padded_images,
        fixed=count_each_image_once,
        right=five_images,
    ),
    Failure(
        name="wrong-local-metric",
        broken=report_own_accuracy,
        fixed=report_common_accuracy,
        right=accuracy_alone,
    ),
    Failure(
        name="wrong-no-labels",
        broken=mean_of_no_labels,
        fixed=mean_of_all_labels,
        right=labels_alone,
    ),
    Failure(
        name="wrong-batchnorm",
        broken=keep_own_statistics,
        fixed=average_statistics,
        right=statistics_alone,
    ),
    Failure(
        name="wrong-metric-order",
        broken=reduce_in_own_order,
        fixed=reduce_in_sorted_order,
        right=metrics_by_hand,
    ),
)
