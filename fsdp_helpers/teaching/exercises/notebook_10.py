"""Check a job script: read its directives, and run it with stand-ins for Slurm and torchrun.

Any script that would do the right thing on a cluster passes, no matter how it's written.
"""

import io
import os
import re
import shlex
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

from fsdp_helpers.teaching.exercises.answers import NotYet, exercise, expect

# ---------------------------------------------------------------- a run with stand-ins


GPUS = 4  # per node
TIMEOUT_S = 60.0  # limit for a run with the stand-ins, which takes about two seconds
SIGTERM_S = 4.0  # limit for every torchrun to get SIGTERM after the script's signal; it takes a tenth of a second
SAVING_S = 1.0  # how long torchruns save after SIGTERM; a script that doesn't wait for them has ended by then
LOOK_S = 0.05  # between two checks
DEFAULT_SHUTDOWN_S = "30"  # how long torchrun waits for its ranks by default
LOG = 'echo "$(basename "$0") $*" >> "$CHECK_FOLDER/calls"\n'
STAND_INS = {
    "srun": LOG
    + """
own=()
while [[ $1 == -* ]]; do
    if [[ $1 =~ ^-[NnctwJoe]$ || $1 != *=* && $2 =~ ^[0-9]+$ ]]; then shift; fi  # the option's value
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
    """A run of the script as recorded by the stand-ins."""

    torchruns: list["Torchrun"]
    calls: str
    num_asked: int  # how many torchruns got SIGTERM
    left_early: bool  # the script ended, or requeued the job, while they were saving

    @property
    def endpoint(self) -> str:
        return self.torchruns[0].options.rdzv_endpoint


@dataclass(frozen=True)
class Torchrun:
    """One call to torchrun: two variables that it reads, and its options as torch parses them."""

    fresh_store: str
    shutdown_s: str
    options: Namespace


def read_torchrun(fresh_store: str, shutdown_s: str, *arguments: str) -> Torchrun:
    """Return how torchrun was called; raise NotYet for invalid arguments."""
    said = io.StringIO()
    try:
        with redirect_stderr(said), patch.dict(os.environ):
            for name in [name for name in os.environ if name.startswith("PET_")]:
                del os.environ[name]  # they would set defaults
            options = get_args_parser().parse_args(arguments)
    except SystemExit:
        raise NotYet(
            f"torchrun doesn't accept its arguments: {said.getvalue().rpartition('error: ')[2].strip()}"
        ) from None
    asked_s = getattr(options, "shutdown_timeout", None)  # an argument that torch 2.11 doesn't have
    timeout_s = shutdown_s if asked_s is None else asked_s
    return Torchrun(fresh_store, str(timeout_s or DEFAULT_SHUTDOWN_S), options)


def run_job_script(
    path: str, told: dict[str, str], job: int, nodes: tuple[str, ...], *, ends: bool
) -> tuple[Done, int]:
    """Run the script with stand-ins until it exits; if `ends` is false, signal it once all torchruns have started."""
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
            # A script that hasn't asked for checkpoints might wait forever.
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
    """Return True as soon as the condition holds, or False if it doesn't hold in time.

    The timeout counts checks, not seconds, so the programs get enough time even on a stalled or busy machine.
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


# ---------------------------------------------------------------- the requirements

NODES = ("gpu-0", "gpu-1", "gpu-2", "gpu-3")  # of the job, submitted as its script requests
FEWER = ("gpu-5", "gpu-7")  # of the same script, submitted with `sbatch --nodes=2`
PARTITION, ACCOUNT = "a100", "vision"
LONGEST_S, LEAD_S = 2 * 3600, 300  # a job's time limit, and the time from the signal to that limit
SHORT_OPTIONS = {"-p": "partition", "-A": "account", "-N": "nodes", "-t": "time", "-n": "ntasks", "-J": "job-name"}


@exercise("10")
def check_job_script(path: str) -> str:
    """Notebook 10: check that a job on four nodes with four GPUs each saves before its time limit, then continues."""
    expect(isinstance(path, str), f"the answer is {path!r}; it should be the name of your script, as a string")
    expect(Path(path).is_file(), f"there is no {path} here; run the cell that writes it")
    text = Path(path).read_text()
    expect(text.startswith("#!"), "the first line has to name the shell that runs the script: #!/bin/bash")
    told = read_directives(text)
    _check_directives(told)
    first = _run_to_its_end(path, told, job=4_242_001)
    _check_torchruns(first, NODES)
    second = _run_out_of_time(path, told, job=4_242_017)
    _check_torchruns(second, FEWER)
    expect(
        first.endpoint.rpartition(":")[2] != second.endpoint.rpartition(":")[2],
        f"two jobs use the port in {first.endpoint}, so on a shared node they would meet; derive the port from "
        "the job's ID",
        "crash-port-in-use",
    )
    return (
        "Right: four torchruns that meet at the job's own port, a checkpoint before the limit, and a job that "
        "continues."
    )


# ---------------------------------------------------------------- the script's directives


def read_directives(text: str) -> dict[str, str]:
    """Return the options in the #SBATCH lines above the first command, keyed by long name."""
    told = {}
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            break
        words = shlex.split(line.removeprefix("#SBATCH"), comments=True) if line.startswith("#SBATCH ") else []
        for word, after in zip(words, [*words[1:], "-"], strict=False):
            name, _, value = word.partition("=")
            if word.startswith("-"):
                told[SHORT_OPTIONS.get(name, name.lstrip("-"))] = value or ("" if after.startswith("-") else after)
    return told


def seconds_of(limit: str) -> int:
    """Return the length in seconds of a time limit in any Slurm format, such as days-hours:minutes:seconds."""
    days, _, rest = limit.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if days:
        hours, minutes, seconds = (parts + [0, 0])[:3]
    else:
        hours, minutes, seconds = parts if len(parts) == 3 else (0, *(parts + [0])[:2])
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _check_directives(told: dict[str, str]) -> None:
    for name, wanted in (("partition", PARTITION), ("account", ACCOUNT), ("nodes", str(len(NODES)))):
        given = told.get(name)
        expect(given == wanted, f"#SBATCH --{name}: {given or 'nothing'} is given; it should be {wanted}")
    gpus = told.get("gpus-per-node") or told.get("gres", "").removeprefix("gpu")
    expect(
        gpus.rpartition(":")[2] == str(GPUS),
        f"#SBATCH --gpus-per-node: the script requests {gpus or 'no'} GPUs per node; each node has {GPUS}",
    )
    limit = told.get("time", "")
    expect(bool(re.fullmatch(r"[\d:-]*\d", limit)), "#SBATCH --time: the job needs a time limit")
    expect(seconds_of(limit) <= LONGEST_S, f"#SBATCH --time={limit}: the partition allows at most two hours")
    expect("requeue" in told, "#SBATCH: losing a node would end the job; which option requeues the job?")
    found = re.fullmatch(r"B:(?:SIG)?([A-Z]+\d?|\d+)@(\d+)", told.get("signal", ""))
    expect(
        found is not None,
        "#SBATCH --signal: the script's shell has to get a signal before the time limit; use B:NAME@SECONDS",
    )
    expect(
        int(found[2]) >= LEAD_S,
        f"#SBATCH --signal: {found[2]} s before the limit is too late; the ranks need {LEAD_S} s",
    )


# ---------------------------------------------------------------- the script's runs


def _run_to_its_end(path: str, told: dict[str, str], job: int) -> Done:
    done, status = run_job_script(path, told, job, NODES, ends=True)
    _expect_one_per_node(done, NODES)
    expect(status == 0, f"every torchrun succeeded, but the script exited with status {status}")
    expect("scontrol requeue" not in done.calls, "training had finished, but the script requeued the job")
    return done


def _run_out_of_time(path: str, told: dict[str, str], job: int) -> Done:
    """Run the script until its time is up, as if it were submitted to fewer nodes with different names."""
    done, _ = run_job_script(path, told, job, FEWER, ends=False)
    _expect_one_per_node(done, FEWER)
    expect(
        done.num_asked == len(FEWER),
        f"with --signal={told['signal']}, {done.num_asked} of {len(FEWER)} torchruns got SIGTERM, which makes "
        "ranks save; bash runs a trap only between commands or during `wait`",
    )
    queued = "scontrol requeue" in done.calls
    expect(
        not done.left_early,
        f"the script {'requeued the job' if queued else 'exited'} while ranks were saving, which kills them: srun "
        "has to exit first, but a signal makes bash's `wait` return before that",
    )
    expect(
        f"scontrol requeue {job}" in done.calls,
        "time ran out, but the job wasn't requeued; use scontrol requeue with the job's ID",
    )
    return done


def _expect_one_per_node(done: Done, nodes: tuple[str, ...]) -> None:
    expect(
        len(done.torchruns) == len(nodes),
        f"{len(done.torchruns)} torchruns were started; srun should start one on each of the {len(nodes)} nodes",
    )


def _check_torchruns(done: Done, nodes: tuple[str, ...]) -> None:
    says = "" if nodes == NODES else f"submitted with sbatch --nodes={len(nodes)}: "
    num_nodes, on_each = str(len(nodes)), ("gpu", "auto", str(GPUS))
    for torchrun in done.torchruns:
        options = torchrun.options
        for name, given, right in (
            ("nnodes", options.nnodes, (num_nodes, f"{num_nodes}:{num_nodes}")),
            ("nproc-per-node", options.nproc_per_node, on_each),
            ("rdzv-backend", options.rdzv_backend, ("c10d",)),
        ):
            expect(given in right, f"{says}torchrun --{name} is {given}; it should be {' or '.join(right)}")
        endpoint = options.rdzv_endpoint
        apart = f"one torchrun waits at {done.endpoint} and another at {endpoint}, so they never meet"
        expect(endpoint == done.endpoint, apart)
        host, _, port = endpoint.partition(":")
        expect(
            host in nodes,
            f"{says}torchrun --rdzv-endpoint={endpoint}: the meeting point has to be one of the job's nodes",
        )
        expect(
            port.isdigit() and 1024 <= int(port) < 65_536,
            f"torchrun --rdzv-endpoint={endpoint}: the port has to be between 1024 and 65535",
        )
        expect(options.max_restarts > 0, "torchrun restarts no ranks; which option allows it to?")
        expect(
            torchrun.fresh_store == "1",
            f"torchrun --max-restarts={options.max_restarts}: which variable gives each restart its own store?",
        )
        expect(
            torchrun.shutdown_s.isdigit() and int(torchrun.shutdown_s) >= LEAD_S,
            f"torchrun kills ranks {torchrun.shutdown_s} s after SIGTERM, but they have {LEAD_S} s to save; which "
            "variable makes it wait longer?",
        )
