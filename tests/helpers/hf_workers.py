"""finetune_hf.py on ranks: several runs in one launch, with a look at what each asks torch for. Ranks import this."""

import argparse
import contextlib
import io
import math
import os
import signal
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch
import torch.distributed as dist
from finetune_workers import poisoned
from take_home_workers import load_script
from torch import nn

from fsdp_helpers.measuring.memory import trace_memory

STOP = 5  # the step in which a run is asked to end
CHUNK = 32  # tokens whose logits exist at a time: a row of 64 has two chunks


@dataclass
class Seen:
    """What a run asked torch for on one rank, and what rank 0 printed."""

    printed: str = ""
    units: list[str] = field(default_factory=list)  # the classes
    recomputed: int = 0  # calls of `checkpoint` that a backward will repeat
    chunks: list[int] = field(default_factory=list)  # tokens whose logits existed at a time
    saves: list[int] = field(default_factory=list)  # steps
    own_bytes: int = 0  # of parameters and moments at the end
    frozen_kept: bool = True
    num_rows_tried: int = 0  # in the try that shows whether documents stay apart
    refused: str | None = None
    status: int = 0  # of a run that all ranks end together
    left: list[str] = field(default_factory=list)  # in the run's folder
    peak_bytes: int = 0  # of the last step, where it is traced


def run_each(rank: int, world_size: int, ports: list[int], runs: list[list[str]], changes: list[dict]) -> list[Seen]:
    """Each run with its command line, one after the other, in a group that it makes and ends itself.

    Of a run that is to `stop`, the last rank receives SIGTERM in the step STOP; one that is `padded` has no packed
    rows; one that is `traced` is asked for its peak; one with a `poison` has it in its gradient; and one that is
    `judged` has a held-out loss that isn't finite.
    """
    dist.destroy_process_group()
    found = []
    for port, words, change in zip(ports, runs, changes, strict=True):
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
        script = load_script("finetune_hf.py")
        script.CHUNK = CHUNK
        if change["padded"]:
            script.documents_are_apart = lambda *_: False
        if change["stop"] and rank == world_size - 1:
            interrupt(script)
        if change["traced"]:
            script.Checkpoints.begin = lambda *_: None  # on the CPU, a save's copy is in the memory that is traced
        if change["judged"]:
            script.held_out_loss = lambda *_: math.nan
        with (
            trace_memory("cpu") if change["traced"] else nullcontext() as trace,
            poisoned(change["poison"]) if change["poison"] else nullcontext(),
        ):
            found.append(run_seen(script, words))
        if trace:
            found[-1].peak_bytes = trace.last_step().curve.peak_bytes
    return found


def interrupt(script: ModuleType) -> None:
    learning_rate = script.learning_rate

    def interrupted(step: int, *rest) -> float:
        if step + 1 == STOP:
            os.kill(os.getpid(), signal.SIGTERM)
        return learning_rate(step, *rest)

    script.learning_rate = interrupted


def run_seen(script: ModuleType, words: list[str]) -> Seen:
    seen = Seen()
    watch(script, seen)
    with (
        contextlib.redirect_stdout(io.StringIO()) as printed,
        contextlib.redirect_stderr(printed),
        mock.patch.object(os, "_exit", sys.exit),  # how the script ends on all ranks at once
    ):
        try:
            script.main(script.read_arguments(words))
        except Refused as refused:
            seen.refused = str(refused)
        except SystemExit as ended:
            seen.status = ended.code
    seen.printed = printed.getvalue()
    seen.left = sorted(path.name for path in Path(words[words.index("--out") + 1]).iterdir())
    if dist.is_initialized():
        dist.destroy_process_group()
    return seen


class Refused(BaseException):
    """The end of a run on every rank at once, where the others would wait for torchrun to end them."""


def watch(script: ModuleType, seen: Seen) -> None:
    """Note what the script asks for, and let it have it."""
    shard, recompute, cross_entropy = script.fully_shard, script.checkpoint, script.F.cross_entropy
    begin, train, are_apart = script.Checkpoints.begin, script.train, script.documents_are_apart

    def refuse(message: str, status: int = 2) -> None:
        raise Refused(message)

    def note_unit(module: nn.Module, **settings) -> nn.Module:
        seen.units.append(type(module).__name__)
        return shard(module, **settings)

    def note_recomputed(function, *inputs, **settings):
        if torch.is_grad_enabled():
            seen.recomputed += 1
        return recompute(function, *inputs, **settings)

    def note_chunk(logits, *rest, **settings):
        seen.chunks.append(len(logits))
        return cross_entropy(logits, *rest, **settings)

    def note_rows(loss, device, num_rows):
        seen.num_rows_tried = num_rows
        return are_apart(loss, device, num_rows)

    def note_save(self, loss, optimizer, step):
        seen.saves.append(step)
        return begin(self, loss, optimizer, step)

    def look_at_state(loss, optimizer, *rest):
        frozen = {name: one.to_local().clone() for name, one in loss.named_parameters() if not one.requires_grad}
        done = train(loss, optimizer, *rest)
        parameters = dict(loss.named_parameters())
        seen.frozen_kept = all(torch.equal(parameters[name].to_local(), one) for name, one in frozen.items())
        moments = [one.to_local() for state in optimizer.state.values() for one in state.values() if one.dim()]
        seen.own_bytes = sum(one.nbytes for one in [*(p.to_local() for p in parameters.values()), *moments])
        return done

    script.refuse, script.fully_shard, script.checkpoint = refuse, note_unit, note_recomputed
    script.F = argparse.Namespace(**vars(script.F) | {"cross_entropy": note_chunk})
    script.Checkpoints.begin, script.train, script.documents_are_apart = note_save, look_at_state, note_rows
