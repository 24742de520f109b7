"""The cell magic `%%ranks`, which runs a cell on live ranks."""

import re
import traceback
from typing import Any

from fsdp_helpers.ranks.live import opened_last


class CellSyntaxError(Exception):
    """A syntax error in a cell, which no rank runs. (For a SyntaxError, IPython would show our own lines, too.)"""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


def ranks(line: str, cell: str) -> None:
    """Run this cell on the ranks opened last: `%%ranks` on all of them, `%%ranks 0` or `%%ranks 1,2` on some."""
    from IPython import get_ipython
    from IPython.core.error import UsageError

    if not re.fullmatch(r"\s*(\d+\s*(,\s*\d+\s*)*)?", line):
        raise UsageError(f"%%ranks {line}: give rank numbers, as in %%ranks 0 or %%ranks 1,2, or nothing for all")
    chosen = [int(number) for number in line.split(",")] if line.strip() else None
    # The magic itself is the cell's first line.
    code, file = f"\n{cell}", f"Cell In[{get_ipython().execution_count}]"
    try:
        opened_last().run(code, chosen, file)
    except SyntaxError as error:
        raise CellSyntaxError("".join(traceback.format_exception_only(error)).rstrip()) from None


def register(shell: Any) -> None:
    """Add this magic to a notebook; `%load_ext fsdp_helpers` calls this function."""
    shell.register_magic_function(ranks, magic_kind="cell")
