"""doctor --gpu: each verdict fails where it should. Nothing here needs a GPU; tests/imagined_gpu runs it next to one."""

import pytest
import torch
from runs import main_in_process

from fsdp_helpers.cli.doctor import gpu
from fsdp_helpers.cli.doctor.rows import FAIL, NOTE, PASS, SKIP, Row, look_at
from fsdp_helpers.cli.doctor.workers import train_in_three_ways
from fsdp_helpers.gpus import NONE, VISIBLE, Gpus
from fsdp_helpers.ranks.launch import launch

LOOKS = {look.title: look for look in gpu.LOOKS}
DIGITS = {"ddp": [1.0, 0.5], "fsdp2": [1.0, 0.5], "bf16": [1.001, 0.5001]}


@pytest.fixture
def two_gpus(monkeypatch):
    """Two GPUs on which all is well, without one."""
    answers = {
        "versions": ["2.15.0 13.2 91300 2.29.7"],
        "memory": ["NVIDIA A|60000000000|80000000000", "NVIDIA A|70000000000|80000000000"],
        "product": ["1e-06"],
        "links": ["2"],
    }
    right = [(f"cuda:{rank}", 3.0, [1.0, 2.0], [2.0 * (rank + 1)]) for rank in range(2)]
    monkeypatch.setattr(gpu, "count", lambda: 2)
    monkeypatch.setattr(gpu, "find_gpus", lambda wanted: Gpus(2))
    monkeypatch.setattr(gpu, "ask", answers.get)
    monkeypatch.setattr(gpu, "losses", lambda: DIGITS)
    monkeypatch.setattr("fsdp_helpers.ranks.launch.launch", lambda *_, **__: right)
    return answers


def test_where_all_is_well(two_gpus, capsys):
    assert main_in_process("doctor", "--gpu") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["| check | result | found |", "| --- | --- | --- |"]
    assert len(lines) == len(gpu.LOOKS) + 4 and all(" | ok | " in line for line in lines[2:-2])
    assert lines[-1] == "8 of 8 checks passed, 0 skipped."


def change(name, value):
    return lambda patch, answers: answers.update({name: value})


def have_losses(**changes):
    return lambda patch, answers: patch.setattr(gpu, "losses", lambda: DIGITS | changes)


def break_driver(patch, answers):
    patch.setattr(gpu, "find_gpus", lambda wanted: Gpus(2, "the driver is too old"))


def break_sums(patch, answers):
    patch.setattr("fsdp_helpers.ranks.launch.launch", lambda *_, **__: [("cuda:0", 2.0, [], [])])


def break_torch(patch, answers):
    def refuse(question):
        raise RuntimeError("CUDA error: no kernel image is available")

    patch.setattr(gpu, "ask", refuse)


BROKEN = [
    ("GPUs", break_driver, FAIL, "torch can't use them: the driver is too old"),
    ("versions", break_torch, FAIL, "CUDA error: no kernel image is available"),
    ("memory", change("memory", ["NVIDIA A|1000000000|80000000000"]), NOTE, "1.00 GB of 80.0 GB free; something"),
    ("arithmetic", change("product", ["0.5"]), FAIL, "differs from the CPU's by 5.0e-01"),
    ("links", change("links", ["0"]), NOTE, "0 of 2 pairs"),
    ("collectives", break_sums, FAIL, "wrong results: [('cuda:0', 2.0"),
    ("FSDP2", have_losses(fsdp2=[1.0, 0.5001]), FAIL, "differ from DDP's by 2.0e-04"),
    ("bf16", have_losses(bf16=[1.0, 0.5]), FAIL, "differ from fp32's by 0.0e+00"),
    ("bf16", have_losses(bf16=[1.0, 0.7]), FAIL, "differ from fp32's by 4.0e-01"),
]


@pytest.mark.parametrize("title, break_it, result, said", BROKEN)
def test_each_verdict_can_fail(title, break_it, result, said, two_gpus, monkeypatch):
    assert look_at(LOOKS[title]).result == PASS
    break_it(monkeypatch, two_gpus)
    row = look_at(LOOKS[title])
    assert row.result == result and said in row.measured, row


def test_a_row_that_fails_is_exit_status_1(two_gpus, monkeypatch, capsys):
    break_sums(monkeypatch, two_gpus)
    assert main_in_process("doctor", "--gpu") == 1
    assert "1 of 8 wrong: collectives. Paste this table" in capsys.readouterr().out


def test_without_a_gpu_every_row_is_skipped_with_the_reason(monkeypatch, capsys):
    monkeypatch.setenv(VISIBLE, NONE)
    assert main_in_process("doctor", "--gpu") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "0 of 8 checks passed, 8 skipped."
    assert all(f"| {SKIP} | no GPU: {VISIBLE} hides them |" in line for line in lines[2:-2])


def test_one_gpu_has_no_links(two_gpus, monkeypatch):
    monkeypatch.setattr(gpu, "count", lambda: 1)
    assert look_at(LOOKS["links"]).measured == "needs 2 GPUs, but this machine has 1"


def test_the_questions_are_asked_in_a_child(monkeypatch):
    monkeypatch.setitem(gpu.ASK, "versions", "print(torch.__version__)")
    assert gpu.ask("versions") == [torch.__version__]
    monkeypatch.setitem(gpu.ASK, "versions", "raise ValueError('none')")
    with pytest.raises(RuntimeError, match="ValueError: none"):
        gpu.ask("versions")


def test_the_three_ways_on_cpu_ranks(monkeypatch):
    """What the GPUs would train, on two CPU ranks."""
    found = launch(train_in_three_ways, world_size=2, device="cpu", progress=False)[0]
    monkeypatch.setattr(gpu, "losses", lambda: found)
    assert (gpu.fsdp2().passed, gpu.bf16().passed) == (True, True), found


def test_no_cell_breaks_the_table():
    assert gpu.table([Row("a", FAIL, "x|y")])[-1] == "| a | WRONG | x\\|y |"
