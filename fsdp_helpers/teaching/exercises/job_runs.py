"""A job script run with stand-ins for Slurm and torchrun: to its end, or until its time is up.

The stand-ins are small programs at the front of the search path. `srun` starts its command once per task, `torchrun`
records how it was called and waits, and all of them log their calls.
"""

import io
import os
import re
import signal
import subprocess
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from torch.distributed.run import get_args_parser

from fsdp_helpers.teaching.exercises.answers import NotYet

GPUS = 4  # of each node
TIMEOUT_S = 60.0  # of a run among the stand-ins, which takes two
SIGTERM_S = 4.0  # from the script's signal to the first SIGTERM, which takes a tenth of a second
SAVING_S = 1.0  # of torchruns that got SIGTERM; a script that does not wait for them is through by then
LOOK_S = 0.05  # between two looks
DEFAULT_SHUTDOWN_S = "30"  # that torchrun waits for its ranks, unless told
LOG = 'echo "$(basename "$0") $*" >> "$CHECK_FOLDER/calls"\n'
STAND_INS = {
    "srun": LOG
    + """
own=()
while [[ $1 == -* ]]; do
    if [[ $1 =~ ^-[NnctwJoe]$ || $1 != *=* && $2 =~ ^[0-9]+$ ]]; then shift; fi  # a value of its own
    shift
done
trap 'kill -TERM "${own[@]}" 2>/dev/null' TERM
for ((task = 0; task < CHECK_TASKS; task++)); do
    SLURM_PROCID=$task SLURM_NODEID=$((task * SLURM_NNODES / CHECK_TASKS)) \\
        SLURM_LOCALID=$((task % (CHECK_TASKS / SLURM_NNODES))) "$@" &
    own+=($!)
done
status=0
for one in "${own[@]}"; do
    while wait "$one"; last=$?; kill -0 "$one" 2>/dev/null; do :; done
    [ $last -eq 0 ] || status=$last
done
exit $status
""",
    "torchrun": """
note="$CHECK_FOLDER/torchrun-$$"
trap 'echo asked > "$note.asked"; until [ -e "$CHECK_FOLDER/saved" ]; do sleep 0.05; done; exit 1' TERM
{ printf '%s\\0' "$TORCH_DISABLE_SHARE_RDZV_TCP_STORE" "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT" "$@"; } > "$note.writing"
mv "$note.writing" "$note"
[ "$CHECK_ENDS" = yes ] && exit 0
while :; do sleep 0.05; done
""",
    "scontrol": LOG + '[ "$1 $2" != "show hostnames" ] || printf "%s\\n" $CHECK_NODES\n',
    "scancel": LOG
    + """
[[ " $* " =~ ( -s |--signal[= ])(SIG)?(TERM|15) ]] || exit 0
for note in "$CHECK_FOLDER"/torchrun-*; do kill -TERM "${note##*-}" 2>/dev/null; done
true
""",
    "python": """
[ "$1 $2" = "-m torch.distributed.run" ] && { shift 2; exec torchrun "$@"; }
PATH=${PATH#*:} exec python3 "$@"
""",
    "hostname": 'nodes=($CHECK_NODES); echo "${nodes[${SLURM_NODEID:-0}]}"\n',
    "module": "true\n",
}


@dataclass(frozen=True)
class Done:
    """One run of the script, as the stand-ins saw it."""

    torchruns: list["Torchrun"]
    calls: str
    num_asked: int  # how many torchruns got SIGTERM
    left_early: bool  # the script ended, or queued the job again, while they saved

    @property
    def endpoint(self) -> str:
        return self.torchruns[0].options.rdzv_endpoint


@dataclass(frozen=True)
class Torchrun:
    """One call of torchrun: two variables that it reads, and its options as torch itself reads them."""

    fresh_store: str
    shutdown_s: str
    options: Namespace


def read_torchrun(fresh_store: str, shutdown_s: str, *arguments: str) -> Torchrun:
    """Return how torchrun was called; raise NotYet for invalid arguments."""
    said = io.StringIO()
    try:
        with redirect_stderr(said), patch.dict(os.environ):
            for name in [name for name in os.environ if name.startswith("PET_")]:
                del os.environ[name]  # would be defaults
            options = get_args_parser().parse_args(arguments)
    except SystemExit:
        raise NotYet(
            f"torchrun doesn't accept its arguments: {said.getvalue().rpartition('error: ')[2].strip()}"
        ) from None
    asked_s = getattr(options, "shutdown_timeout", None)  # an argument that torch 2.11 does not have
    timeout_s = shutdown_s if asked_s is None else asked_s
    return Torchrun(fresh_store, str(timeout_s or DEFAULT_SHUTDOWN_S), options)


def run_script(path: str, told: dict[str, str], job: int, nodes: tuple[str, ...], *, ends: bool) -> tuple[Done, int]:
    """Run the script among the stand-ins until it ends, or gets its own signal once all torchruns are there."""
    with tempfile.TemporaryDirectory(prefix="fsdp_helpers-") as name:
        folder, left_early = Path(name), False
        _write_stand_ins(folder / "bin")
        environment = _environment(folder, told, job, nodes) | {"CHECK_ENDS": "yes" if ends else "no"}
        script = subprocess.Popen(
            ["bash", Path(path).absolute()],
            cwd=folder,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            if not ends:
                _wait_until(lambda: len(_notes(folder)) >= len(nodes) or script.poll() is not None, TIMEOUT_S)
                script.send_signal(_signal_of(told["signal"]))
                is_asked = _wait_until(lambda: _num_asked(folder) == len(nodes), SIGTERM_S)
                left_early = _wait_until(lambda: script.poll() is not None or _is_queued(folder), SAVING_S)
                (folder / "saved").touch()
            # A script that did not ask for checkpoints might wait forever.
            status = script.wait(timeout=TIMEOUT_S if ends or is_asked else 0)
        except subprocess.TimeoutExpired:
            status = -signal.SIGKILL
        finally:
            with suppress(ProcessLookupError):
                os.killpg(script.pid, signal.SIGKILL)
            script.wait()
        return _read(folder, left_early), status


def _environment(folder: Path, told: dict[str, str], job: int, nodes: tuple[str, ...]) -> dict[str, str]:
    tasks = int(told.get("ntasks") or len(nodes) * int(told.get("ntasks-per-node") or 1))
    node_list = f"gpu-[{','.join(node.removeprefix('gpu-') for node in nodes)}]"
    found = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "TORCH", "PET_"))}
    return found | {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "CHECK_FOLDER": str(folder),
        "CHECK_TASKS": str(tasks),
        "CHECK_NODES": " ".join(nodes),
        "SLURM_JOB_ID": str(job),
        "SLURM_JOBID": str(job),
        "SLURM_JOB_NAME": "check",
        "SLURM_JOB_NODELIST": node_list,
        "SLURM_NODELIST": node_list,
        "SLURM_JOB_NUM_NODES": str(len(nodes)),
        "SLURM_NNODES": str(len(nodes)),
        "SLURM_NTASKS": str(tasks),
        "SLURM_GPUS_ON_NODE": str(GPUS),
        "SLURM_GPUS_PER_NODE": str(GPUS),
        "SLURM_SUBMIT_DIR": str(folder),
        "SLURMD_NODENAME": nodes[0],
    }


def _write_stand_ins(folder: Path) -> None:
    folder.mkdir()
    for name, body in STAND_INS.items():
        (folder / name).write_text("#!/bin/bash\n" + body)
        (folder / name).chmod(0o755)


def _wait_until(holds: Callable[[], bool], timeout_s: float) -> bool:
    """Return True as soon as the condition holds, False if it never does.

    It counts checks, not seconds, so that on a stalled or busy machine the programs still get their time.
    """
    for _ in range(round(timeout_s / LOOK_S)):
        if holds():
            return True
        time.sleep(LOOK_S)
    return holds()


def _notes(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.glob("torchrun-*")) if path.suffix == ""]


def _num_asked(folder: Path) -> int:
    return len(list(folder.glob("torchrun-*.asked")))


def _is_queued(folder: Path) -> bool:
    return "scontrol requeue" in _calls(folder)


def _calls(folder: Path) -> str:
    calls = folder / "calls"
    return calls.read_text() if calls.exists() else ""


def _read(folder: Path, left_early: bool) -> Done:
    torchruns = [read_torchrun(*note.read_text().split("\0")[:-1]) for note in _notes(folder)]
    return Done(torchruns=torchruns, calls=_calls(folder), num_asked=_num_asked(folder), left_early=left_early)


def _signal_of(told: str) -> int:
    name = re.fullmatch(r"B:(?:SIG)?(\w+)@\d+", told)[1]
    return int(name) if name.isdigit() else signal.Signals[f"SIG{name}"]
