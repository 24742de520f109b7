"""Ranks that wait in vain, and name whom they wait for."""

import signal
import subprocess

import launch_workers as workers
import pytest

from fsdp_helpers.ranks import group
from fsdp_helpers.ranks.launch import RankError, launch


@pytest.mark.parametrize("timeout_s, expected_s", [(1800.0, 5.0), (8.0, 2.0), (1.0, 0.25)])
def test_the_roll_call_takes_a_quarter_and_at_most_five_seconds(timeout_s, expected_s):
    assert group.roll_call_s(timeout_s) == expected_s


def test_a_rank_that_is_stopped_is_named():
    """Also where it is missed in a group of two of the four ranks; in that of all ranks: test_torchrun."""
    with pytest.raises(RankError, match="rank 1 didn't answer within 8 s") as error:
        launch(workers.stop_rank_1, "hybrid", world_size=4, device="cpu", group_timeout_s=8.0, timeout_s=240)
    assert error.value.rank != 1


@pytest.mark.parametrize(
    "words",
    [
        # NCCL with TORCH_NCCL_BLOCKING_WAIT=1, in the words of torch 2.15's two implementations
        "Watchdog caught collective operation timeout: NCCL operation timed out",
        "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4, OpType=ALLREDUCE, NumelIn=1, "
        "NumelOut=1, Timeout(ms)=3000) ran for 3007 milliseconds before timing out.",
        # a neighbor that is gone
        "NCCL error in: NCCLUtils.cpp:1, remote process exited or there was a network error, NCCL version 2.29\n"
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234",
    ],
)
def test_errors_of_both_libraries_are_known(words, monkeypatch):
    monkeypatch.setattr(group, "call_the_roll", lambda rank, world_size, wait_s: [1])
    monkeypatch.setattr(group.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(group.dist, "get_world_size", lambda: 2)
    with pytest.raises(TimeoutError, match="rank 1 stopped answering"), group.silent_ranks_named(4.0):
        raise RuntimeError(words)


@pytest.mark.parametrize("waited_s, said", [(0.0, "stopped answering"), (4.0, "didn't answer within 4 s")])
def test_a_connection_that_breaks_at_once_is_no_time_out(waited_s, said, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(group.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(group, "call_the_roll", lambda rank, world_size, wait_s: [1])
    monkeypatch.setattr(group.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(group.dist, "get_world_size", lambda: 2)
    with pytest.raises(TimeoutError, match=f"rank 1 {said}"), group.silent_ranks_named(4.0):
        clock[0] += waited_s
        raise RuntimeError("gloo: Connection closed by peer")


def test_under_torchrun_a_silent_rank_of_the_same_machine_is_killed_at_once(monkeypatch):
    """torchrun itself would wait 30 s for it."""
    here, elsewhere = (subprocess.Popen(workers.SLEEPER) for _ in range(2))
    monkeypatch.setenv("GROUP_RANK", "0")
    monkeypatch.setattr(group, "gather_over_ranks", lambda own: [own, ("0", here.pid), ("1", elsewhere.pid)])
    monkeypatch.setattr(group, "call_the_roll", lambda rank, world_size, wait_s: [1, 2])
    monkeypatch.setattr(group.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(group.dist, "get_world_size", lambda: 3)
    heeds_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(TimeoutError, match="ranks 1, 2 stopped answering"), group.silent_ranks_named(4.0):
            raise RuntimeError("gloo: Connection closed by peer")
        assert here.wait(timeout=20) == -signal.SIGKILL
        assert elsewhere.poll() is None  # its number may be another process's here
    finally:
        for process in (here, elsewhere):
            process.kill()
            process.wait()
        signal.signal(signal.SIGTERM, heeds_sigterm)


def test_an_error_of_its_own_calls_no_roll(monkeypatch):
    monkeypatch.setattr(group, "call_the_roll", lambda *_: pytest.fail("the roll was called"))
    with pytest.raises(RuntimeError, match="CUDA out of memory"), group.silent_ranks_named(4.0):
        raise RuntimeError("CUDA out of memory")
