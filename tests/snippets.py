"""Snippets of code that fail on purpose, and what they say: the error, its traceback, warnings, logs and output.

python tests/snippets.py FILE runs a file's snippets, paragraph by paragraph, in this process, and prints the texts as JSON.
"""

import json
import logging
import os
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from fsdp_helpers.teaching.failures import small_job
from fsdp_helpers.teaching.failures.saving import shared_folder


def paragraphs(path: Path) -> list[str]:
    """Return the snippets of a file; a line that begins with # is a comment."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    return [part for part in "\n".join(lines).split("\n\n") if part.strip()]


def what_it_says(snippet: str, **names: object) -> str:
    """Run a snippet, and return all that it says, C++ and child processes included."""
    with tempfile.TemporaryFile("w+") as file, warnings.catch_warnings():
        warnings.simplefilter("always")
        standard = {number: os.dup(number) for number in (1, 2)}
        handler = logging.StreamHandler(file)
        handler.setFormatter(logging.Formatter("%(levelname)s:%(name)s:%(message)s"))
        loggers = [logging.getLogger(name) for name in ("", "torch", "torch.distributed")]
        warnings.showwarning = lambda message, *_: print(message, file=file, flush=True)
        try:
            for number in standard:
                os.dup2(file.fileno(), number)
            for logger in loggers:
                logger.addHandler(handler)
            exec(snippet, {"torch": torch, "dist": dist, "nn": torch.nn, "F": torch.nn.functional, **names})
        except BaseException:  # also a SystemExit
            print(traceback.format_exc(), file=file)
        finally:
            for logger in loggers:
                logger.removeHandler(handler)
            sys.stdout.flush()
            sys.stderr.flush()
            for number, copy in standard.items():
                os.dup2(copy, number)
                os.close(copy)
        file.seek(0)
        return file.read()


def say_on_ranks(rank: int, world_size: int, snippets: list[str]) -> list[str]:
    """Run snippets in turn on all ranks; a snippet must end on every rank. This is a rank function."""
    names = vars(small_job) | vars(fsdp) | {"checkpoint": checkpoint, "ModuleWrapPolicy": ModuleWrapPolicy}
    names |= {"CPU": torch.device("cpu"), "mesh": small_job.cpu_mesh(), "rank": rank, "world_size": world_size}
    names |= {"shared_folder": shared_folder, "DistributedDataParallel": DistributedDataParallel}
    return [what_it_says(snippet, **names) for snippet in snippets]


if __name__ == "__main__":
    print(json.dumps([what_it_says(snippet) for snippet in paragraphs(Path(sys.argv[1]))]))
