import os
import socket

import pytest
import torch
import torch.distributed as dist

from fsdp_helpers.ranks import group


@pytest.mark.parametrize(
    "ranks_here, ranks_elsewhere, expected",
    [
        (1, 0, 8),
        (2, 2, 4),  # 8 cores for the two ranks of this machine; the other machine has cores of its own
        (3, 5, 2),  # 8 // 3
        (16, 0, 1),  # never none
    ],
)
def test_a_rank_gets_its_share_of_its_own_machine(ranks_here, ranks_elsewhere, expected, monkeypatch):
    shares = []
    monkeypatch.setattr(group, "gather_over_ranks", lambda own: [own] * ranks_here + ["elsewhere"] * ranks_elsewhere)
    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    monkeypatch.setattr(group, "num_cores", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", shares.append)
    group.share_cores()
    assert shares == [expected]


@pytest.fixture
def no_group(monkeypatch):
    """process_group without a group and without a GPU; returns what it asked for, and undoes its settings."""
    asked = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(dist, "init_process_group", lambda **settings: asked.append(settings["backend"]))
    monkeypatch.setattr(group, "limit_waiting", lambda timeout_s: None)
    monkeypatch.setattr(group, "share_cores", lambda: None)
    monkeypatch.setattr(group, "keep_freed_memory", lambda: asked.append("keep freed memory"))
    monkeypatch.setenv("LOCAL_RANK", "0")
    for name in ("CUBLAS_WORKSPACE_CONFIG", group.BLOCKING_WAIT):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32
    yield asked
    torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32 = cudnn


def test_a_rank_on_cuda_computes_repeatably_and_leaves_the_host_allocator_alone(no_group):
    with group.process_group(0, 2, device="cuda"):
        assert torch.backends.cudnn.deterministic and not torch.backends.cudnn.allow_tf32
        assert not torch.backends.cuda.matmul.allow_tf32
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
        assert group.BLOCKING_WAIT not in os.environ  # communication overlaps, unless somebody asks for a time-out
    assert no_group == ["cpu:gloo,cuda:nccl"]


def test_a_time_out_on_cuda_has_nccl_raise_instead_of_abort(no_group, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.15.0")
    monkeypatch.delenv("TORCH_DIST_USE_NCCL2", raising=False)
    with group.process_group(0, 2, device="cuda", timeout_s=10.0):
        assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "1"


@pytest.mark.parametrize("release, implementation", [("2.14.1", None), ("2.15.0", "0")])
def test_nccl_that_cannot_raise_keeps_its_watchdog(no_group, monkeypatch, release, implementation):
    monkeypatch.setattr(torch, "__version__", release)
    if implementation:
        monkeypatch.setenv("TORCH_DIST_USE_NCCL2", implementation)
    with group.process_group(0, 2, device="cuda", timeout_s=10.0):
        assert group.BLOCKING_WAIT not in os.environ


def test_a_rank_on_the_cpu_keeps_freed_memory_and_sets_nothing_of_cuda(no_group):
    with group.process_group(0, 2, device="cpu", timeout_s=10.0):
        assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ and group.BLOCKING_WAIT not in os.environ
        assert not torch.backends.cudnn.deterministic
    assert no_group == ["keep freed memory", "gloo"]


def test_joining_has_time_however_short_a_collectives_time_out_is(no_group, monkeypatch):
    """One rank may load PyTorch many seconds longer than the other."""
    joined, limited = [], []
    monkeypatch.setattr(dist, "init_process_group", lambda *, timeout, **_: joined.append(timeout.total_seconds()))
    monkeypatch.setattr(group, "limit_waiting", limited.append)
    for timeout_s in (8.0, None):
        with group.process_group(0, 2, device="cpu", timeout_s=timeout_s):
            pass
    # 8 s less a quarter for the roll call; half an hour less 5 s
    assert (joined, limited) == ([group.JOIN_S, 1795.0], [6.0, 1795.0])


def test_a_setting_of_the_readers_own_stays(no_group, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "0")
    with group.process_group(0, 2, device="cuda", timeout_s=10.0):
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8" and os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "0"


def test_a_group_for_both_devices_waits_as_long_as_gloo():
    """As 02 and 06 say: 10 minutes are NCCL's own, and 30 those of every other group, of one for both devices too."""
    defaults = dist.distributed_c10d._get_default_timeout
    minutes = {name: defaults(name).total_seconds() / 60 for name in ("nccl", "gloo", "cpu:gloo,cuda:nccl")}
    assert minutes == {"nccl": 10, "gloo": 30, "cpu:gloo,cuda:nccl": 30}


def test_a_process_has_the_cores_that_it_may_use(monkeypatch):
    """As in a container, or under taskset: not all that the machine has."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 4, 6}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert group.num_cores() == 3
