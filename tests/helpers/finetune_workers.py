"""finetune.py on ranks, several runs in one launch; a gradient that isn't finite in either fine-tuning script.

Every rank imports this module.
"""

import contextlib
import io
import itertools
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch.distributed as dist
from take_home_workers import load_script
from torch import nn


@dataclass(frozen=True)
class Poison:
    """One element of one rank's gradient gets `value` (or stays, for None) in a run's N-th step, counted from 0."""

    value: float | None
    step: int
    with_sigterm: bool = False  # the same rank receives SIGTERM in that step


@dataclass(frozen=True)
class Ended:
    """What a run printed on one rank, and its exit status."""

    output: str
    errors: str
    status: int
    left: list[str]  # in the run's folder


@contextmanager
def poisoned(poison: Poison) -> Iterator[None]:
    """Within the block, the last rank's gradient is poisoned just before it's clipped."""
    clip, steps = nn.utils.clip_grad_norm_, itertools.count()

    def poison_and_clip(parameters, *rest, **settings):
        parameters = list(parameters)
        if next(steps) == poison.step and dist.get_rank() == dist.get_world_size() - 1:
            own = [one.grad.to_local() for one in parameters if one.grad is not None]
            if poison.value is not None:
                next(shard for shard in own if shard.numel()).view(-1)[0] = poison.value
            if poison.with_sigterm:
                os.kill(os.getpid(), signal.SIGTERM)
        return clip(parameters, *rest, **settings)

    with patch.object(nn.utils, "clip_grad_norm_", poison_and_clip):
        yield


def run_each(
    rank: int, world_size: int, ports: list[int], runs: list[tuple[list[str], Poison | None]], settings: dict
) -> list[Ended]:
    """Each run in a group that it makes itself; `settings` replace the script's."""
    dist.destroy_process_group()
    found = []
    for port, (words, poison) in zip(ports, runs, strict=True):
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
        script = load_script("finetune.py")
        vars(script).update(settings)
        output, errors, status = io.StringIO(), io.StringIO(), 0
        ending = patch.object(os, "_exit", sys.exit)  # how the script ends on all ranks at once
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors), ending:
            with poisoned(poison) if poison else nullcontext():
                try:
                    script.main(*words)
                except SystemExit as ended:
                    status = ended.code
        if dist.is_initialized():
            dist.destroy_process_group()
        left = sorted(path.name for path in Path(words[2]).iterdir())
        found.append(Ended(output.getvalue(), errors.getvalue(), status, left))
    return found
