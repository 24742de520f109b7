"""doctor: a machine that is right, and one that is broken in one way at a time."""

import hashlib
import json
import os
import platform
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from importlib import metadata

import psutil
import pytest
from programs import wait_until
from runs import main_in_process
from torchvision.datasets import MNIST

from fsdp_helpers import gpus
from fsdp_helpers.cli.doctor import environment as doctor_environment
from fsdp_helpers.cli.doctor import leftovers, rendezvous
from fsdp_helpers.cli.doctor import machine as doctor_machine
from fsdp_helpers.cli.doctor import report as doctor
from fsdp_helpers.cli.doctor.rows import FAIL, NOTE, PASS, SKIP, Look, Outcome, Row, look_at, note
from fsdp_helpers.data.source import MNIST_FILES
from fsdp_helpers.gpus import VISIBLE, Gpus
from fsdp_helpers.training.torchrun import RANK_VARIABLES

STALE = dict(zip(RANK_VARIABLES, ("0", "2", "0", "2", "10.255.0.9", "29500"), strict=True))


def examined(capsys) -> tuple[int, list[str], list[str]]:
    """The exit status, the lines of what is wrong, and the notes."""
    status = main_in_process("doctor")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(doctor.LOOKS) + 1, "one line per check, and the verdict"
    return status, *([line for line in lines if line.startswith(word)] for word in (FAIL, NOTE))


@pytest.fixture
def healthy(monkeypatch, tmp_path):
    """A machine on which all is right, whatever the one is like that runs the tests; two ranks are not started."""
    monkeypatch.setattr(doctor, "LOOKS", tuple(look for look in doctor.LOOKS if look.title != "two ranks"))
    monkeypatch.setattr(leftovers, "orphans", lambda: iter(()))  # a neighbor's are none of these tests' business
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(8_000_000_000, 0, 8_000_000_000))
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (4096, 4096))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 16_000_000_000}))
    monkeypatch.setenv("FSDP_DATA_DIR", str(tmp_path / "data"))
    for name in (
        *RANK_VARIABLES,
        "TORCHELASTIC_RUN_ID",
        "GLOO_SOCKET_IFNAME",
        "NCCL_SOCKET_IFNAME",
        *rendezvous.PROXIES,
    ):
        monkeypatch.delenv(name, raising=False)


def test_a_good_machine(healthy, capsys, tmp_path):
    status, wrong, _ = examined(capsys)
    assert (status, wrong) == (0, [])
    assert not (tmp_path / "data").exists(), "doctor only looks"


def test_two_ranks_add_up(monkeypatch):
    assert rendezvous.two_ranks_add_up().passed
    monkeypatch.setattr("fsdp_helpers.ranks.launch.launch", lambda *_, **__: [("cpu", 0.0, [], [])] * 2)
    found = rendezvous.two_ranks_add_up()
    assert not found.passed and found.measured.startswith("they found [('cpu', 0.0, [], [])")


# ---------------------------------------------------------------- broken in one way


def damage_data(patch, folder):
    patch.delenv("FSDP_OFFLINE", raising=False)
    name = next(iter(MNIST_FILES))
    raw = folder / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    (raw / name).write_bytes(b"half of it")
    return f"{name} is damaged: 10 bytes instead of 47040016. Delete it"


def put_a_file_where_data_belong(patch, folder):
    patch.delenv("FSDP_OFFLINE", raising=False)
    (folder / "data").write_text("no folder")
    return "that folder isn't writable (Not a directory)"


def install_wrong_torchvision(patch, folder):
    info = folder / "torchvision-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.1.0\nRequires-Dist: torch==1.0\n"
    )
    patch.syspath_prepend(str(folder))
    return "torchvision needs torch==1.0, but "


def remove_a_package(patch, folder):
    real = metadata.version

    def version(name):
        if name.lower() == "safetensors":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    patch.setattr(metadata, "requires", lambda name: ["safetensors"])
    patch.setattr(metadata, "version", version)
    return "which isn't installed"


def break_torch(patch, folder):
    def refuse(name):
        raise OSError("libtorch_cpu.so: undefined symbol")

    patch.setattr(doctor_environment.importlib, "import_module", refuse)
    return "torch can't be loaded (OSError: libtorch_cpu.so: undefined symbol)"


def use_an_old_python(patch, folder):
    patch.setattr(sys, "version_info", (3, 8, 0))
    patch.setattr(platform, "python_version", lambda: "3.8.0")
    return "3.8.0 is older than 3.11; make a new environment: `make lab PYTHON=python3.12`"


def remove_ipykernel(patch, folder):
    real = doctor_environment.importlib.util.find_spec
    patch.setattr(
        doctor_environment.importlib.util, "find_spec", lambda name: name != "ipykernel" and real(name) or None
    )
    return "ipykernel can't be imported"


def use_a_different_kernel(patch, folder):
    spec = type("Spec", (), {"argv": ["/opt/other/bin/python"], "resource_dir": "/opt/kernels/python3"})
    patch.setattr("jupyter_client.kernelspec.KernelSpecManager.get_kernel_spec", lambda self, name: spec)
    return "kernel python3 starts /opt/other/bin/python, not "


def take_the_memory(patch, folder):
    patch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 1_000_000_000}))
    return "1.00 GB free, but two ranks need 2.00 GB; close other programs"


def fill_shared_memory(patch, folder):
    patch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(64_000_000, 64_000_000, 0))
    return (
        "0 B of 64.0 MB free in /dev/shm, too little for a data loader's batch; remove files that dead programs left there "
        "(ls -l /dev/shm), or start the container with --shm-size=1g or --ipc=host"
    )


def open_too_few_files(patch, folder):
    patch.setattr(resource, "getrlimit", lambda kind: (32, 4096))
    return "at most 32, but two ranks need 64; `ulimit -n 4096` in this shell"


def lose_all_temporary_folders(patch, folder):
    def refuse():
        raise FileNotFoundError("No usable temporary directory found")

    patch.setattr(tempfile, "gettempdir", refuse)
    return "no folder for temporary files is writable; set TMPDIR to one that is"


def leave_rank_variables(patch, folder):
    for name, value in STALE.items():
        patch.setenv(name, value)
    return (
        "RANK=0, WORLD_SIZE=2, LOCAL_RANK=0, LOCAL_WORLD_SIZE=2, MASTER_ADDR=10.255.0.9, MASTER_PORT=29500 without "
        "torchrun: `train` would wait for other ranks; "
        "`unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT`"
    )


def name_a_missing_interface(patch, folder):
    patch.setenv("GLOO_SOCKET_IFNAME", "lo,ib7")
    there = ", ".join(rendezvous.interfaces())
    remedy = f"name one of {there}, or `unset GLOO_SOCKET_IFNAME`"
    return f"GLOO_SOCKET_IFNAME names ib7, which this machine doesn't have; {remedy}"


def lose_host_name(patch, folder):
    patch.setattr(socket, "gethostname", lambda: "lost.invalid")
    return "torchrun's ranks meet at that name; add the line `127.0.0.1 lost.invalid` to /etc/hosts"


def give_host_name_to_a_different_machine(patch, folder):
    patch.setattr(socket, "getaddrinfo", lambda *_, **__: [(socket.AF_INET, None, 0, "", ("192.0.2.7", 0))])
    return " resolves to 192.0.2.7, which isn't this machine; torchrun's ranks meet at that name; add the line"


def block_ports(patch, folder):
    def refuse(*_, **__):
        raise ConnectionRefusedError("refused")

    patch.setattr(socket, "create_connection", refuse)
    return "can't connect to a port on this machine (refused); a firewall or sandbox blocks 127.0.0.1"


def break_gpu(patch, folder):
    patch.setenv(VISIBLE, "0")
    patch.setattr(gpus, "find_gpus", lambda wanted: Gpus(1, "the driver is too old (found version 11040)"))
    return "torch can't use this machine's GPU (the driver is too old (found version 11040)); update the driver"


BROKEN = {
    damage_data: "data",
    put_a_file_where_data_belong: "data",
    install_wrong_torchvision: "versions",
    remove_a_package: "versions",
    break_torch: "versions",
    use_an_old_python: "Python",
    remove_ipykernel: "Jupyter",
    use_a_different_kernel: "Jupyter",
    take_the_memory: "memory",
    fill_shared_memory: "shared memory",
    open_too_few_files: "open files",
    lose_all_temporary_folders: "temporary",
    leave_rank_variables: "rank variables",
    name_a_missing_interface: "interfaces",
    lose_host_name: "host name",
    give_host_name_to_a_different_machine: "host name",
    block_ports: "ports",
    break_gpu: "GPU",
}


@pytest.mark.parametrize("break_it, title", BROKEN.items(), ids=[break_it.__name__ for break_it in BROKEN])
def test_each_is_one_line(break_it, title, healthy, monkeypatch, tmp_path, capsys):
    look = next(look for look in doctor.LOOKS if look.title == title)
    said = break_it(monkeypatch, tmp_path)
    row = look_at(look)
    monkeypatch.undo()
    assert row.result == FAIL and said in row.measured, row


def test_one_wrong_line_and_its_verdict(healthy, monkeypatch, tmp_path, capsys):
    leave_rank_variables(monkeypatch, tmp_path)
    status, wrong, _ = examined(capsys)
    assert status == 1 and len(wrong) == 1


# ---------------------------------------------------------------- a doubt is a note


def have_docker_s_shared_memory(patch, folder):
    patch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2**26, 2**20, 2**26 - 2**20))
    return (
        "66.1 MB of 67.1 MB free in /dev/shm, Docker's default; data loaders with workers and NCCL may run out: start the "
        "container with --shm-size=1g or --ipc=host"
    )


def have_less_memory(patch, folder):
    patch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 5_000_000_000}))
    return "enough for all notebooks except 04"


def open_few_files(patch, folder):
    patch.setattr(resource, "getrlimit", lambda kind: (256, 512))
    return "at most 256; data loaders with workers may run out (Too many open files): `ulimit -n 512` in this shell"


def choose_a_missing_temporary_folder(patch, folder):
    patch.setenv("TMPDIR", str(folder / "gone"))
    return "gone can't be used (there's no such folder): Python uses "


def leave_an_address(patch, folder):
    patch.setenv("MASTER_ADDR", "10.255.0.9")
    return "MASTER_ADDR=10.255.0.9: left over?"


def be_in_a_job_s_container(patch, folder):
    leave_rank_variables(patch, folder)
    patch.setattr(rendezvous, "variables_of", lambda pid: STALE | {"PATH": "/bin"} if pid == 1 else {})
    return "set when this container was started; start ranks with torchrun"


def install_without_notebooks(patch, folder):
    real = doctor_environment.importlib.util.find_spec
    patch.setattr(
        doctor_environment.importlib.util,
        "find_spec",
        lambda name: name not in ("jupyterlab", "ipykernel") and real(name) or None,
    )
    return "not installed: commands and scripts work, notebooks don't; `pip install '.[notebooks]'` installs it"


def choose_a_missing_interface_of_nccl(patch, folder):
    patch.setenv("NCCL_SOCKET_IFNAME", "ib")
    return "NCCL_SOCKET_IFNAME=ib matches none of lo"


def have_a_proxy(patch, folder):
    patch.setenv("http_proxy", "http://proxy:3128")
    patch.setenv("no_proxy", "localhost")  # and not 127.0.0.1
    patch.delenv("NO_PROXY", raising=False)
    return "http_proxy set: `export no_proxy=localhost,127.0.0.1`"


DOUBTS = {
    have_docker_s_shared_memory: "shared memory",
    have_less_memory: "memory",
    open_few_files: "open files",
    choose_a_missing_temporary_folder: "temporary",
    leave_an_address: "rank variables",
    be_in_a_job_s_container: "rank variables",
    install_without_notebooks: "Jupyter",
    choose_a_missing_interface_of_nccl: "interfaces",
    have_a_proxy: "proxies",
}


@pytest.mark.parametrize("doubt, title", DOUBTS.items(), ids=[doubt.__name__ for doubt in DOUBTS])
def test_a_doubt_is_a_note(doubt, title, healthy, monkeypatch, tmp_path):
    look = next(look for look in doctor.LOOKS if look.title == title)
    said = doubt(monkeypatch, tmp_path)
    row = look_at(look)
    monkeypatch.undo()
    assert row.result == NOTE and said in row.measured, row


@pytest.mark.parametrize(
    "chosen, found", [("lo", True), ("l", True), ("=l", False), ("^lo", True), ("^lo,eth", False), ("=eth0", True)]
)
def test_the_interfaces_that_nccl_would_use(chosen, found):
    assert rendezvous.matches_nccl(chosen, ["lo", "eth0"]) is found


def test_under_torchrun_its_variables_are_right(healthy, monkeypatch, tmp_path):
    leave_rank_variables(monkeypatch, tmp_path)
    monkeypatch.setattr(rendezvous, "command_of", lambda pid: ["python", "/opt/bin/torchrun", "--standalone"])
    assert rendezvous.rank_variables() == Outcome(True, "set by torchrun, which started this command")


def test_two_ranks_are_not_started_without_an_interface(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib7")
    row = look_at(Look("two ranks", rendezvous.two_ranks_add_up))
    assert (row.result, row.measured) == (SKIP, "not started: gloo has no interface (see above)")


def test_the_verdict_counts():
    rows = [Row("a", FAIL, ""), Row("b", PASS, ""), Row("c", NOTE, "")]
    assert doctor.verdict(rows).startswith("1 of 3 wrong: a. Fix the first one")
    assert "ready" in doctor.verdict(rows[1:]) and "Worth checking: c." in doctor.verdict(rows[1:])
    assert note("x").passed and note("x").result == NOTE


# ---------------------------------------------------------------- in a container

LOOK = """
import json
from fsdp_helpers.cli.doctor import leftovers
from fsdp_helpers.cli.doctor.rows import Look, look_at
row = look_at(Look("", leftovers.processes_of_earlier_runs))
print(json.dumps([row.result, row.measured]))
"""
RANKS = {
    # As in a container whose job runs `exec torchrun`: the first process is torchrun, and its ranks are its children.
    "torchrun": "exec -a torchrun sh -c '{rank} & sleep 1; {look}'",
    # As after `kill -9` of torchrun: the first process is the container's, and has taken the rank over.
    "init": "(({rank}) & ) ; sleep 1; {look}; true",
}


@pytest.mark.parametrize("first, result", [("torchrun", PASS), ("init", NOTE)])
def test_ranks_under_the_first_process_of_a_container(first, result):
    rank = "TORCHELASTIC_RUN_ID=none sleep 600 > /dev/null 2>&1"
    script = RANKS[first].format(rank=rank, look=f'{sys.executable} -c "$LOOK"')
    command = ["unshare", "-Urmpf", "--mount-proc", "bash", "-c", script]
    environment = {name: value for name, value in os.environ.items() if name != "TORCHELASTIC_RUN_ID"} | {"LOOK": LOOK}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=240)
    if not done.stdout:
        pytest.skip(f"no namespaces here: {done.stderr.strip()}")
    found = json.loads(done.stdout.splitlines()[-1])
    assert found[0] == result, found
    if result == NOTE:
        assert "min old: sleep 600)" in found[1] and "kill" not in found[1]


# ---------------------------------------------------------------- leftovers


@pytest.mark.parametrize("what", ["a fork server", "a rank of torchrun"])
def test_what_an_ended_program_left_is_a_note(what, healthy, capsys, monkeypatch):
    monkeypatch.undo()
    code = "import time; time.sleep(600)"
    variables = {name: value for name, value in os.environ.items() if name != leftovers.RANK_OF_TORCHRUN}
    if what == "a fork server":
        code += "  # multiprocessing.forkserver, ['torch.distributed.fsdp']"
    else:
        variables[leftovers.RANK_OF_TORCHRUN] = "none"
    started = subprocess.run(  # the shell ends at once, and leaves its child behind
        ["sh", "-c", f'{sys.executable} -c "$0" > /dev/null 2>&1 & echo $!', code],
        capture_output=True,
        env=variables,
        text=True,
        check=True,
    )
    pid = int(started.stdout)

    def found():
        return [orphan for orphan in leftovers.orphans() if orphan.pid == pid]

    try:
        assert wait_until(found)
        said = str(found()[0])
        assert said.startswith(f"process {pid} (0 min old: ") and ("fork server" in said or "time.sleep" in said)
        outcome = leftovers.processes_of_earlier_runs()
        assert outcome.is_note and said.partition("(")[0] in outcome.measured and "kill" not in outcome.measured
    finally:
        os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: not found())


def pids():
    return {orphan.pid for orphan in leftovers.orphans()}


def test_a_server_whose_notebook_runs_is_not_left_over():
    code = "import time; time.sleep(600)  # multiprocessing.forkserver, ['torch.distributed.fsdp']"
    with subprocess.Popen([sys.executable, "-c", code]) as server:
        try:
            assert server.pid not in pids()
        finally:
            server.kill()


def test_a_rank_behind_a_script_is_not_left_over():
    """As under `torchrun --no-python ./wrapper.sh`, with this process as torchrun."""
    wrapper = ["sh", "-c", f"{sys.executable} -c 'import time; time.sleep(600)' & echo $!; wait"]
    environment = os.environ | {leftovers.RANK_OF_TORCHRUN: "none"}
    settings = {"env": environment, "stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen(wrapper, **settings) as script:
        try:
            rank = int(script.stdout.readline())
            assert not {script.pid, rank} & pids()
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
    assert found.passed and found.measured == "MNIST is there, complete but still compressed: the first run unpacks it"
    (raw / name).write_bytes(b"half of it")
    found = doctor_machine.data_can_be_used()
    assert not found.passed and f"{name} is damaged: its checksum is wrong. Delete it" in found.measured


def test_an_exception_is_a_line(monkeypatch):
    def fail():
        raise ImportError("libcudart.so.13: cannot open\nshared object file")

    row = look_at(Look("versions", fail))
    assert doctor.line(row) == "WRONG versions        ImportError: libcudart.so.13: cannot open shared object file"
    assert doctor.verdict([row]).startswith("1 of 1 wrong: versions.")


def test_versions_beside_the_lock(monkeypatch, tmp_path):
    lock = tmp_path / "requirements.lock"
    lock.write_text("torch==2.0.0 ; sys_platform != 'nowhere'\n    # via\nnone-such==1 ; sys_platform == 'nowhere'\n")
    assert doctor_environment.locked_versions(lock.read_text()) == {"torch": "2.0.0"}
    monkeypatch.setattr(doctor_environment, "LOCK", lock)
    outcome = doctor_environment.versions_as_locked()
    assert (
        outcome.is_note and "1 versions differ from the tested" in outcome.measured and "not 2.0.0" in outcome.measured
    )
