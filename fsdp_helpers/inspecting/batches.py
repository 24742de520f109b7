"""Probes of what ranks train on, and what comes of it: batches, samplers, losses, numbers, files."""

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DistributedSampler

from fsdp_helpers.inspecting.watch import Watch, digest, place

SAME = ("ToCopyBackward", "ViewBackward", "SqueezeBackward", "ReshapeAliasBackward")  # they don't change a loss


def keep_batch(watch: Watch, module: nn.Module, inputs: tuple) -> None:
    """Keep what the outermost module is called with, for `same_batches`. Silent without gradients."""
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    if tensors and tensors[0].is_leaf and watch.several and watch.with_grad:
        watch.record.seen.add("batches")
        whole = tensors[0].untyped_storage()
        batches = watch.kept.setdefault("batches", {})
        batches[digest(tensors)] = tensors[0].nbytes, whole.data_ptr(), whole.nbytes(), place()


def same_batches(watch: Watch) -> None:
    """Compare the batches of all forward passes over the ranks, at the end.

    Silent if all ranks go through all of a tensor, and if every step has the same tensor as a whole: that's a toy, or
    a batch that's meant to be overfitted.
    """
    batches = watch.kept.get("batches", {})
    covered = Counter()
    for num_bytes, address, size, _ in batches.values():
        covered[address, size] += num_bytes
    is_part = any(num_bytes < size for (_, size), num_bytes in covered.items())
    if is_part or len(batches) > 1 and all(num == size for num, _, size, _ in batches.values()):
        text = f"all ranks have the same batch in each of {len(batches)} forward passes"
        watch.note("different", "wrong-same-data", text, tuple(batches), line=next(iter(batches.values()))[-1])


def same_order(watch: Watch, original: Callable, sampler: DistributedSampler) -> Iterator[int]:
    """Follow each `DistributedSampler` that shuffles through its passes, and compare their epochs.

    Silent about passes that end early, and about one in which the model is called but not trained: the order of an
    evaluation doesn't matter.
    """
    watch.record.seen.add("samplers")
    before = watch.counts.copy()
    if sampler.shuffle and watch.kept.get(sampler) == sampler.epoch:
        text = f"a sampler begins another pass with epoch {sampler.epoch}, in the same order"
        watch.note("finding", "wrong-set-epoch", text)
    yield from original(sampler)
    if watch.counts["backward"] > before["backward"] or watch.counts["forward"] == before["forward"]:
        watch.kept[sampler] = sampler.epoch


def values_in_mean(loss: Any) -> int | None:
    """Return the number of values that a loss is the mean of, according to its graph; None if it's anything else."""
    node = loss.grad_fn if isinstance(loss, Tensor) else None
    while node and type(node).__name__.startswith(SAME):
        node = node.next_functions[0][0]
    if type(node).__name__.startswith("Mean"):
        return math.prod(node._saved_self_sym_sizes)
    if getattr(node, "_saved_reduction", 0) != 1 or getattr(node, "_saved_weight", None) is not None:
        return None
    if hasattr(node, "_saved_total_weight"):  # of cross-entropy, which leaves labels out
        return int(node._saved_total_weight)
    return node._saved_self.numel() if hasattr(node, "_saved_self") else None


def losses(watch: Watch, loss: Any) -> None:
    """Compare the numbers of values that losses are means of over the ranks, before backward.

    Silent about a loss that's multiplied, divided or added up after the mean, and without a wrapper for several ranks.
    """
    count = values_in_mean(loss)
    if watch.several and count is not None:
        watch.record.seen.add("losses")
        text = f"the loss, {loss.item():.4g}, is a mean over {count} values, and the ranks' means count the same"
        watch.note("same", "wrong-mean-of-means", text, count)
        if count == 0:
            watch.note("finding", "wrong-no-labels", text)


def clipping(watch: Watch, parameters: Any, max_norm: float, norm: Tensor, *_: Any, **__: Any) -> None:
    """Compare the norm by which torch clips gradients over the ranks.

    Silent about a norm that's a DTensor, which is one number for all ranks, and without a wrapper for several ranks.
    """
    watch.record.seen.add("clipping")
    if watch.several and not isinstance(norm, DTensor):
        text = f"gradients are clipped by this rank's own norm, {norm.item():.4g}"
        watch.note("same", "wrong-clip-local-norm", text, norm.item())


def partial_numbers(watch: Watch, tensor: Any, *_: Any) -> None:
    """Look at DTensors whose value is read with `item`, `float`, `tolist` or an f-string.

    Silent unless a placement is partial: then each rank reads its own part of a sum.
    """
    if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
        text = f"a number is read from a partial DTensor: {tensor.to_local().item():.4g} is this rank's part"
        watch.note("finding", "wrong-clip-local-norm", text)


def saved_by_all(watch: Watch, content: Any, target: Any, *_: Any, **__: Any) -> None:
    """Compare the paths that `torch.save` is given over the ranks. Silent about a path that isn't on all of them."""
    watch.record.seen.add("saving")
    if isinstance(target, (str, os.PathLike)):
        path = os.path.abspath(target)
        watch.note("different", "save-half-written", f"every rank saves {os.path.basename(path)}", "saved", key=path)
