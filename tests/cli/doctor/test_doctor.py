"""doctor: a machine that is right, and one that is broken in one way at a time."""

import hashlib
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys

import pytest
from programs import wait_until
from runs import main_in_process
from torchvision.datasets import MNIST

from fsdp_helpers.cli.doctor import environment as doctor_environment
from fsdp_helpers.cli.doctor import machine as doctor_machine
from fsdp_helpers.cli.doctor import report as doctor
from fsdp_helpers.data.mnist import MNIST_FILES
from fsdp_helpers.ranks import gpus
from fsdp_helpers.ranks.gpus import VISIBLE, Gpus

MOST_CPU_S = 30.0  # it takes 7, and more where other programs fill the caches; on an idle machine it takes no longer


def examined(capsys) -> tuple[int, list[str]]:
    """The exit status, and the lines of what is wrong."""
    status = main_in_process("doctor")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(doctor.LOOKS) + 1, "one line per check, and the verdict"
    return status, [line for line in lines if line.startswith("WRONG")]


def spent_s() -> float:
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def test_a_good_machine(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("FSDP_DATA_DIR", str(tmp_path / "not-yet"))
    monkeypatch.setattr(doctor_machine, "orphans", lambda: iter(()))  # a neighbor's are none of this test's business
    before_s = spent_s()
    status, wrong = examined(capsys)
    assert (status, wrong) == (0, [])
    assert spent_s() - before_s < MOST_CPU_S
    assert not (tmp_path / "not-yet").exists(), "doctor only looks"


# ---------------------------------------------------------------- seven ways of being broken


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """All but the two ranks, on a machine where the rest is right."""
    monkeypatch.setattr(doctor, "LOOKS", tuple(look for look in doctor.LOOKS if look.title != "two ranks"))
    monkeypatch.setenv("FSDP_DATA_DIR", str(tmp_path / "data"))


def damage_data(patch, folder):
    name = next(iter(MNIST_FILES))
    raw = folder / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    (raw / name).write_bytes(b"half of it")
    return f"{name} is damaged: 10 bytes instead of 47040016. Delete it"


def install_wrong_torchvision(patch, folder):
    info = folder / "torchvision-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.1.0\nRequires-Dist: torch==1.0\n"
    )
    patch.syspath_prepend(str(folder))
    return "torchvision needs torch==1.0, and "


def lose_host_name(patch, folder):
    patch.setattr(socket, "gethostname", lambda: "lost.invalid")
    return "lost.invalid does not resolve"


def fill_shared_memory(patch, folder):
    patch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(64_000_000, 64_000_000, 0))
    patch.setattr(doctor_machine, "SHARED_MEMORY", folder)
    return f"{folder} is full, 0 B free; remove what ended programs left there"


def put_a_file_where_data_belong(patch, folder):
    (folder / "data").write_text("no folder")
    return "that folder cannot be written (Not a directory)"


def break_gpu(patch, folder):
    patch.setenv(VISIBLE, "0")
    patch.setattr(gpus, "find_gpus", lambda wanted: Gpus(1, "the driver is too old (found version 11040)"))
    return "torch cannot use the GPU of this machine (the driver is too old (found version 11040)); update the driver"


@pytest.mark.parametrize(
    "break_it",
    [
        damage_data,
        install_wrong_torchvision,
        lose_host_name,
        fill_shared_memory,
        put_a_file_where_data_belong,
        break_gpu,
    ],
)
def test_each_is_one_line(break_it, quick, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(doctor_machine, "orphans", lambda: iter(()))
    said = break_it(monkeypatch, tmp_path)
    status, wrong = examined(capsys)
    assert status == 1 and len(wrong) == 1 and said in wrong[0], wrong


def test_a_leftover_server_is_one_line(quick, capsys, monkeypatch):
    find = doctor_machine.orphans
    code = "import time; time.sleep(600)  # multiprocessing.forkserver, ['torch.distributed.fsdp']"
    started = subprocess.run(  # the shell ends at once, and leaves its child behind
        ["sh", "-c", f'{sys.executable} -c "$0" > /dev/null 2>&1 & echo $!', code],
        capture_output=True,
        text=True,
        check=True,
    )
    pid = int(started.stdout)
    own = [(pid, "fork server")]  # a neighbor's are none of this test's business
    monkeypatch.setattr(doctor_machine, "orphans", lambda: iter([found for found in find() if found in own]))
    try:
        assert wait_until(lambda: pid in dict(doctor_machine.orphans()))
        status, wrong = examined(capsys)
        assert status == 1 and len(wrong) == 1 and f"fork server {pid}" in wrong[0] and "kill " in wrong[0]
    finally:
        os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: pid not in dict(doctor_machine.orphans()))


# ---------------------------------------------------------------- and some more


def test_a_server_whose_notebook_runs_is_not_left_over():
    code = "import time; time.sleep(600)  # multiprocessing.forkserver, ['torch.distributed.fsdp']"
    with subprocess.Popen([sys.executable, "-c", code]) as server:
        try:
            assert server.pid not in dict(doctor_machine.orphans())
        finally:
            server.kill()


def test_a_rank_behind_a_script_is_not_left_over():
    """As under `torchrun --no-python ./wrapper.sh`, with this process as torchrun."""
    wrapper = ["sh", "-c", f"{sys.executable} -c 'import time; time.sleep(600)' & echo $!; wait"]
    environment = os.environ | {doctor_machine.RANK_OF_TORCHRUN: "none"}
    settings = {"env": environment, "stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen(wrapper, **settings) as script:
        try:
            rank = int(script.stdout.readline())
            assert not {script.pid, rank} & dict(doctor_machine.orphans()).keys()
        finally:
            os.killpg(script.pid, signal.SIGKILL)


def test_packed_data_are_found(monkeypatch, tmp_path):
    contents = {f"{name}.gz": name.encode() for name in MNIST_FILES}
    checksums = [(name, hashlib.md5(content).hexdigest()) for name, content in contents.items()]
    monkeypatch.setattr(MNIST, "resources", checksums)
    monkeypatch.setenv("FSDP_DATA_DIR", str(tmp_path))
    monkeypatch.delenv("FSDP_OFFLINE", raising=False)
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, content in contents.items():
        assert "no MNIST yet" in doctor_machine.data_can_be_used().measured, "until all four are there"
        (raw / name).write_bytes(content)
    found = doctor_machine.data_can_be_used()
    assert found.passed and found.measured == "MNIST is there, packed and whole: the first run unpacks it"
    (raw / name).write_bytes(b"half of it")
    found = doctor_machine.data_can_be_used()
    assert not found.passed and f"{name} is damaged: its checksum is wrong. Delete it" in found.measured


def test_an_exception_is_a_line(monkeypatch):
    def fail():
        raise ImportError("libcudart.so.13: cannot open\nshared object file")

    row = doctor.look_at(doctor.Look("versions", fail))
    assert doctor.line(row) == "WRONG versions       ImportError: libcudart.so.13: cannot open shared object file"
    assert doctor.verdict([row]).startswith("1 of 1 wrong: versions.")


def test_a_kernel_of_a_different_environment():
    assert doctor_environment.starts_this_python("python") and doctor_environment.starts_this_python(sys.executable)
    assert not doctor_environment.starts_this_python("/opt/other/bin/python")


def test_versions_beside_the_lock(monkeypatch, tmp_path):
    lock = tmp_path / "requirements.lock"
    lock.write_text("torch==2.0.0 ; sys_platform != 'nowhere'\n    # via\nnone-such==1 ; sys_platform == 'nowhere'\n")
    assert doctor_environment.locked_versions(lock.read_text()) == {"torch": "2.0.0"}
    monkeypatch.setattr(doctor_environment, "LOCK", lock)
    outcome = doctor_environment.versions_as_locked()
    assert (
        outcome.passed and "1 versions are not the tested ones" in outcome.measured and "not 2.0.0" in outcome.measured
    )
