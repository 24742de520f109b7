"""Probes of what ranks train on: batches, samplers, random numbers, loaders."""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, DistributedSampler

from fsdp_helpers.inspecting.watch import Watch, digest, place
from fsdp_helpers.ranks.group import num_cores


def same_batch(watch: Watch) -> None:
    """Compare the tensors that the model is called with over the ranks (`Module.__call__`).

    Silent without gradients or a wrapper for several ranks, if all ranks go through all of a tensor, and if every step
    has the same tensor as a whole: that's a toy, or a batch that's meant to be overfitted.
    """
    batches: dict[str, tuple[int, int, int]] = {}  # digest -> bytes, address and bytes of the tensor it's a part of
    line = []

    def before_forward(module: nn.Module, args: tuple, options: dict) -> None:
        tensors = [leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, Tensor)]
        if tensors and tensors[0].is_leaf and watch.several and watch.with_grad and len(batches) < 100:
            watch.saw("batches")
            whole = tensors[0].untyped_storage()
            batches[digest(tensors)] = tensors[0].nbytes, whole.data_ptr(), whole.nbytes()
            line.append(place())

    def compare() -> None:
        covered, sizes = Counter(), {}
        for num_bytes, address, size in batches.values():
            covered[address] += num_bytes
            sizes[address] = size
        is_part = any(covered[address] < size for address, size in sizes.items())
        if batches and (is_part or len(batches) > 1 and all(num == size for num, _, size in batches.values())):
            text = f"all ranks have the same batch in each of {len(batches)} forward passes"
            watch.differ("wrong-same-data", 0, tuple(batches), text, line[0])

    watch.on("forward", before_forward)
    watch.on("end", compare)


def samplers(watch: Watch) -> None:
    """Follow each `DistributedSampler` through its passes: its epoch, and the samples it repeats.

    Silent about passes that end early, that drop samples instead, or during which the model is trained.
    """
    done: dict[int, tuple[DistributedSampler, int]] = {}
    backwards = [0]

    def count(*_: Any) -> None:
        backwards[0] += 1

    def iterate(original: Callable, sampler: DistributedSampler) -> Iterator[int]:
        watch.saw("samplers")
        before, line = backwards[0], place()
        if sampler.shuffle and done.get(id(sampler), (None, None)) == (sampler, sampler.epoch):
            watch.say("wrong-set-epoch", f"a sampler begins another pass with epoch {sampler.epoch}, in the same order")
        yield from original(sampler)
        done[id(sampler)] = sampler, sampler.epoch
        padding = sampler.total_size - len(sampler.dataset)
        if padding > 0 and not sampler.shuffle and backwards[0] == before:
            text = f"the ranks get {sampler.total_size} samples of {len(sampler.dataset)}: {padding} are repeated"
            watch.say("wrong-sampler-padding", f"perhaps: {text}; certain, if this is an evaluation", line)

    watch.around(DistributedSampler, "__iter__", iterate)
    watch.on("backward", count)


def same_masks(watch: Watch) -> None:
    """Compare the state of torch's random generator over the ranks, before each dropout in training.

    Silent without a wrapper for several ranks.
    """
    counts = Counter()

    def before_dropout(*args: Any, **options: Any) -> None:
        p, training = (*args[1:], *(0.5, True)[len(args) - 1 :])[:2]
        if watch.several and options.get("p", p) and options.get("training", training):
            watch.saw("dropout")
            counts["calls"] += 1
            state = torch.get_rng_state()
            text = f"dropout number {counts['calls']} on {tuple(args[0].shape)} has the same mask on all ranks"
            watch.differ(
                "wrong-same-random-numbers", counts["calls"], digest([state, torch.tensor(args[0].shape)]), text
            )

    def before_attention(*args: Any, **options: Any) -> None:
        before_dropout(args[0], args[4] if len(args) > 4 else options.get("dropout_p", 0.0))

    watch.before(nn.functional, "dropout", before_dropout)
    watch.before(nn.functional, "scaled_dot_product_attention", before_attention)


def loader_workers(watch: Watch) -> None:
    """Count the passes of each `DataLoader` whose workers aren't persistent.

    Silent about loaders without workers, and about a second pass: `next(iter(loader))` may have been the first.
    """
    passes = Counter()

    def begin(loader: DataLoader) -> None:
        if loader.num_workers and not loader.persistent_workers:
            passes[id(loader)] += 1
            if passes[id(loader)] == 3:
                watch.say("slow-data-loader", f"{loader.num_workers} workers are started for the third time")

    watch.before(DataLoader, "__iter__", begin)


def threads(watch: Watch) -> None:
    """Compare the threads of all ranks on this machine with its cores, at the end.

    Silent if each rank has only one.
    """

    def at_end() -> None:
        cores, ranks = num_cores(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if (num := torch.get_num_threads()) > 1 and num * ranks > cores:
            watch.say("slow-threads", f"{ranks} ranks with {num} threads each share {cores} cores", "")

    watch.on("end", at_end)


PROBES = [same_batch, samplers, same_masks, loader_workers, threads]
