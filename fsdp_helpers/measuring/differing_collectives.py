"""Find where ranks diverge, by logging each collective before it begins and comparing the logs."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_helpers.measuring.collectives import as_collective, is_collective
from fsdp_helpers.quantities import format_bytes
from fsdp_helpers.records import Collective


@dataclass(frozen=True)
class Divergence:
    """The first position at which ranks call different collectives."""

    position: int  # the number of collectives before it, which all ranks have in common
    collectives: tuple[Collective | None, ...]  # one per rank; None if that rank has no more

    def __str__(self) -> str:
        places = [f"rank {rank}: {describe(event)}" for rank, event in enumerate(self.collectives)]
        return "\n".join([f"{self.position} collectives in common, then the ranks diverge:", *places])


def describe(event: Collective | None) -> str:
    """Describe a collective in words."""
    return "no further collective" if event is None else f"{event.op} of {format_bytes(event.bytes)}"


def compare_collectives(traces: Sequence[Sequence[Collective]]) -> Divergence | None:
    """Return the first point where the ranks' traces differ in a collective's kind or size; None if they never do.

    Within a group, collectives are matched only by their order. Equal traces don't prove that the ranks agree: two
    all-reduces of the same size may still be for different tensors.
    """
    for position in range(max(map(len, traces), default=0)):
        events = tuple(trace[position] if position < len(trace) else None for trace in traces)
        if len({(event.op, event.bytes) if event else None for event in events}) > 1:
            return Divergence(position, events)
    return None


class CollectiveLog(TorchDispatchMode):
    """A dispatch mode that logs each collective to a file before it begins, so that even one that hangs is logged."""

    def __init__(self, file: TextIO) -> None:
        super().__init__()
        self.file = file

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if is_collective(func):
            print(json.dumps(asdict(as_collective(func, args, kwargs or {}, (0.0, 0.0)))), file=self.file, flush=True)
        return func(*args, **(kwargs or {}))


@contextmanager
def log_collectives(path: Path) -> Iterator[None]:
    """Within the block, log this rank's collectives to `path`, one per line."""
    with open(path, "w") as file, CollectiveLog(file):
        yield


def read_log(path: Path) -> list[Collective]:
    """Return the collectives from a log written by `log_collectives`, even if the rank was killed."""
    return [Collective(**json.loads(line)) for line in path.read_text().splitlines()]
