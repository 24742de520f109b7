"""Watch scripts as `inspect` does, and run take-home scripts for a short time."""

import tempfile
from pathlib import Path

from fsdp_helpers.inspecting.report import findings
from fsdp_helpers.inspecting.run import watch_ranks
from fsdp_helpers.inspecting.watch import Record

FOLDER = Path(__file__).parents[2] / "notebooks" / "take_home"
TAKE_HOME = ("checkpoint.py", "ddp.py", "fsdp1.py", "fsdp2.py", "levers.py", "offload.py", "vit.py")
LIMIT_S = 240.0


def watch(name: str, code: str, arguments=(), num_ranks: int = 2) -> tuple[dict[str, str], list[Record], str]:
    """What is found in `code`, run as NAME to its end on every rank; the ranks' records; and what they printed."""
    said: list[bytes] = []
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, name).write_text(code)
        run = (name, list(map(str, arguments)), num_ranks, LIMIT_S, lambda rank, stream, data: said.append(data))
        records = watch_ranks(*run, folder=folder)
    return findings(records), records, b"".join(said).decode(errors="replace")


def take_home(name: str, folder: Path) -> tuple[str, list[str]]:
    """A take-home script and its arguments, for a short run that writes into `folder`."""
    return (FOLDER / name).read_text(), {"checkpoint.py": [str(folder / "run"), "4"]}.get(name, [])
