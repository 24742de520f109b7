"""FSDP1's slices, written without gathering.

FSDP1 keeps the parameters of a unit in one flat tensor, and cuts that among the ranks wherever the cut falls. What a
rank has of a parameter is then a range of its values, read row by row: some boxes of it, such as the end of a row,
some whole rows, and the beginning of a row. torch's own state dict gathers a unit to cut it by rows instead.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.fsdp import FullyShardedDataParallel

from fsdp_helpers.checkpointing.state import TrainingState, plain_name
from fsdp_helpers.ranks.exchange import gather_over_ranks

Box = tuple[tuple[int, ...], tuple[int, ...]]  # where it begins in each dimension, and its sizes


def boxes(shape: tuple[int, ...], begin: int, end: int) -> Iterator[Box]:
    """The values from `begin` to `end` (not included) of a tensor, read row by row, as boxes in the same order."""
    if begin == end:
        return
    if len(shape) <= 1:
        yield (begin,) * len(shape), (end - begin,) * len(shape)
        return
    row_size = prod(shape[1:])
    first, last = -(-begin // row_size), end // row_size  # whole rows
    if first > last:
        yield from _in_row(shape, last, begin, end)
        return
    yield from _in_row(shape, first - 1, begin, first * row_size)
    if first < last:
        yield (first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])
    yield from _in_row(shape, last, last * row_size, end)


def _in_row(shape: tuple[int, ...], row: int, begin: int, end: int) -> Iterator[Box]:
    row_begin = row * prod(shape[1:])
    for offsets, sizes in boxes(shape[1:], begin - row_begin, end - row_begin):
        yield (row, *offsets), (1, *sizes)


@dataclass(frozen=True, eq=False)
class FlatSlice:
    """A rank's values of one tensor: those from `begin` on, in one dimension, of a tensor that is of `shape`."""

    values: Tensor
    begin: int
    shape: torch.Size

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        """What torch.distributed.checkpoint asks of an object that knows how it is to be written."""
        properties = TensorProperties(dtype=self.values.dtype)
        return [
            WriteItem(
                index=MetadataIndex(name, offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes)),
                    properties=properties,
                    size=self.shape,
                ),
            )
            for offsets, sizes in self._boxes()
        ]

    def box(self, wanted: torch.Size) -> Tensor:
        """The values of the box that begins at `wanted`."""
        position = 0
        for offsets, sizes in self._boxes():
            if offsets == tuple(wanted):
                return self.values[position : position + prod(sizes)].view(sizes)
            position += prod(sizes)
        raise KeyError(wanted)

    def _boxes(self) -> Iterator[Box]:
        return boxes(tuple(self.shape), self.begin, self.begin + self.values.numel())


class FlatPlanner(DefaultSavePlanner):
    """Finds the boxes of a `FlatSlice`, too."""

    def lookup_object(self, index: MetadataIndex) -> object:
        found = self.state_dict.get(index.fqn)
        return found.box(index.offset) if isinstance(found, FlatSlice) else super().lookup_object(index)


def flat_places(model: nn.Module) -> dict[nn.Parameter, tuple[int, torch.Size]] | None:
    """For each parameter of an FSDP1 model where this rank's values begin in it, and its whole shape.

    None if its slices cannot be told apart without gathering: no FSDP1, whole copies, parameters that are shared,
    laid out otherwise or not FSDP's, or a unit that is gathered at this moment.
    """
    places = {}
    for unit in FullyShardedDataParallel.fsdp_modules(model):
        handle = unit._handle
        if handle is None:  # nothing of its own to shard
            continue
        flat = handle.flat_param
        if not (handle.uses_sharded_strategy and handle._use_orig_params) or flat._shared_param_infos:
            return None
        for parameter, shape, info, is_plain in zip(
            flat._params, flat._shapes, flat._shard_param_infos, flat._contiguities, strict=True
        ):
            if not is_plain or parameter.numel() != (info.numel_in_shard or 0):
                return None
            places[parameter] = info.intra_param_start_idx or 0, shape
    return places if places and set(model.parameters()) == places.keys() else None


def read_flat_state(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> TrainingState | None:
    """As `read_state`, of an FSDP1 model, for saving: nothing is gathered, and each tensor is a `FlatSlice` of it.

    None, on every rank, if that cannot be done. Every rank has to call this.
    """
    places = flat_places(model)
    kept = optimizer.state if optimizer is not None else {}
    is_flat = places is not None and all(_follows(value, p) for p in places for value in kept.get(p, {}).values())
    if not isinstance(model, FullyShardedDataParallel) or not all(gather_over_ranks(is_flat)):
        return None
    names = {parameter: plain_name(model, name) for name, parameter in model.named_parameters()}
    buffers = {
        plain_name(model, f"{name}.{key}".removeprefix(".")): buffer
        for name, module in model.named_modules()
        for key, buffer in module._buffers.items()
        if buffer is not None and key not in module._non_persistent_buffers_set
    }

    def part(parameter: nn.Parameter, values: Tensor) -> FlatSlice | Tensor:
        whole = values.shape != parameter.shape  # a counter, say, that is of no slice
        return values if whole else FlatSlice(values.detach(), *places[parameter])

    return TrainingState(
        model={names[p]: part(p, p) for p in places} | buffers,
        optimizer={names[p]: {kind: part(p, value) for kind, value in kept[p].items()} for p in places if p in kept},
        groups=[
            {**group, "params": [names[parameter] for parameter in group["params"]]}
            for group in (optimizer.param_groups if optimizer is not None else [])
        ],
        buffers=frozenset(buffers),
    )


def _follows(value: object, parameter: nn.Parameter) -> bool:
    """Whether it is cut as `parameter` is, or one number for all of it."""
    return isinstance(value, Tensor) and (value.dim() == 0 or value.shape == parameter.shape)
