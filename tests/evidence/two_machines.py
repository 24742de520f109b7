"""Two machines on one: names, cores, ports and addresses of their own, for Slurm's nodes and for network namespaces."""

import os
import shutil
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

NODES = ("node1", "node2")


def core_of(number: int) -> int:
    """A core for each machine, in turns where there are fewer: then every rank has one thread."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[number % len(cores)]


def alone_on_a_core(core: int, command: Sequence[str]) -> list[str]:
    """`command` with one core to share out among its ranks."""
    return ["taskset", "--cpu-list", str(core), *command]


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on at this moment."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def write_hosts(path: Path, addresses: Mapping[str, str]) -> None:
    """Write the machines' /etc/hosts: their names, and localhost."""
    lines = [f"{address} {name}" for name, address in addresses.items()]
    path.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))


def what_is_missing(programs: Sequence[str], how_to_get: str) -> str | None:
    """In a clause: why this machine cannot play two, and what would help; None if it can."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "root is needed, for namespaces and for Slurm's daemons"
    missing = [name for name in programs if shutil.which(name) is None]
    return f"{', '.join(missing)} not found here; to get them: {how_to_get}" if missing else None
