"""A real Slurm of two nodes on this machine: munged, slurmctld and two slurmd, each with a host name of its own.

It needs root and Debian's packages, and installs nothing. Nothing of it outlives the block in which it runs.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from programs import wait_until
from two_machines import NODES, alone_on_a_core, core_of, free_ports, what_is_missing, write_hosts

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "unshare", "taskset", "setpriv")
HOW_TO_GET = "apt-get update && apt-get install --no-install-recommends slurm-wlm munge"
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/linear
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=5,batch_sched_delay=1,sched_interval=5
SlurmdParameters=config_overrides
MpiDefault=none
CommunicationParameters=NoCtldInAddrAny
ReturnToService=2
SlurmdTimeout=10
KillWait=5
MessageTimeout=10
{nodes}
PartitionName=test Nodes={names} Default=YES MaxTime=INFINITE State=UP
"""
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
NODES_S = 90.0  # the nodes have this long to report, on a busy machine


class SlurmError(RuntimeError):
    """A command of Slurm failed, or a node or a job did not come to the state that was waited for."""


def missing() -> str | None:
    """In a clause: why no Slurm can be started here; None if it can."""
    return what_is_missing(PROGRAMS, HOW_TO_GET)


class Slurm:
    """The running cluster, spoken to through its own commands."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # torchrun, as it lies beside this interpreter, before any other
        path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
        self._of_daemons = {"PATH": path, "SLURM_CONF": str(folder / "slurm.conf")}
        self.daemons: dict[str, subprocess.Popen] = {}

    def run(self, *command: object, folder: Path | None = None, **variables: str) -> str:
        """Run one of Slurm's commands and return what it prints. Raises SlurmError if it fails."""
        done = subprocess.run(
            [str(part) for part in command],
            cwd=folder or self._folder,
            env=os.environ | self._of_daemons | variables,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        if done.returncode != 0:
            raise SlurmError(f"{command}: {done.stdout}{done.stderr}")
        return done.stdout

    def submit(self, script: Path, *arguments: object, folder: Path, options: tuple = (), **variables: str) -> str:
        """The id of a job, whose edits are made on the command line of sbatch; it writes into `folder`."""
        edits = ("--partition=test", "--account=none", "--cpus-per-task=1", *options)
        command = ("sbatch", "--parsable", *edits, script.resolve(), *arguments)
        return self.run(*command, folder=folder, **variables).strip()

    def show(self, job: str) -> dict[str, str]:
        """Return what Slurm knows of a job."""
        pairs = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return dict(pair.split("=", 1) for pair in pairs if "=" in pair)

    def wait_for(self, job: str, *states: str, timeout_s: float = 240.0) -> str:
        """The state of a job as soon as it is among `states`. Raises SlurmError if it never comes there."""
        deadline_s = time.monotonic() + timeout_s
        while (state := self.show(job)["JobState"]) not in states:
            if state in ENDED:
                raise SlurmError(f"job {job} is {state}, {' or '.join(states)} was expected")
            if time.monotonic() > deadline_s:
                raise SlurmError(f"job {job} is still {state} after {timeout_s:.0f} s")
            time.sleep(0.5)
        return state

    def watch_job(self, script: Path, *arguments: object, folder: Path) -> tuple[str, str]:
        """One job to its end: what `squeue` shows while it runs, and what the job's rank 0 prints."""
        job = self.submit(script, *arguments, folder=folder)
        self.wait_for(job, "RUNNING")
        queue = self.run("squeue", "--format=%.6i %.8j %.10T %.6D %N")
        self.wait_for(job, "COMPLETED")
        return queue, rank_0_of((folder / f"train-{job}.out").read_text())

    def set_limit(self, job: str, minutes: int) -> None:
        """Give a job this long, counted from its start."""
        self.run("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes}")

    def go_on(self, job: str) -> None:
        """Slurm lets a job that was queued again wait for two minutes; here it need not."""
        time.sleep(1)
        self.run("scontrol", "update", f"JobId={job}", "StartTime=now")

    def start(self, name: str, command: list[str]) -> None:
        """Start a daemon, which ends when this process does, however that ends."""
        with open(self._folder / f"{name}.out", "wb") as output:
            self.daemons[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],
                env=self._of_daemons,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def start_node(self, number: int) -> None:
        """A slurmd that finds its own host name and a core of its own."""
        name, root = NODES[number], self._folder
        command = f"hostname {name} && mount --bind {root}/hosts /etc/hosts && exec slurmd -D -N {name}"
        self.start(name, alone_on_a_core(core_of(number), ["unshare", "--uts", "--mount", "sh", "-c", command]))

    def lose_node(self, number: int) -> None:
        """As if its power went: the daemon, and all that it started."""
        end_with_namespace(self.daemons.pop(NODES[number]))

    def wait_for_nodes(self) -> None:
        """Until both nodes are there and have nothing to do. Raises SlurmError if they do not come."""
        states: list[str] = []

        def all_idle() -> bool:
            with suppress(SlurmError):  # the controller may not be there yet
                states[:] = self.run("sinfo", "--noheader", "--Node", "--format=%T").split()
            return states == ["idle"] * len(NODES)

        if not wait_until(all_idle, NODES_S):
            raise SlurmError(f"the nodes are {states} after {NODES_S:.0f} s")

    def stop(self) -> None:
        for name, daemon in reversed(self.daemons.items()):
            end_with_namespace(daemon) if name in NODES else end_with_children(daemon)


@contextmanager
def running_slurm(folder: Path) -> Iterator[Slurm]:
    """A cluster of two nodes, which keeps its files in `folder`; every daemon is gone after the block."""
    folder.mkdir(parents=True, exist_ok=True)
    write_files(folder)
    slurm = Slurm(folder)
    try:
        slurm.start("munged", ["munged", "--foreground", "--force", *munge_files(folder)])
        slurm.start("slurmctld", ["slurmctld", "-D", "-c"])
        for number in range(len(NODES)):
            slurm.start_node(number)
        slurm.wait_for_nodes()
        yield slurm
    finally:
        slurm.stop()


def write_files(folder: Path) -> None:
    """Configuration, key and hosts of a cluster, with ports that are free now."""
    controller, *ports = free_ports(1 + len(NODES))
    lines = [
        f"NodeName={name} NodeHostname={name} NodeAddr=127.0.0.1 Port={port} CPUs=1 RealMemory=1000 State=UNKNOWN"
        for name, port in zip(NODES, ports, strict=True)
    ]
    text = CONFIGURATION.format(
        folder=folder,
        controller_port=controller,
        host=os.uname().nodename,
        nodes="\n".join(lines),
        names=",".join(NODES),
    )
    (folder / "slurm.conf").write_text(text)
    (folder / "state").mkdir()
    write_hosts(folder / "hosts", dict(zip(NODES, ("127.0.1.1", "127.0.1.2"), strict=True)))
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)


def munge_files(folder: Path) -> list[str]:
    return [
        f"--socket={folder}/munge.socket",
        f"--key-file={folder}/munge.key",
        f"--pid-file={folder}/munged.pid",
        f"--log-file={folder}/munged.log",
        f"--seed-file={folder}/munged.seed",
    ]


def rank_0_of(output: str) -> str:
    """The lines of a job's output that its rank 0 printed, as torchrun marks them."""
    return "\n".join(line for line in output.splitlines() if line.startswith("[default0]:"))


def end_with_namespace(daemon: subprocess.Popen) -> None:
    """Kill everything with the host name of a node: its slurmd, and steps that are no longer its children."""
    daemon.send_signal(signal.SIGSTOP)  # it starts nothing more meanwhile
    with suppress(OSError):
        namespace = os.readlink(f"/proc/{daemon.pid}/ns/uts")
        if namespace != os.readlink("/proc/self/ns/uts"):  # else it had no time to take a name of its own
            for folder in Path("/proc").glob("[0-9]*"):
                with suppress(OSError):
                    if os.readlink(folder / "ns" / "uts") == namespace:
                        os.kill(int(folder.name), signal.SIGKILL)
    daemon.kill()
    daemon.wait(timeout=30)


def end_with_children(daemon: subprocess.Popen) -> None:
    """Kill a daemon that leads a session of its own, with all of that session."""
    with suppress(ProcessLookupError):
        os.killpg(daemon.pid, signal.SIGKILL)
    daemon.wait(timeout=30)
