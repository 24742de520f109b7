"""Two machines as network namespaces: names, addresses and a cable of their own, as fast as one says."""

import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from leftovers import PROJECT
from two_machines import NODES, alone_on_a_core, core_of, what_is_missing, write_hosts

PROGRAMS = ("ip", "tc", "nsenter", "unshare", "taskset")
HOW_TO_GET = "apt-get update && apt-get install --no-install-recommends iproute2 util-linux"
PORT = 29_400  # in namespaces of their own no one else has it
ADDRESSES = dict(zip(NODES, ("10.77.0.1", "10.77.0.2"), strict=True))
CABLE = "cable"


def missing() -> str | None:
    """In a clause: why there can be no two machines here; None where there can."""
    return what_is_missing(PROGRAMS, HOW_TO_GET)


@dataclass(frozen=True)
class Machines:
    """Two namespaces that are joined by a cable."""

    namespaces: tuple[str, str]
    folder: Path

    def shape(self, rate: str | None) -> None:
        """Make the cable as fast as `rate`, such as "200mbit", in both directions; None: as fast as it can be."""
        for namespace in self.namespaces:
            subprocess.run(tc(namespace, "del"), capture_output=True, check=False)
            if rate is not None:
                limits = ["tbf", "rate", rate, "burst", "64kb", "latency", "400ms"]
                subprocess.run([*tc(namespace, "add"), *limits], check=True)

    def sent_bytes(self) -> int:
        """What the first machine has put on the cable since it is there, headers included."""
        counter = f"/sys/class/net/{CABLE}/statistics/tx_bytes"
        inside = ["ip", "netns", "exec", self.namespaces[0], "cat", counter]
        return int(subprocess.run(inside, capture_output=True, text=True, check=True).stdout)

    def command(self, number: int, program: list[str]) -> list[str]:
        """`program`, as it is started on one of the machines: with its name, its addresses and a core of its own."""
        setting_up = f'hostname {NODES[number]} && mount --bind {self.folder}/hosts /etc/hosts && exec "$@"'
        inside = ["nsenter", f"--net=/var/run/netns/{self.namespaces[number]}", "unshare", "--uts", "--mount"]
        return alone_on_a_core(core_of(number), [*inside, "sh", "-c", setting_up, "sh", *program])

    def train(self, arguments: list, *, ranks_per_node: int = 1, timeout_s: float = 300.0) -> dict:
        """The record of `torchrun ... train ARGUMENTS` on both machines, as the command line writes it."""
        meeting = ["--rdzv-backend=c10d", "--rdzv-id=test", f"--rdzv-endpoint={NODES[0]}:{PORT}"]
        ranks = ["--nnodes=2", f"--nproc-per-node={ranks_per_node}", "--monitor-interval=0.2"]
        logs = ["--log-dir", str(self.folder / "logs")]
        record = self.folder / "run.json"
        train = ["-m", "fsdp_helpers", "train", "--device", "cpu", *map(str, arguments), "--json", str(record)]
        program = [sys.executable, "-m", "torch.distributed.run", *ranks, *meeting, *logs, *train]
        environment = {**os.environ, "PYTHONPATH": str(PROJECT), "FSDP_OFFLINE": "1"}
        settings = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": environment}
        agents = [subprocess.Popen(self.command(number, program), **settings) for number in range(2)]
        try:
            outputs = [agent.communicate(timeout=timeout_s)[0] for agent in agents]
            assert [agent.returncode for agent in agents] == [0, 0], "\n".join(outputs)
        finally:
            for agent in agents:
                with suppress(ProcessLookupError):
                    agent.send_signal(signal.SIGTERM)
                agent.wait(timeout=60)
        return json.loads(record.read_text())


def tc(namespace: str, action: str) -> list[str]:
    return ["ip", "netns", "exec", namespace, "tc", "qdisc", action, "dev", CABLE, "root"]


@contextmanager
def two_machines(folder: Path) -> Iterator[Machines]:
    """Namespaces, cable and files are gone after the block."""
    names = tuple(f"fsdp-{os.getpid()}-{name}" for name in NODES)
    write_hosts(folder / "hosts", ADDRESSES)
    made = []
    try:
        for name in names:
            subprocess.run(["ip", "netns", "add", name], check=True)
            made.append(name)
        ends = ["ip", "link", "add", CABLE, "netns", names[0], "type", "veth", "peer", "name", CABLE]
        subprocess.run([*ends, "netns", names[1]], check=True)
        for name, address in zip(names, ADDRESSES.values(), strict=True):
            for change in (["address", "add", f"{address}/24", "dev", CABLE], ["link", "set", CABLE, "up"]):
                subprocess.run(["ip", "-netns", name, *change], check=True)
            subprocess.run(["ip", "-netns", name, "link", "set", "lo", "up"], check=True)
        yield Machines(names, folder)
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "delete", name], check=False)


# ---------------------------------------------------------------- measured

NUM_STEPS = 16
SHALLOW = ["--model", "shallow", "--no-dropout", "--global-batch-size", 16, "--train-images", 16 * NUM_STEPS]
SHALLOW += ["--test-images", 10, "--max-steps", NUM_STEPS]
SLOW = ("1gbit", "200mbit", "50mbit")
SLOW_LINK = "200mbit"
BITS_PER_S = {"1gbit": 1e9, "200mbit": 2e8, "50mbit": 5e7}


def measure_rate(machines: Machines, rate: str | None) -> dict:
    """A step of ShallowNet under DDP, one rank on each machine: its time, and what its bytes need at this rate.

    Whatever else runs on the host can only make a step longer, so the shortest one says most about the cable.
    """
    machines.shape(rate)
    before = machines.sent_bytes()
    record = machines.train([*SHALLOW, "--strategy", "ddp"])
    sent_bytes = sum(sent_by_op(record).values())
    return {
        "bits_per_s": BITS_PER_S.get(rate),
        "step_s": steady_step_s(record),
        "shortest_s": min(steady_steps_s(record)),
        "sent_bytes": sent_bytes,
        "cable_bytes_per_step": (machines.sent_bytes() - before) // NUM_STEPS,
        "predicted_s": 8 * sent_bytes / BITS_PER_S[rate] if rate else 0.0,
    }


def measure_sharding(machines: Machines, sharding: str, rate: str) -> dict:
    """A step of ShallowNet under FSDP, two ranks on each machine, with what the first machine put on the cable."""
    machines.shape(rate)
    before = machines.sent_bytes()
    record = machines.train([*SHALLOW, "--strategy", "fsdp-auto-wrap", "--sharding", sharding], ranks_per_node=2)
    return {
        "sharding": sharding,
        "bits_per_s": BITS_PER_S[rate],
        "step_s": steady_step_s(record),
        "sent_bytes": sent_by_op(record),
        "cable_bytes_per_step": (machines.sent_bytes() - before) // NUM_STEPS,
    }


def steady_step_s(record: dict) -> float:
    """The median time of a step."""
    return statistics.median(steady_steps_s(record))


def steady_steps_s(record: dict) -> list[float]:
    """The times of all steps but the first ones, which are looked at closely."""
    return record["step_seconds"][4:]


def sent_by_op(record: dict) -> dict[str, int]:
    """Bytes that rank 0 sends in a step by collective, as the planner counts them."""
    return {collective["op"]: collective["sent_bytes"] for collective in record["ranks"][0]["collectives"]}
