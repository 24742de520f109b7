"""Showing ranks' output: a launch's line by line; a cell's once if the ranks agree, and rank by rank if they differ."""

import math
import re
import sys
import time

from fsdp_helpers.notebook import InPlace, is_notebook
from fsdp_helpers.progress import print_above_bar
from fsdp_helpers.ranks.roll_call import list_ranks

DRAW_S = 0.1  # between two updates of a cell's output
ADDRESS = re.compile(r"( object)? at 0x[0-9a-fA-F]+")


class LaunchOutput:
    """Prints the output of a launch's ranks, each line once it's complete, and which rank it's from if `names`."""

    def __init__(self, names: bool) -> None:
        self._names = names
        self._unfinished: dict[tuple[int, int], bytes] = {}  # the beginning of a line, by rank and stream

    def add(self, rank: int, stream: int, data: bytes) -> None:
        """Receive output that a rank has printed, to stream 0 (standard output) or 1 (standard error)."""
        *lines, rest = (self._unfinished.pop((rank, stream), b"") + data).split(b"\n")
        if rest:
            self._unfinished[rank, stream] = rest
        for line in lines:
            self._print(rank, stream, line)

    def _print(self, rank: int, stream: int, line: bytes) -> None:
        name, text = f"[rank {rank}] " if self._names else "", line.decode("utf-8", "replace")
        print_above_bar(name + text if text else name.rstrip(), (sys.stdout, sys.stderr)[stream])

    def finish(self) -> None:
        """Print the unfinished lines."""
        for (rank, stream), line in self._unfinished.items():
            self._print(rank, stream, line)


class CellOutput:
    """Shows the output of one cell: in a notebook, line by line while it runs; elsewhere, once it has ended."""

    def __init__(self) -> None:
        self._printed: dict[int, bytes] = {}
        self._page = InPlace() if is_notebook() else None
        self._drawn_s = -math.inf

    def add(self, rank: int, stream: int, data: bytes) -> None:
        """Receive output that a rank has printed."""
        self._printed[rank] = self._printed.get(rank, b"") + data
        if self._page is not None and time.monotonic() - self._drawn_s > DRAW_S:
            self._drawn_s = time.monotonic()
            self._page.show(merge(self._texts()))

    def _texts(self) -> dict[int, str]:
        texts = {rank: data.decode("utf-8", "replace").rstrip("\n") for rank, data in sorted(self._printed.items())}
        return {rank: without_addresses(text) for rank, text in texts.items()}

    def finish(self, values: dict[int, str | None]) -> None:
        """Show the final output: everything the ranks printed, then the `values` of the cell's last line."""
        texts = self._texts()
        ranks = sorted(values.keys() | texts.keys())
        printed = merge({rank: texts.get(rank, "") for rank in ranks})
        shown = merge({rank: values.get(rank) or "" for rank in ranks})
        if text := "\n".join(filter(None, [printed, shown])):
            if self._page is not None:
                self._page.show(text)
            else:
                print(text, flush=True)


def merge(texts: dict[int, str]) -> str:
    """Merge the ranks' texts: into one copy if they agree, else one after another, each with its rank's name."""
    if len(set(texts.values())) <= 1:
        return next(iter(texts.values()), "")
    parts = []
    for text in dict.fromkeys(texts.values()):
        if text:
            name = f"{list_ranks([rank for rank in texts if texts[rank] == text])}: "
            parts.append(name + text.replace("\n", "\n" + " " * len(name)))
    return "\n".join(parts)


def without_addresses(text: str) -> str:
    """Return a text without memory addresses, which differ from run to run."""
    return ADDRESS.sub("", text)
