"""The modules that a chapter writes with `%%writefile`, for tests that run them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from chapters import FILE, body, code_cells, read_chapter


def written_files(number: str) -> dict[str, str]:
    """By name, the files that the cells of the chapter's body write; `%%writefile -a` adds to one."""
    files: dict[str, str] = {}
    for cell in code_cells(body(read_chapter(number))):
        magic, _, text = cell.source.partition("\n")
        if found := FILE.match(magic):
            files[found[1]] = (files.get(found[1], "") if " -a " in magic else "") + f"{text}\n"
    return files


@contextmanager
def importable(files: dict[str, str], folder: Path) -> Iterator[None]:
    """Within the block, this process and the ranks that it launches can import the files."""
    for name, text in files.items():
        (folder / name).write_text(text)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in files:
            sys.modules.pop(name.removesuffix(".py"), None)
