"""Wrong results without an error: the images, statistics and metrics don't match a single-process run."""

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
    """Return statistics averaged over the two halves of the images, computed in one process."""
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
        title="The data comes in the same order in every epoch",
        why="`DistributedSampler` shuffles based on its seed and its epoch, and only you know which epoch it is.",
        tell=(
            "Print the first indices of two epochs: they're the same. A resumed run that starts again at epoch 0 gets "
            "the first epoch's order."
        ),
        fix=(
            "Call `sampler.set_epoch(epoch)` at the start of every epoch. After resuming, continue with the saved "
            "epoch."
        ),
        numbers=(
            "the same order of samples in every epoch",
            "the loss at step 201 of a resumed run differs from the uninterrupted run's",
        ),
        behavior=(
            "DistributedSampler does not shuffle: the same data order in each epoch",
            "data isn't shuffled in distributed training; each epoch has the same order of batches",
            "the shuffle is identical in every epoch; set_epoch is missing",
            (
                "after resuming in the middle of an epoch, the order of the data or the loss differs from the "
                "uninterrupted run: the sampler's epoch starts at 0 again"
            ),
            "resuming mid-epoch with skip_first_batches gives different batches; samples are repeated or left out",
        ),
        broken=forget_set_epoch,
        fixed=call_set_epoch,
        right=drawn_by_hand,
    ),
    Failure(
        name="wrong-sampler-padding",
        title="The accuracy depends on the number of ranks",
        why=(
            "`DistributedSampler` pads the data: with five images on two ranks, it repeats one image, so that each "
            "rank has three. That hardly matters in training, but in an evaluation, the repeated image counts twice."
        ),
        tell="Add up how many images each rank evaluated, and compare the sum with the size of the data set.",
        fix=(
            "Split the images among ranks without padding, and divide the total hits by the number of images. With a "
            "sharded model, also give every rank the same number of batches, or it hangs: see "
            "[hang-uneven-batches](#hang-uneven-batches)."
        ),
        numbers=(
            "the accuracy depends on the number of ranks; more images are evaluated than there are in the data set",
            "metrics in a distributed evaluation differ slightly from a single GPU's",
            "the accuracy changes by a fraction of a percent with the number of GPUs, for the same weights",
        ),
        behavior=(
            (
                "single and multi-GPU evaluation differ; the validation accuracy is incorrect; DistributedSampler "
                "pads the number of samples"
            ),
            (
                "the number of predictions after gathering is larger than the data set; duplicated samples in "
                "distributed evaluation"
            ),
            "test accuracy or IoU differs between one and several GPUs",
            (
                "the test set grows: 499 samples become 512, 500 or a multiple of the number of GPUs; samples are "
                "repeated or copied"
            ),
            "the number of results, predictions or outputs is larger than the data set",
            (
                "validation or test metrics are slightly wrong, higher or lower, in DDP mode; duplicates to make it "
                "evenly divisible"
            ),
            "results on several GPUs aren't in order, or contain duplicates",
        ),
        broken=count_padded_images,
        fixed=count_each_image_once,
        right=five_images,
    ),
    Failure(
        name="wrong-local-metric",
        title="Each rank reports a different accuracy",
        why=(
            "A sampler gives each rank only some of the images, and a rank's accuracy or loss covers only those. If "
            "you divide by the length of the full data set, the result is N times too small."
        ),
        tell="Print the metric and the number of images on each rank.",
        fix=(
            "Put both counts into one tensor, `totals`, call `dist.all_reduce(totals)`, then divide. Or use "
            "`accelerator.gather_for_metrics`, torchmetrics, or `self.log(..., sync_dist=True)`."
        ),
        numbers=("each process returns a different accuracy, loss or validation result",),
        behavior=(
            "the validate function gives different values on each rank under DDP; which one is right",
            (
                "metrics aren't reduced or averaged over the GPUs; all_reduce of correct and total; the log shows "
                "only rank 0's part"
            ),
            "accuracy drops as the number of GPUs grows: one rank's correct predictions divided by the full data set",
        ),
        broken=report_own_accuracy,
        fixed=report_common_accuracy,
        right=accuracy_alone,
    ),
    Failure(
        name="wrong-no-labels",
        title="NaN from a batch in which every label is ignored",
        why=(
            "A mean over no labels is 0/0. If one rank's micro-batch has only labels of -100 (a prompt, padding, a "
            "cut-off answer), its loss is NaN. `cross_entropy` gives that rank a gradient of 0, so the mean over the "
            "ranks is too small, here by half. If you use your own mask, `(loss * mask).sum() / mask.sum()`, every "
            "rank's gradients become NaN."
        ),
        tell="`(labels != -100).sum()` is 0 on one rank. The NaN loss appears at random steps, even in bf16 and fp32.",
        fix=(
            "Call `dist.all_reduce(num_labels)`, then `(loss_sum * world_size / num_labels.clamp(min=1)).backward()`. "
            "Or filter out samples without labels."
        ),
        numbers=(
            "the loss is NaN for some batches only: all labels are -100 or ignore_index",
            (
                "the loss is NaN at random steps in bf16 or fp32, from a sample that is fully masked, truncated, "
                "empty or padding"
            ),
        ),
        behavior=(
            "nn.CrossEntropyLoss returns NaN when all the targets are ignored",
            (
                "SFT loss becomes NaN: the prompt fills the sequence, so no answer token is left; "
                "train_on_responses_only, max_length"
            ),
            "a division by zero: no valid token, no positive sample or no box on one rank; reduction='mean'",
        ),
        broken=mean_of_no_labels,
        fixed=mean_of_all_labels,
        right=labels_alone,
    ),
    Failure(
        name="wrong-batchnorm",
        title="Ranks disagree in evaluation",
        why=(
            "A BatchNorm layer's running mean and variance are buffers: they aren't sharded, and FSDP doesn't "
            "synchronize them. Each rank computes them from its own images, and a checkpoint keeps only one rank's "
            "values. (DDP copies rank 0's values to all ranks before each forward pass.)"
        ),
        tell="Compare `running_mean` and `running_var` across the ranks.",
        fix=(
            "Before you evaluate or save, average the buffers over the ranks, including the variance: "
            "`dist.all_reduce(buffer); buffer /= world_size`. The averaged variance leaves out the distance between "
            "the ranks' means. With shuffled data, that distance is tiny, but if the values on one of two ranks are "
            "shifted by 2, the averaged variance is 1.05 instead of 1.96. `SyncBatchNorm`, which needs GPUs, includes "
            "the distance, and GroupNorm has no running statistics at all."
        ),
        numbers=("running_mean and running_var differ from rank to rank",),
        behavior=(
            "ranks disagree in evaluation; a checkpoint scores differently from the run",
            "BatchNorm statistics differ between GPUs; worse accuracy with a small batch per GPU; SyncBatchNorm",
            (
                "validation accuracy is much worse, or differs from rank to rank, with BatchNorm and a small batch "
                "per GPU"
            ),
            "the running statistics are those of rank 0 or of a single GPU; convert_sync_batchnorm",
            "works in train mode, but is bad in eval mode, on several GPUs",
        ),
        quotes={
            "a run on the CPU": (
                "SyncBatchNorm expected input tensor to be on GPU",
                "Expected more than 1 value per channel when training",
                "SyncBatchNorm layers only work with GPU modules",
            ),
            "an older PyTorch": ("SyncBatchNorm is only supported within DistributedDataParallel",),
        },
        broken=keep_own_statistics,
        fixed=average_statistics,
        right=statistics_alone,
    ),
    Failure(
        name="wrong-metric-order",
        title="The log shows impossible numbers",
        why=(
            "One rank runs two all-reduces of the same shape in the opposite order. The shapes match, so nothing "
            "hangs, and one rank's loss is added to the other rank's image count."
        ),
        tell=(
            "A trace shows no mismatch, because the sizes agree. `dist.all_gather_object(orders, names)` shows that "
            "the ranks' names are in different orders."
        ),
        fix="Reduce the metrics in the same order on every rank, or reduce them all as one tensor.",
        numbers=(
            "logged numbers are impossible: one metric contains part of a different one",
            "an accuracy above 1",
        ),
        behavior=("metrics are mixed up, larger than 100% or negative after an all-reduce",),
        broken=reduce_in_own_order,
        fixed=reduce_in_sorted_order,
        right=metrics_by_hand,
    ),
)
