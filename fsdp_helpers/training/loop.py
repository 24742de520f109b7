"""The loops for one epoch of training and for evaluation, the same for one process and for many."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import record_function

from fsdp_helpers.sharding.gradients import without_gradient_sync

Batches = Iterable[tuple[Tensor, Tensor]]


def train_one_epoch(
    model: nn.Module,
    batches: Batches,
    optimizer: torch.optim.Optimizer,
    after_step: Callable[[Tensor, int], None] | None = None,
    **step_settings,
) -> Tensor:
    """Train on every batch once; return this rank's loss in each step, shape (num_steps,).

    `after_step(loss, batch_bytes)` is called after each step; reading the loss there forces a wait for the GPU.
    `step_settings` are passed on to `train_step`.
    """
    model.train()
    losses = []
    for images, labels in batches:
        losses.append(train_step(model, images, labels, optimizer, **step_settings))
        if after_step is not None:
            after_step(losses[-1], images.nbytes + labels.nbytes)
    return torch.stack(losses) if losses else torch.empty(0)


def train_step(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    optimizer: torch.optim.Optimizer,
    *,
    micro_batches: int = 1,
    sync_micro_batches: bool = False,
) -> Tensor:
    """Take one training step; return the mean loss over this rank's images before the update, a scalar.

    The batch is processed in `micro_batches` equal parts (see `add_up_gradients`). The named phases cost next to
    nothing and show up in every trace.
    """
    with record_function("train step"):
        optimizer.zero_grad()
        loss = add_up_gradients(model, images, labels, micro_batches, sync_micro_batches)
        with record_function("step"):
            optimizer.step()
    return loss


def add_up_gradients(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    micro_batches: int = 1,
    sync_micro_batches: bool = False,
) -> Tensor:
    """Run forward and backward on each micro-batch in turn; return the mean loss over all images, a scalar.

    Gradients are reduced once, after the last micro-batch, or after every one with `sync_micro_batches`.
    """
    assert len(images) % micro_batches == 0, f"{len(images)} images aren't divisible by {micro_batches} micro-batches"
    losses = []
    for part_images, part_labels in zip(images.chunk(micro_batches), labels.chunk(micro_batches), strict=True):
        is_last = len(losses) == micro_batches - 1
        reducing = nullcontext() if is_last or sync_micro_batches else without_gradient_sync(model)
        with reducing:
            with record_function("forward"):
                # Because of this division, the gradients add up to the gradient of the mean over all images.
                loss = batch_loss(model, part_images, part_labels) / micro_batches
            with record_function("backward"):
                loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


def batch_loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss in fp32, a scalar. `labels` has the shape of the model's outputs without the last dimension.

    The model may have any dtype, and return logits or log-probabilities, which log-softmax doesn't change.
    """
    return F.cross_entropy(model(images).float(), labels)


@contextmanager
def layer_by_layer() -> Iterator[None]:
    """Within the block, make transformer layers call their inner layers during evaluation, as during training.

    Otherwise, `nn.TransformerEncoderLayer` takes a fast path that reads its layers' weights without calling the layers,
    and FSDP1 unshards a unit only when it's called.
    """
    usual = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(usual)


@torch.no_grad()
@layer_by_layer()
def evaluate(model: nn.Module, batches: Batches) -> Tensor:
    """Return three sums over this rank's test images: loss, correct answers and count; shape (3,), float64.

    We return sums, not means, so ranks with different numbers of images can add them up and divide at the end.
    """
    model.eval()
    sums = None
    for images, labels in batches:
        outputs = model(images).float()
        loss = F.cross_entropy(outputs, labels, reduction="sum")
        correct = (outputs.argmax(dim=-1) == labels).sum()
        batch_sums = torch.stack([loss.double(), correct.double(), torch.full_like(loss, labels.numel()).double()])
        sums = batch_sums if sums is None else sums + batch_sums
    return sums
