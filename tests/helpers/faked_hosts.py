"""Hosts and GPUs that aren't there: for the fine-tuning scripts' choice of a device, and for two torchruns on one host.

As a program, `python faked_hosts.py PROGRAM ...` runs a rank's program on a host whose name and number of GPUs are in the
variable FAKED_HOST, as in a:2; the PROGRAM is a script, or -m and a module.
"""

import errno
import fcntl
import os
import runpy
import socket
import sys
from collections.abc import Callable
from types import ModuleType

import torch
import torch.distributed as dist
from torch.distributed import HashStore

FAKED_HOST = "FAKED_HOST"
CHOICES = [  # the setting, the hosts (name, GPUs, ranks), and what rank 1 of host a gets: a device or a part of the line
    ("auto", [("a", 2, 2), ("b", 2, 2)], "cuda:1"),
    ("auto", [("a", 0, 2), ("b", 0, 2)], "cpu"),
    ("auto", [("a", 2, 2), ("b", 1, 2)], "fewer GPUs than ranks on b (GPUs: 1, ranks: 2); "),
    ("auto", [("a", 1, 2), ("b", 0, 2)], "on a (GPUs: 1, ranks: 2), b (GPUs: 0, ranks: 2); "),
    ("cuda", [("a", 2, 2), ("b", 2, 2)], "cuda:1"),
    ("cuda", [("a", 0, 2), ("b", 0, 2)], "on a (GPUs: 0, ranks: 2), b (GPUs: 0, ranks: 2); "),
    ("cpu", [("a", 0, 2), ("b", 0, 2)], "cpu"),
]


def check_choice(
    script: ModuleType, choose: Callable, wanted: str, hosts: list, found: str, monkeypatch, capsys
) -> None:
    """Where ranks stay on the CPU, they hide what GPUs there are: Adam's first step would open one."""
    told, current = [], []

    def gather(into: list, own: tuple) -> None:
        told.append(own)
        into[:] = hosts

    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    monkeypatch.setattr(script.socket, "gethostname", lambda: "a")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(os, "_exit", sys.exit)  # how the script ends on all ranks at once
    for variable, value in {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "0,1"}.items():
        monkeypatch.setenv(variable, value)
    try:
        device = choose()
    except SystemExit as ended:
        (line,) = capsys.readouterr().err.splitlines()
        assert found in line and ended.code == 2
    else:
        assert device == torch.device(found)
        assert current == ([] if found == "cpu" else [device])
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ("" if found == "cpu" else "0,1")
    assert told == [("a", 0 if wanted == "cpu" else 2, 2)]


def flock_of_nfs(file, kind: int, flock=fcntl.flock) -> None:
    """As NFS 4 emulates it: for a shared lock, a file has to be readable, and writable for an exclusive one."""
    mode = fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE
    if mode not in (os.O_RDONLY if kind & fcntl.LOCK_SH else os.O_WRONLY, os.O_RDWR):
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    return flock(file, kind)


def main() -> None:
    from fsdp_helpers import gpus

    name, count = os.environ[FAKED_HOST].split(":")
    socket.gethostname = lambda: name
    torch.cuda.device_count = lambda: int(count)
    gpus.find_gpus = lambda num_wanted=0: gpus.Gpus(int(count))
    del sys.argv[0]
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
