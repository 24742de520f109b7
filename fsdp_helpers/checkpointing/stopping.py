"""Stopping on SIGTERM: all ranks stop together, after the same step, with a checkpoint.

Slurm sends SIGTERM before the time limit and before a preemption, and torchrun forwards it to its ranks. It may reach
some machines earlier than others, so the ranks ask each other after every step.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fsdp_helpers.ranks.group import sum_over_ranks

_asked: bool | None = None  # None while SIGTERM isn't being watched


class Stopped(Exception):
    """The run was asked to end early; its progress is saved."""


@contextmanager
def heeding_sigterm() -> Iterator[None]:
    """Within the block, note SIGTERM instead of exiting. Every rank of a group has to be in the block."""
    global _asked

    def note(*_: object) -> None:
        global _asked
        _asked = True

    before, _asked = signal.signal(signal.SIGTERM, note), False
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        _asked = None


def asked_to_stop() -> bool:
    """Return True on every rank as soon as one was asked to stop; a collective, if SIGTERM is being watched."""
    return _asked is not None and bool(sum_over_ranks(torch.tensor(int(_asked))))
