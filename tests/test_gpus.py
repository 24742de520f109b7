"""GPUs are counted by a child, tried by it, and hidden from ranks on the CPU. Nothing here needs one."""

import os

import launch_workers as workers
import pytest
import torch

from fsdp_helpers import gpus, launch
from fsdp_helpers.gpus import NONE, VISIBLE, Gpus, are_hidden, find_gpus, hide_gpus, unhide_gpus
from fsdp_helpers.ranks import group


@pytest.fixture(autouse=True)
def nothing_hidden(monkeypatch):
    monkeypatch.delenv(VISIBLE, raising=False)
    gpus._ask_a_child.cache_clear()
    yield
    unhide_gpus()
    gpus._ask_a_child.cache_clear()


def test_ranks_on_the_cpu_find_no_gpu():
    found = launch(workers.return_environment, world_size=2, device="cpu")
    assert [environment[VISIBLE] for environment in found] == [NONE, NONE]
    assert VISIBLE not in os.environ, "the process that launches keeps its own"


@pytest.mark.parametrize("own", [None, "2,3"])
def test_what_is_hidden_can_be_seen_again(own, monkeypatch):
    if own:
        monkeypatch.setenv(VISIBLE, own)
    for _ in range(2):  # twice is once
        hide_gpus()
        assert are_hidden() and find_gpus() == Gpus(0)
    unhide_gpus()
    unhide_gpus()
    assert os.environ.get(VISIBLE) == own


def test_what_the_reader_removed_meanwhile_is_not_missed(monkeypatch):
    hide_gpus()
    monkeypatch.delenv(VISIBLE)
    unhide_gpus()
    assert VISIBLE not in os.environ


def test_what_the_reader_hides_stays_hidden(monkeypatch):
    monkeypatch.setenv(VISIBLE, NONE)
    hide_gpus()
    unhide_gpus()
    assert are_hidden()


def test_without_a_driver_nobody_is_asked(monkeypatch):
    monkeypatch.setattr(gpus, "DRIVER", "no-such-driver.so")
    monkeypatch.setattr(gpus, "TRIAL", "raise SystemExit('asked')")
    assert find_gpus() == Gpus(0)


@pytest.mark.parametrize(
    "trial, found",
    [
        ("print(2)", Gpus(2)),
        ("print(1); print('The driver is too old.')", Gpus(1, "The driver is too old.")),
        ("print(1, flush=True); import os; os.abort()", Gpus(1, "the process that tried it exited with status -6")),
        ("import time; time.sleep(600)", Gpus(1, "it didn't answer within 1 s")),
        ("import os; print(1 + ('RANK' in os.environ))", Gpus(1)),
    ],
)
def test_a_child_counts_and_tries(trial, found, monkeypatch):
    monkeypatch.setenv("RANK", "0")  # the child is not a rank
    monkeypatch.setattr(gpus, "_may_have_gpus", lambda: True)
    monkeypatch.setattr(gpus, "TRIAL_S", 1.0 if "sleep" in trial else 60.0)
    monkeypatch.setattr(gpus, "TRIAL", trial)
    assert find_gpus() == found


@pytest.mark.parametrize(
    "device, num_ranks, found, expected",
    [
        ("auto", 2, Gpus(0), "cpu"),
        ("auto", 2, Gpus(1), "cpu"),
        ("auto", 2, Gpus(2), "cuda"),
        ("auto", 2, Gpus(2, "too old"), "cpu"),
        ("cuda", 2, Gpus(2), "cuda"),
        ("cpu", 2, Gpus(2), "cpu"),
        ("cuda", 2, Gpus(1), "2 ranks need 2 CUDA devices, but this machine has 1; use device 'cpu', or fewer ranks"),
        ("cuda", 2, Gpus(2, "too old"), r"torch can't use this machine's GPU \(too old\); use device 'cpu'"),
    ],
)
def test_the_choice_of_a_device(device, num_ranks, found, expected, monkeypatch):
    monkeypatch.setattr(gpus, "find_gpus", lambda wanted: found)
    if expected in ("cpu", "cuda"):
        assert gpus.choose_device(device, num_ranks) == expected
    else:
        with pytest.raises(ValueError, match=expected):
            gpus.choose_device(device, num_ranks)


def test_a_hidden_gpu_is_called_hidden():
    hide_gpus()
    with pytest.raises(ValueError, match="this machine has 0 that CUDA_VISIBLE_DEVICES doesn't hide"):
        gpus.choose_device("cuda", 1)


def test_a_rank_has_the_gpu_of_its_local_rank_unless_all_are_hidden(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)  # torch had looked before
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert group.rank_device() == torch.device("cuda", 0)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert group.rank_device() == torch.device("cuda", 1)
    hide_gpus()
    assert group.rank_device().type == "cpu"
