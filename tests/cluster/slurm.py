"""A real Slurm of two nodes on this machine: munged, slurmctld and two slurmd, each with a host name of its own."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from leftovers import SESSION_VARIABLE
from machines import NODES, alone_on_a_core, core_of, free_ports, hosts_file

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")
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
ReturnToService=2
SlurmdTimeout=10
KillWait=5
MessageTimeout=10
{nodes}
PartitionName=test Nodes={names} Default=YES MaxTime=INFINITE State=UP
"""
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


class Slurm:
    """The running cluster, spoken to through its own commands."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        # The daemons serve several tests, so none of these may take them for something that it left behind.
        self._of_daemons = {name: value for name, value in self._environment.items() if name != SESSION_VARIABLE}
        self.daemons: dict[str, subprocess.Popen] = {}

    def run(self, *command: object, folder: Path | None = None, **variables: str) -> str:
        """What one of Slurm's commands prints; fails where it does."""
        done = subprocess.run(
            [str(part) for part in command],
            cwd=folder or self._folder,
            env=self._environment | variables,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, script: Path, *arguments: object, folder: Path, options: tuple = (), **variables: str) -> str:
        """The id of a job, whose two edits are made on the command line of sbatch."""
        edits = ("--partition=test", "--account=none", *options)
        return self.run("sbatch", "--parsable", *edits, script, *arguments, folder=folder, **variables).strip()

    def show(self, job: str) -> dict[str, str]:
        pairs = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return dict(pair.split("=", 1) for pair in pairs if "=" in pair)

    def wait_for(self, job: str, *states: str, timeout_s: float = 240.0) -> str:
        """The state of a job as soon as it is among `states`; fails where it ends in another, or never comes there."""
        deadline_s = time.monotonic() + timeout_s
        while (state := self.show(job)["JobState"]) not in states:
            assert state not in ENDED, f"job {job} is {state}, {' or '.join(states)} was expected"
            assert time.monotonic() < deadline_s, f"job {job} is still {state} after {timeout_s:.0f} s"
            time.sleep(0.5)
        return state

    def go_on(self, job: str) -> None:
        """Slurm lets a job that was queued again wait for two minutes; the tests do not."""
        time.sleep(1)
        self.run("scontrol", "update", f"JobId={job}", "StartTime=now")

    def start(self, name: str, command: list[str]) -> None:
        with open(self._folder / f"{name}.out", "wb") as output:
            self.daemons[name] = subprocess.Popen(
                command, env=self._of_daemons, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def start_node(self, number: int) -> None:
        """A slurmd that finds its own host name and a core of its own."""
        name, root = NODES[number], self._folder
        command = f"hostname {name} && mount --bind {root}/hosts /etc/hosts && exec slurmd -D -N {name}"
        self.start(name, alone_on_a_core(core_of(number), ["unshare", "--uts", "--mount", "sh", "-c", command]))

    def lose_node(self, number: int) -> None:
        """As if its power went: the daemon, and all that it started."""
        end_with_namespace(self.daemons.pop(NODES[number]))

    def stop(self) -> None:
        for name, daemon in reversed(self.daemons.items()):
            end_with_namespace(daemon) if name in NODES else end_with_children(daemon)


@contextmanager
def running_slurm(folder: Path) -> Iterator[Slurm]:
    """A cluster of two nodes; every daemon and all of its files are gone after the block."""
    controller, *nodes = free_ports(3)
    lines = [
        f"NodeName={name} NodeHostname={name} NodeAddr=127.0.0.1 Port={port} CPUs=1 RealMemory=1000 State=UNKNOWN"
        for name, port in zip(NODES, nodes, strict=True)
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
    hosts_file(folder / "hosts", dict(zip(NODES, ("127.0.1.1", "127.0.1.2"), strict=True)))
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    slurm = Slurm(folder)
    try:
        slurm.start("munged", ["munged", "--foreground", "--force", *munge_files(folder)])
        slurm.start("slurmctld", ["slurmctld", "-D", "-c"])
        for number in range(len(NODES)):
            slurm.start_node(number)
        wait_for_nodes(slurm)
        yield slurm
    finally:
        slurm.stop()


def wait_until(condition: Callable[[], object], timeout_s: float = 180.0) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.2)
    return bool(condition())


def munge_files(folder: Path) -> list[str]:
    return [
        f"--socket={folder}/munge.socket",
        f"--key-file={folder}/munge.key",
        f"--pid-file={folder}/munged.pid",
        f"--log-file={folder}/munged.log",
        f"--seed-file={folder}/munged.seed",
    ]


def wait_for_nodes(slurm: Slurm, timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            states = slurm.run("sinfo", "--noheader", "--Node", "--format=%T").split()
        except AssertionError as error:  # the controller is not there yet
            states = [str(error)]
        if states == ["idle"] * len(NODES):
            return
        assert time.monotonic() < deadline_s, f"the nodes are {states} after {timeout_s:.0f} s"
        time.sleep(0.5)


def end_with_namespace(daemon: subprocess.Popen) -> None:
    """Kill everything that bears the host name of a node: its slurmd, and steps that are no children of it any more."""
    with suppress(FileNotFoundError):
        namespace = os.readlink(f"/proc/{daemon.pid}/ns/uts")
        assert namespace != os.readlink("/proc/self/ns/uts")
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if os.readlink(folder / "ns" / "uts") == namespace:
                    os.kill(int(folder.name), signal.SIGKILL)
    daemon.wait(timeout=30)


def end_with_children(daemon: subprocess.Popen) -> None:
    """Kill a daemon that leads a session of its own, with all of that session."""
    with suppress(ProcessLookupError):
        os.killpg(daemon.pid, signal.SIGKILL)
    daemon.wait(timeout=30)
