"""It trains, but wrongly: images, statistics and metrics that differ from those of one process."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DistributedSampler

from fsdp_helpers.teaching.failures.entry import Failure, Numbers
from fsdp_helpers.teaching.failures.small_job import WIDTH, images

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
    """Return the averages over both halves of the images, each normalized separately, computed in one process."""
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
        title="Every epoch has the same order",
        why="`DistributedSampler` shuffles by its seed and its epoch, and only you know which epoch it is.",
        tell="Print the first indices of two epochs: they're equal.",
        fix="`sampler.set_epoch(epoch)` at the start of every epoch.",
        broken=forget_set_epoch,
        fixed=call_set_epoch,
        right=drawn_by_hand,
    ),
    Failure(
        name="wrong-sampler-padding",
        title="The accuracy depends on the number of ranks",
        why="`DistributedSampler` pads: with five images on two ranks, it repeats one, so that both have three. In training, that hardly matters. In an evaluation, one image counts twice.",
        tell="Add up the images that the ranks evaluated, and compare with the length of the data set.",
        fix="Split the images among ranks without padding, and divide the sum of hits by the number of images.",
        broken=count_padded_images,
        fixed=count_each_image_once,
        right=five_images,
    ),
    Failure(
        name="wrong-batchnorm",
        title="Ranks disagree in evaluation",
        why="The running mean and variance of a BatchNorm are buffers: they aren't sharded, and nothing synchronizes them. Each "
        "rank computes them from its own images, and a checkpoint keeps one rank's.",
        tell="Compare `running_mean` and `running_var` across the ranks.",
        fix="Average over the ranks, variance included, before you evaluate or save: `dist.all_reduce(buffer); buffer /= "
        "world_size`. The averaged variance leaves out the distance between the ranks' means: next to nothing with "
        "shuffled data, but 1.05 instead of 1.96 if one of two ranks has values larger by 2. `SyncBatchNorm`, on GPUs, "
        "includes it; GroupNorm "
        "has no statistics at all.",
        broken=keep_own_statistics,
        fixed=average_statistics,
        right=statistics_alone,
    ),
    Failure(
        name="wrong-metric-order",
        title="Logged numbers are impossible",
        why="Two all-reduces of the same shape, in a different order on one rank: they match, so nothing waits, and the loss of "
        "one rank is added to the image count of the other.",
        tell="Trace the collectives: their sizes agree, but their meanings don't. Log a constant whose sum you know.",
        fix="Reduce in the same order on every rank, or reduce all metrics as one tensor.",
        broken=reduce_in_own_order,
        fixed=reduce_in_sorted_order,
        right=metrics_by_hand,
    ),
)
