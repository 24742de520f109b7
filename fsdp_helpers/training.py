"""One epoch of training, one evaluation: the same code for one process and for many."""

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import record_function

Batches = Iterable[tuple[Tensor, Tensor]]


def train_one_epoch(
    model: nn.Module,
    batches: Batches,
    optimizer: torch.optim.Optimizer,
    after_step: Callable[[Tensor, int], None] | None = None,
) -> Tensor:
    """Train on every batch once and return this rank's loss of each step, shape (num_steps,).

    `after_step(loss, batch_bytes)` is called after each step; reading the loss there makes a GPU wait.
    """
    model.train()
    losses = []
    for images, labels in batches:
        losses.append(train_step(model, images, labels, optimizer))
        if after_step is not None:
            after_step(losses[-1], images.nbytes + labels.nbytes)
    return torch.stack(losses) if losses else torch.empty(0)


def train_step(model: nn.Module, images: Tensor, labels: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
    """One step of training; returns the mean loss over this rank's images, before the update.

    The named phases cost next to nothing and show up in every trace. Cross-entropy serves logits and
    log-probabilities alike, since log-softmax leaves log-probabilities as they are.
    """
    with record_function("train step"):
        with record_function("forward"):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
        with record_function("backward"):
            loss.backward()
        with record_function("step"):
            optimizer.step()
    return loss.detach()


@torch.no_grad()
def evaluate(model: nn.Module, batches: Batches) -> Tensor:
    """This rank's sums over its test images: loss, correct answers, images. Shape (3,), float64.

    Sums, not means: ranks with different numbers of images can add them up and divide once.
    """
    model.eval()
    sums = None
    for images, labels in batches:
        outputs = model(images)
        loss = F.cross_entropy(outputs, labels, reduction="sum")
        correct = (outputs.argmax(dim=1) == labels).sum()
        batch_sums = torch.stack([loss.double(), correct.double(), torch.full_like(loss, len(labels)).double()])
        sums = batch_sums if sums is None else sums + batch_sums
    return sums
