"""The code that this folder's scripts share: input and output, replicas on a CPU, and their lock.

Each script takes a folder with settings.json (what to do), batches.npz (each step's images and labels) and
start-MODEL.npz (the initial parameters, by name), and writes result.json there.
"""

import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from torch import nn

from fsdp_helpers.teaching.lessons import xla_inputs  # the part of the package that these scripts share: plain torch

LOCK = threading.Lock()
MEETING = threading.Barrier(1)  # for all replicas, which are threads; prepare_cpu sets how many there are
MEETING_S = 60  # if it takes longer, something else has gone wrong


def read_settings(folder: Path) -> dict:
    return json.loads((folder / "settings.json").read_text())


def start_model(folder: Path, name: str) -> nn.Module:
    """Build the network with the shared initial parameters. No ReLU is in place: FSDPv2 hooks the output before it."""
    model = xla_inputs.start_model(folder, name)
    for module in model.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False
    return model


def prepare_cpu(folder: Path, settings: dict) -> None:
    """Set XLA up before it starts: CPU replicas, no aliased parameters, compiled graphs written to files."""
    global MEETING
    MEETING = threading.Barrier(settings["replicas"])
    os.environ["PJRT_DEVICE"] = "CPU"
    os.environ["CPU_NUM_DEVICES"] = str(settings["replicas"])
    if settings.get("without") != "aliasing":
        os.environ["XLA_ENABLE_PARAM_ALIASING"] = "0"  # sync() then returns while its step is still running
    keep_graphs(folder)


def keep_graphs(folder: Path) -> None:
    """Have XLA write this run's graphs as text, after removing those of an earlier run."""
    shutil.rmtree(folder / "graphs", ignore_errors=True)
    os.environ["XLA_FLAGS"] = f"--xla_dump_to={folder / 'graphs'} --xla_dump_hlo_as_text"


def one_at_a_time(settings: dict) -> AbstractContextManager:
    """Return the lock that a replica holds while it traces and compiles a step, so that the next one can reuse it."""
    return nullcontext() if settings.get("without") == "lock" else LOCK


def newest_graph(folder: Path) -> str:
    """Return the last compiled step as XLA runs it, which is its HLO text after all optimizations."""
    graphs = sorted((folder / "graphs").glob("*SyncTensorsGraph*after_optimizations.txt"))
    return graphs[-1].read_text()


def write_result(folder: Path, result: object) -> None:
    (folder / "result.json").write_text(json.dumps(result))


def end_with_starter() -> None:
    """End this process and its children when the process that started it, and holds its standard input, ends."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 1):
            pass
        os.killpg(os.getpgrp(), signal.SIGKILL)

    if os.environ.get("FSDP_XLA_HELD"):  # if you start a script by hand, standard input can be anything
        threading.Thread(target=watch, daemon=True).start()


def main(script: Callable[[Path, dict], None], arguments: list[str]) -> None:
    end_with_starter()
    folder = Path(arguments[1])
    script(folder, read_settings(folder))
