"""What is shown: where code comes from, differences that are counted, tables, and the machine."""

import inspect

import launch_workers as workers
import pytest
import torch

from fsdp_helpers import gpus
from fsdp_helpers.gpus import VISIBLE, Gpus, are_hidden, unhide_gpus
from fsdp_helpers.teaching.page import show, this_machine
from fsdp_helpers.training import loop, worker


def test_a_listing_says_file_and_line():
    lines = [inspect.getsourcelines(shown)[1] for shown in (loop.train_step, loop.batch_loss, worker.versions)]
    assert show.source(loop.train_step, loop.batch_loss, worker.versions).caption == (
        f"fsdp_helpers/training/loop.py, lines {lines[0]}, {lines[1]}; fsdp_helpers/training/worker.py, line {lines[2]}"
    )
    assert show.source(workers.return_rank).caption.startswith("launch_workers.py, line ")  # of no package


def first_version(values):
    """Adds."""
    total = 0
    for value in values:
        total += value
    return total


def second_version(values):
    """Adds the squares,

    in two lines.
    """
    total = 0
    for value in values:
        square = value * value
        total += square
    return total


def test_difference(tmp_path):
    """Of two functions, their bodies alone; of two scripts, all of it."""
    shown = show.difference(first_version, second_version)
    assert shown.caption == "From first_version to second_version: 2 lines added, 1 removed."
    assert shown.code.splitlines() == [
        "...",
        " for value in values:",
        "-    total += value",
        "+    square = value * value",
        "+    total += square",
        " return total",
    ]
    before, after = tmp_path / "before.py", tmp_path / "after.py"
    before.write_text("one = 1\ntwo = 2\nthree = 3\n")
    after.write_text("one = 1\ntwo = 2\nthree = 4\nfour = 4\n")
    shown = show.script_difference(str(before), str(after))
    assert shown.caption == "From before.py to after.py: 2 lines added, 1 removed."
    assert shown.code.splitlines() == ["...", " two = 2", "-three = 3", "+three = 4", "+four = 4"]


def test_predictions():
    """A table: numbers to the right, names and formulas to the left."""
    rows = [("held", "16·P", 1_600, 1_604), ("peak", "20·P", 2_000.4, 1_990)]
    assert show.predictions(rows, what="one rank").data.splitlines() == [
        "| one rank | formula | predicted bytes | measured bytes | measured / predicted |",
        "| :-- | :-- | --: | --: | --: |",
        "| held | 16·P | 1,600 | 1,604 | 1.00250 |",
        "| peak | 20·P | 2,000 | 1,990 | 0.99480 |",
    ]
    shown = show.table(["which", "it", "and"], [["a", "4.80 MB", "2 ranks"], ["b", None, "12"]]).data
    assert shown.splitlines()[1] == "| :-- | --: | :-- |"


@pytest.fixture
def machine(monkeypatch):
    """`show.machine` beside simulated GPUs: the device that it returns, and what it shows."""
    monkeypatch.delenv(VISIBLE, raising=False)
    monkeypatch.delenv("FSDP_DEVICE", raising=False)

    def set_up(device, num_ranks, found=Gpus(0), **settings):
        for module in (gpus, this_machine):
            monkeypatch.setattr(module, "find_gpus", lambda num_wanted=0: Gpus(0) if are_hidden() else found)
        shown = []
        monkeypatch.setattr(show, "display", lambda markdown: shown.append(markdown.data))
        monkeypatch.setattr(gpus, "device_name", lambda device: f"a {device}")
        return show.machine(device, num_ranks, **{"data": "Data: the digits."} | settings), shown[0]

    yield set_up
    unhide_gpus()


def test_a_machine_without_gpus(machine, tmp_path, monkeypatch):
    device, shown = machine("cpu", 2)
    assert device == "cpu" and are_hidden()
    assert f"torch {torch.__version__}. 2 ranks on a cpu. Data: the digits." in shown and "GPU" not in shown
    monkeypatch.setenv("FSDP_DATA_DIR", str(tmp_path / "none"))
    assert "1,797 bundled digits, because MNIST couldn't be downloaded" in machine("cpu", 2, data=None)[1]


@pytest.mark.parametrize(
    "found, num_ranks, said",
    [
        (
            Gpus(1),
            2,
            "has 1 idle GPU, but 2 ranks need 2 GPUs, one for each rank. Notebooks 01 and 09 need only one GPU.",
        ),
        (Gpus(2), 2, 'has 2 idle GPUs. To use one for each rank, set `DEVICE = "cuda"` in the settings cell and'),
        (Gpus(1, "The driver is too old"), 2, "stays idle because torch can't use it: The driver is too old."),
    ],
)
def test_idle_gpus_are_mentioned(found, num_ranks, said, machine):
    device, shown = machine("cpu", num_ranks, found)
    assert device == "cpu" and said in shown


def test_the_reader_chooses_the_device(machine, monkeypatch):
    """With the setting, and again with another one; the variable overrides it, unless the device is fixed."""
    assert machine("cpu", 2, Gpus(2))[0] == "cpu" and are_hidden()
    device, shown = machine("cuda", 2, Gpus(2))
    assert device == "cuda" and not are_hidden() and "2 ranks on a cuda" in shown and "idle" not in shown
    monkeypatch.setenv("FSDP_DEVICE", "cuda")
    assert machine("cpu", 2, Gpus(2))[0] == "cuda" and not are_hidden()
    assert machine("cpu", 2, Gpus(2), fixed=True)[0] == "cpu"
    monkeypatch.setenv("FSDP_DEVICE", "cpu")
    device, shown = machine("cuda", 2, Gpus(2))
    assert device == "cpu" and "unset FSDP_DEVICE and run the notebook again" in shown
