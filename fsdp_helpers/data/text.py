"""Text as bytes, split into sequences. Each token is a byte, and the model predicts the next byte."""

import hashlib
import importlib
import inspect
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fsdp_helpers.data.images import Dataset, Split
from fsdp_helpers.data.source import DataError

# Modules of Python's standard library with well-documented functions.
DOCUMENTED = (
    "builtins ast asyncio bisect calendar codecs copy difflib dis email fnmatch functools gc gettext glob heapq html "
    "imaplib inspect json linecache locale logging math mimetypes operator os pickle platform pprint random re select "
    "shutil signal site socket sqlite3 ssl statistics subprocess symtable sys sysconfig tempfile textwrap threading "
    "time timeit tokenize traceback types typing unittest uuid warnings weakref zipfile zlib"
).split()
TEST_PART = 10  # the last tenth of the sequences is for testing


@dataclass(frozen=True, kw_only=True)
class Text:
    """A text as bytes. Records identify it by its `source`, such as "text 5f2a9c01d7e3"."""

    content: bytes

    @property
    def source(self) -> str:
        return f"text {hashlib.sha256(self.content).hexdigest()[:12]}"

    def num_sequences(self, context: int) -> int:
        return (len(self.content) - 1) // context  # the last byte is only a target

    def num_test_sequences(self, context: int) -> int:
        return self.num_sequences(context) // TEST_PART


def read_text(path: str | None = None) -> Text:
    """Return the text in the file at `path` or, by default, the reference texts included with Python.

    Raises DataError if the file can't be read.
    """
    if path is None:
        return Text(content=reference_text().encode())
    try:
        return Text(content=Path(path).read_bytes())
    except OSError as error:
        reason = f"the text {path} can't be read ({error.strerror}); give a readable file with --text"
        raise DataError(reason) from error


def reference_text() -> str:
    """Return Python's own reference texts, 460 kB of English. The texts differ between Python versions."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def text_dataset(
    text: Text, *, context: int, train_sequences: int | None = None, test_sequences: int | None = None
) -> Dataset:
    """Return the text as sequences of `context` bytes; each byte's target is the byte after it."""
    num_sequences = text.num_sequences(context)
    numbers = torch.frombuffer(bytearray(text.content), dtype=torch.uint8)
    cut = num_sequences - text.num_test_sequences(context)
    used = num_sequences * context
    inputs = numbers[:used].view(-1, context)  # (sequences, context)
    targets = numbers[1 : used + 1].view(-1, context)
    return Dataset(
        source=text.source,
        train=_split(inputs[:cut], targets[:cut], train_sequences),
        test=_split(inputs[cut:], targets[cut:], test_sequences),
    )


def _split(inputs: Tensor, targets: Tensor, count: int | None) -> Split:
    return Split(images=inputs[:count].long(), labels=targets[:count].long())


def docstring_documents(*, longest: int = 256) -> list[str]:
    """Return a sorted list of docstrings of 8 to `longest` bytes from functions in Python's standard library."""
    found = set()
    for module in map(importlib.import_module, DOCUMENTED):
        for name, thing in inspect.getmembers(module, inspect.isroutine):
            text = inspect.getdoc(thing)
            if text and not name.startswith("_") and 8 <= len(text.encode()) <= longest:
                found.add(text)
    return sorted(found)
