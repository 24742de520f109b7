"""Two machines on one: names, cores, ports and addresses of their own."""

import os
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path

NODES = ("node1", "node2")


def core_of(number: int) -> int:
    """A core for each machine, in turns where there are fewer: then every rank has one thread."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[number % len(cores)]


def alone_on_a_core(core: int, command: list[str]) -> list[str]:
    """`command` with one core to share out among its ranks."""
    return ["taskset", "--cpu-list", str(core), *command]


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def hosts_file(path: Path, addresses: Mapping[str, str]) -> None:
    """What the machines find under /etc/hosts: their names besides those that are known here."""
    lines = [f"{address} {name}" for name, address in addresses.items()]
    path.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))


def missing_programs(names: tuple[str, ...]) -> list[str]:
    return [name for name in names if shutil.which(name) is None]
