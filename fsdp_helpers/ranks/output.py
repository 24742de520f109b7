"""Output of cells on ranks: live while they run; at the end, once where ranks agree, rank by rank where they differ."""

import math
import time
from typing import Any

from fsdp_helpers.ranks.cells import without_addresses
from fsdp_helpers.ranks.progress import is_notebook
from fsdp_helpers.ranks.roll_call import list_ranks

DRAW_S = 0.1  # between two states of a cell's output


class CellOutput:
    """A cell's output: in a notebook, line by line while it runs; at the end, once for ranks that agree."""

    def __init__(self) -> None:
        self._bytes: dict[int, bytes] = {}
        self._handle: Any = None
        self._drawn_s = -math.inf

    def __enter__(self) -> "CellOutput":
        return self

    def __exit__(self, *_: object) -> None:
        """Show the output so far, if `finish` wasn't called, because the cell was interrupted."""
        if self._bytes is not None and any(self._bytes.values()):
            self.finish({})

    @property
    def text(self) -> str:
        return merge(self._texts())

    def _texts(self) -> dict[int, str]:
        return {
            rank: without_addresses(data.decode("utf-8", "replace")).rstrip("\n")
            for rank, data in sorted(self._bytes.items())
        }

    def add(self, rank: int, stream: int, data: bytes) -> None:
        self._bytes[rank] = self._bytes.get(rank, b"") + data
        if is_notebook() and time.monotonic() - self._drawn_s > DRAW_S:
            self._drawn_s = time.monotonic()
            self._show(self.text)

    def finish(self, values: dict[int, str | None]) -> None:
        """Show the final output: printed lines, then the values of the last line."""
        texts = self._texts()
        ranks = sorted(values.keys() | texts.keys())
        printed = merge({rank: texts.get(rank, "") for rank in ranks})
        shown = merge({rank: values.get(rank) or "" for rank in ranks})
        if text := "\n".join(filter(None, [printed, shown])):
            if is_notebook():
                self._show(text)
            else:
                print(text, flush=True)
        self._bytes = {}

    def _show(self, text: str) -> None:
        from IPython.display import display

        if self._handle is None:
            self._handle = display({"text/plain": text}, raw=True, display_id=True)
        else:
            self._handle.update({"text/plain": text}, raw=True)


def merge(texts: dict[int, str]) -> str:
    """Return the text of all ranks: once if they agree, else rank by rank, each under its name."""
    if len(set(texts.values())) <= 1:
        return next(iter(texts.values()), "")
    parts = []
    for text in dict.fromkeys(texts.values()):
        if text:
            name = f"{list_ranks([rank for rank in texts if texts[rank] == text])}: "
            parts.append(name + text.replace("\n", "\n" + " " * len(name)))
    return "\n".join(parts)
