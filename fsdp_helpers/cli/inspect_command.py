"""`python -m fsdp_helpers inspect SCRIPT ARGS`: watch a training script on CPU ranks, and name its silent failures."""

import argparse
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

NUM_RANKS, STEPS, PATIENCE_S, LIMIT_S = 2, 3, 60.0, 600.0
POLL_S, GRACE_S = 0.2, 5.0
leave_process = os._exit  # while the script runs, `os._exit` only ends the script
ANSWER = "FSDP_HELPERS_INSPECT_STATUS"  # the file in which rank 0 leaves the status for the command that started it


def add_inspect_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--world-size", type=int, default=NUM_RANKS, metavar="N", help="ranks (default: %(default)s)")
    steps = "stop after N optimizer steps and a first save (default: %(default)s)"
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help=steps)
    patience = "wait at most X seconds for that save (default: %(default)s)"
    parser.add_argument("--patience", type=float, default=PATIENCE_S, metavar="X", help=patience)
    limit = "stop a script that hasn't ended after X seconds (default: %(default)s)"
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="X", help=limit)
    parser.add_argument("script", type=Path, metavar="SCRIPT", help="your training script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="the script's own arguments")


def check(options: argparse.Namespace, is_rank: bool) -> None:
    """Raise ValueError if something about the call is wrong."""
    if not options.script.is_file():
        raise ValueError(f"inspect: there's no script {options.script}")
    try:
        compile(options.script.read_bytes(), str(options.script), "exec")
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"inspect: {options.script} isn't Python: {error}") from error
    for name, least in (("world_size", 1), ("steps", 1), ("patience", 0), ("limit", 1)):
        if not getattr(options, name) >= least:
            raise ValueError(f"inspect: --{name.replace('_', '-')} is {getattr(options, name)}, below {least}")
    if is_rank and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise ValueError("inspect: the ranks need torchrun's own store; unset TORCH_DISABLE_SHARE_RDZV_TCP_STORE")


def start_ranks(arguments: list[str], world_size: int) -> int:
    """Start this command on every rank with torchrun; return the status that the ranks leave, or torchrun's."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "status")
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
        # One thread for each rank, as torchrun sets it, which would also print a warning.
        environment = {"OMP_NUM_THREADS": "1"} | os.environ | {ANSWER: str(answer)}
        ended = subprocess.run([*torchrun, "-m", "fsdp_helpers", "inspect", *arguments], env=environment)
        return ended.returncode or int(answer.read_text())


class Meeting:
    """Where the ranks leave their records, so that rank 0 can report: torchrun's own store, on a connection of its own."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch.distributed as dist

        from fsdp_helpers.inspecting.watch import Watch

        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.store = dist.PrefixStore("fsdp_helpers_inspect", dist.TCPStore(host, port, is_master=False))
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.options, self.watch, self.steps = options, Watch(self.must_stop), 0
        self.began, self.done = time.monotonic(), threading.Lock()
        threading.Thread(target=self.guard, daemon=True).start()

    def must_stop(self) -> bool:
        """Return True before the same step on all ranks, which are never more than a step apart."""
        self.steps += 1
        if self.steps <= self.options.steps:
            return False
        is_over = time.monotonic() - self.began > self.options.patience or self.watch.record.seen["saving"]
        if self.rank == 0 and is_over:
            self.store.compare_set("last", "", str(self.steps))
        return self.store.check(["last"]) and self.steps > int(self.store.get("last"))

    def guard(self) -> None:
        """Report from a thread if the script hangs, or if it has failed on another rank."""
        while time.monotonic() - self.began < self.options.limit and not self.store.check(["failed"]):
            time.sleep(POLL_S)
        if not self.store.check(["failed"]):
            self.store.set("failed", f"not at its end after {self.options.limit:g} s")
        time.sleep(GRACE_S)
        from fsdp_helpers.ranks.stacks import describe

        frames = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident])
        stack = "\n".join(f'File "{one.filename}", line {one.lineno} in {one.name}' for one in reversed(frames))
        if self.done.acquire(blocking=False):
            self.watch.record.end = describe(stack)
            leave_process(self.leave(1))

    def end(self, status: int) -> int:
        """Leave this rank's record, and wait until rank 0 has reported."""
        self.done.acquire()
        if status:
            self.store.set("failed", "")
        return self.leave(status)

    def leave(self, status: int) -> int:
        from fsdp_helpers.inspecting.report import findings, report

        self.store.set(f"record-{self.rank}", pickle.dumps((status, self.watch.record)))
        names = [f"record-{rank}" for rank in range(self.world_size)]
        until = time.monotonic() + self.options.limit
        while not self.store.check(names) and time.monotonic() < until:
            time.sleep(POLL_S)
        if self.rank == 0:
            answers = [pickle.loads(self.store.get(name)) for name in names]
            records = [record for _, record in answers]
            print(report(self.options.script.name, records), flush=True)
            self.store.set("status", str(max([*(own for own, _ in answers), int(bool(findings(records)))])))
        self.store.wait(["status"])
        if ANSWER not in os.environ:
            return status or int(self.store.get("status"))
        Path(os.environ[ANSWER]).write_text(self.store.get("status").decode())
        return 0  # or torchrun would report a failure of its own


def inspect(options: argparse.Namespace) -> int:
    """Run the script as a rank of torchrun; return 1 if there are findings, or the script's own status if it failed."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from fsdp_helpers.inspecting.run import watch_script

    meeting = Meeting(options)
    return meeting.end(watch_script(meeting.watch, str(options.script), options.arguments))
