"""Running a script under watch on CPU ranks, as torchrun would, to its end or for a few steps."""

import math
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DistributedSampler

from fsdp_helpers.inspecting import batches, on_cpu, parameters, units
from fsdp_helpers.inspecting.watch import Enough, Record, Watch
from fsdp_helpers.ranks import stacks
from fsdp_helpers.ranks.errors import Answer, Failure, describe_error
from fsdp_helpers.ranks.processes import Processes

GRACE_S = 5.0  # after a rank has failed, for the others that fail by themselves
PROBES = {
    "shard": [parameters.before_sharding],
    "sharded": [parameters.after_sharding],
    "forward": [parameters.starting_values, batches.keep_batch, units.one_unit, units.begin_pass],
    "call": [parameters.running_statistics, units.calls_of_units],
    "backward": [batches.losses],
    "step": [parameters.optimizer_first, parameters.plain_parameters, units.after_micro_batches],
    "stepped": [parameters.low_precision_weights],
    "end": [parameters.starting_values, batches.same_batches, units.compiled_without_graph],
}


def watch_ranks(
    path: str,
    arguments: Sequence[str],
    num_ranks: int,
    limit_s: float,
    on_output: Callable[[int, int, bytes], None],
    *,
    steps: float = math.inf,
    folder: str = ".",
) -> list[Record]:
    """Run a script on every rank in a folder, for at most `limit_s` seconds; return what each rank noted.

    A rank that hasn't ended by then, or GRACE_S seconds after another one failed, is stopped; its record only says
    where it was.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # the ranks meet here
    body = partial(watch_rank, path, list(arguments), os.path.abspath(folder), store.port, limit_s, steps)
    everyone = range(num_ranks)
    with Processes(body, num_ranks, "cpu", on_output, streams=2) as ranks:
        ranks.collect(everyone, time.monotonic() + limit_s, GRACE_S)
        silent = [rank for rank in everyone if rank not in ranks.notes]
        ends = {rank: stacks.describe(stack) for rank, stack in ranks.stacks(silent).items()}
        ends |= {rank: ranks.describe_end(rank) for rank in silent if rank in ranks.ends}
        ranks.end()  # at once: a rank that waits for another would wait for half an hour
    return [ranks.notes.get(rank) or Record(end=ends[rank], status=1) for rank in everyone]


def watch_rank(
    path: str, arguments: list[str], folder: str, port: int, limit_s: float, steps: float, rank: int, *others: Any
) -> Answer:
    """Be one rank: run the script, send the record, and stay until the other ranks have ended, too."""
    world_size, _, send, _ = others
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))  # as under torchrun
    os.chdir(folder)
    tempfile.tempdir = None  # the server's may be outdated
    watch = Watch(steps)
    watch.record.status = run_script(watch, path, arguments)
    send("note", watch.record)
    if watch.record.status:
        return Answer(0, failure=Failure(watch.record.end))
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    store.set(f"ended-{rank}", "")
    store.wait([f"ended-{other}" for other in range(world_size)], timedelta(seconds=limit_s))
    return Answer(0)


def run_script(watch: Watch, path: str, arguments: Sequence[str]) -> int:
    """Run a script with all probes, as `python SCRIPT ARGUMENTS` would; return its status, and note how it ended."""
    on_cpu.redirect(watch)
    for event, probes in PROBES.items():
        watch.listeners[event] = probes
    for name in ("item", "__float__", "__format__", "tolist"):
        watch.before(torch.Tensor, name, batches.partial_numbers)
    watch.before(torch, "save", batches.saved_by_all)
    watch.before(nn.utils, "clip_grads_with_norm_", batches.clipping)
    watch.before(nn.utils.clip_grad, "_clip_grads_with_norm_", batches.clipping)  # clip_grad_norm_ calls it
    watch.around(DistributedSampler, "__iter__", partial(batches.same_order, watch))
    pid, leave = os.getpid(), os._exit
    os._exit = lambda status: (sys.exit if os.getpid() == pid else leave)(status)  # a loader's worker may leave
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).parent))
    main = sys.modules["__main__"] = type(sys)("__main__")  # where a script, and pickle, look for its own classes
    vars(main).update(__file__=path, __builtins__=__builtins__)
    try:
        exec(compile(Path(path).read_bytes(), path, "exec"), vars(main))
    except Enough:
        return 0
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        return error.code & 0xFF if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        summary, trace = describe_error(error, lambda file: "/fsdp_helpers/inspecting/" not in file)
        print(trace, file=sys.stderr)
        lines = [line for file, line, *_ in traceback.extract_tb(error.__traceback__) if file == path]
        watch.record.end = f"failed, {os.path.basename(path)} line {lines[-1] if lines else 0}: {summary}"
        return 1
    finally:
        watch.tell("end")
        watch.looking, os._exit = True, leave  # what follows is no longer the script's
    return 0
