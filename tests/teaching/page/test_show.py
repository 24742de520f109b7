"""What is shown: code that can be copied, differences that are counted, tables."""

import inspect
import subprocess
import sys

import launch_workers as workers
import pytest
import torch

from fsdp_helpers import gpus
from fsdp_helpers.checkpointing import folder, training_state
from fsdp_helpers.gpus import VISIBLE, Gpus, are_hidden, unhide_gpus
from fsdp_helpers.models import series as models
from fsdp_helpers.models.vit import Attention, Block
from fsdp_helpers.planning.walk.ledger import Peak, Term
from fsdp_helpers.sharding import strategies
from fsdp_helpers.sharding.wrapping import size_policy
from fsdp_helpers.teaching.lessons import saving_and_resuming
from fsdp_helpers.teaching.lessons.many_machines import add_up_without
from fsdp_helpers.teaching.page import show, this_machine
from fsdp_helpers.training import loop, worker


def test_source_of_functions_and_methods():
    shown = show.source(size_policy, Block.forward, add_up_without)
    assert shown.code.startswith("from collections.abc import Set\n")
    assert "\n\n\ndef size_policy(min_num_params: int, tied: Set[nn.Module] = frozenset()) -> Policy:\n" in shown.code
    assert (
        "\n\n\ndef forward(self, tokens: Tensor) -> Tensor:\n    " in shown.code
    )  # a method starts at the left margin
    assert shown.code.endswith("return total.item()\n")


def test_a_listing_says_file_and_line():
    lines = [inspect.getsourcelines(shown)[1] for shown in (loop.train_step, loop.batch_loss, worker.versions)]
    assert show.source(loop.train_step, loop.batch_loss, worker.versions).caption == (
        f"fsdp_helpers/training/loop.py, lines {lines[0]}, {lines[1]}; fsdp_helpers/training/worker.py, line {lines[2]}"
    )
    assert show.source(workers.return_rank).caption.startswith("launch_workers.py, line ")  # of no package
    assert "test_show.py, line " in show.source(decorated).caption


@torch.no_grad()
def decorated():
    pass


def test_the_imports_are_those_that_the_code_needs():
    # `total` and `rank` are its own, `int` is Python's, `nn` and others are imported by the module and not used here
    assert show.needed_imports(add_up_without) == (
        "import os\nimport signal\nimport torch\nimport torch.distributed as dist\n"
    )


def test_what_a_module_defines_itself_is_imported_from_it_unless_it_is_shown():
    of_module = "from fsdp_helpers.models.vit import Attention\n"
    assert of_module in show.needed_imports(Block)
    assert of_module not in show.needed_imports(Block, Attention)
    # a constant, and an alias of a type
    assert "loop import Batches, layer_by_layer\n" in show.needed_imports(loop.evaluate)
    assert show.needed_imports(needs_nothing) == ""


def needs_nothing(value):
    """Needs nothing: a name inside a comprehension is its own."""
    return sum(value * part for part in range(3))


LISTINGS = [
    (worker.train_epochs,),
    (loop.train_step, loop.add_up_gradients, loop.batch_loss, loop.train_one_epoch),
    (strategies.shard_with_api, strategies.shard_fsdp1, strategies.shard_fsdp2),
    (training_state.save_full, training_state.gather_on_rank_0),
    (saving_and_resuming.resume_without, saving_and_resuming.train_and_be_killed),
    (folder.commit, folder.sync_folder),
    (Attention, Block),
    (models.ShallowNet, models.DeepNet),
]


@pytest.mark.parametrize("objects", LISTINGS, ids=lambda objects: objects[0].__name__)
def test_what_is_shown_can_be_copied(objects):
    """It runs where nothing else is defined; no name in it is unknown, and none is imported for nothing."""
    copied = show.source(*objects).code
    names = {"__name__": "copied"}
    exec(copied, names)
    assert all(thing.__name__ in names for thing in objects)
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F", "-"]
    done = subprocess.run(ruff, input=copied, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


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


def test_difference():
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


def test_difference_of_scripts(tmp_path):
    before, after = tmp_path / "before.py", tmp_path / "after.py"
    before.write_text("one = 1\ntwo = 2\nthree = 3\n")
    after.write_text("one = 1\ntwo = 2\nthree = 4\nfour = 4\n")
    shown = show.script_difference(str(before), str(after))
    assert shown.caption == "From before.py to after.py: 2 lines added, 1 removed."
    assert shown.code.splitlines() == ["...", " two = 2", "-three = 3", "+three = 4", "+four = 4"]


def test_predictions():
    rows = [("held", "16·P", 1_600, 1_604), ("peak", "20·P", 2_000.4, 1_990)]
    assert show.predictions(rows, what="one rank").data.splitlines() == [
        "| one rank | formula | predicted bytes | measured bytes | measured / predicted |",
        "| :-- | :-- | --: | --: | --: |",
        "| held | 16·P | 1,600 | 1,604 | 1.00250 |",
        "| peak | 20·P | 2,000 | 1,990 | 0.99480 |",
    ]


def test_the_terms_of_a_peak_add_up():
    shards = Term(kind="parameters", name="shards", values=200, ranks=2)  # 4 x 200 / 2 = 400 bytes
    unit = Term(kind="gathered", name="fc1", values=25)
    peak = Peak(when="backward", terms=(shards, unit))
    lines = show.peak_terms(peak, 510).data.splitlines()
    assert lines[0] == "| at the peak: backward | formula | bytes |"
    assert lines[-2:] == ["| **sum** |  | **500** |", "| measured | ratio 1.0200 | 510 |"]
    assert len(lines) == 6  # two terms between the head and the sum


def test_table():
    shown = show.table(["strategy", "MB", "ratio"], [["ddp", 24.0, 1.0], ["fsdp", 9.6, None]])
    assert shown.data.splitlines() == [
        "| strategy | MB | ratio |",
        "| :-- | --: | --: |",
        "| ddp | 24.0 | 1.0 |",
        "| fsdp | 9.6 | None |",
    ]


@pytest.mark.parametrize(
    "cells, side",
    [
        (["1,024", "7", "-"], "--:"),
        (["4.80 MB", "-3 %", "1.2e-07", "≤ 2.5 ms", "**500**"], "--:"),
        (["16·P", "4·P"], ":--"),
        (["12", "none"], ":--"),
        (["[64, 9216]"], ":--"),
        (["-", ""], ":--"),
        (["2 ranks"], ":--"),
    ],
)
def test_numbers_are_to_the_right_and_text_to_the_left(cells, side):
    shown = show.table(["which", "it"], [[place, cell] for place, cell in enumerate(cells)])
    assert shown.data.splitlines()[1] == f"| :-- | {side} |"


@pytest.fixture
def machine(monkeypatch):
    """`show.machine` beside imagined GPUs: the device that it returns, and what it shows."""
    monkeypatch.delenv(VISIBLE, raising=False)
    monkeypatch.delenv("FSDP_DEVICE", raising=False)

    def set_up(device, num_ranks, found=Gpus(0), **settings):
        for module in (gpus, this_machine):
            monkeypatch.setattr(module, "find_gpus", lambda wanted=0: Gpus(0) if are_hidden() else found)
        shown = []
        monkeypatch.setattr(show, "display", lambda markdown: shown.append(markdown.data))
        monkeypatch.setattr(gpus, "device_name", lambda device: f"a {device}")
        return show.machine(device, num_ranks, **{"data": "Data: the digits."} | settings), shown[0]

    yield set_up
    unhide_gpus()


def test_machine(machine):
    device, shown = machine("cpu", 2)
    assert device == "cpu" and are_hidden()
    assert f"torch {torch.__version__}. 2 rank(s) on a cpu. Data: the digits." in shown
    assert "GPU" not in shown


def test_the_data_are_prepared(machine, tmp_path, monkeypatch):
    monkeypatch.setenv("FSDP_DATA_DIR", str(tmp_path / "none"))
    assert "1,797 bundled digits, because MNIST couldn't be downloaded" in machine("cpu", 2, data=None)[1]


@pytest.mark.parametrize(
    "found, num_ranks, said",
    [
        (Gpus(1), 2, "This machine has 1 GPU, idle here: 2 ranks need 2, one each. Notebook 01, with one process,"),
        (
            Gpus(2),
            2,
            'This machine has 2 GPUs, idle here: to use one for each rank, set `DEVICE = "cuda"` in the settings',
        ),
        (
            Gpus(1),
            1,
            'This machine has 1 GPU, idle here: to use one, set `DEVICE = "cuda"` in the settings cell and',
        ),
        (Gpus(1, "The driver is too old"), 2, "stays idle because torch can't use it: The driver is too old."),
    ],
)
def test_idle_gpus_are_mentioned(found, num_ranks, said, machine):
    device, shown = machine("cpu", num_ranks, found)
    assert device == "cpu" and said in shown


def test_a_variable_overrides_the_device(machine, monkeypatch):
    monkeypatch.setenv("FSDP_DEVICE", "cuda")
    assert machine("cpu", 2, Gpus(2))[0] == "cuda" and not are_hidden()
    assert machine("cpu", 2, Gpus(2), fixed=True)[0] == "cpu"
    monkeypatch.setenv("FSDP_DEVICE", "cpu")
    device, shown = machine("cuda", 2, Gpus(2))
    assert device == "cpu" and "unset FSDP_DEVICE and run the notebook again" in shown


def test_a_device_that_is_chosen_anew(machine):
    assert machine("cpu", 2, Gpus(2))[0] == "cpu" and are_hidden()
    device, shown = machine("cuda", 2, Gpus(2))
    assert device == "cuda" and not are_hidden()
    assert "2 rank(s) on a cuda" in shown and "idle" not in shown


@pytest.mark.parametrize(
    "found, problem",
    [
        (Gpus(1), "2 ranks need 2 CUDA devices, but this machine has 1; use device 'cpu', or fewer ranks"),
        (Gpus(2, "the driver is too old"), r"torch can't use this machine's GPU \(the driver is too old\)"),
    ],
)
def test_cuda_without_the_gpus_for_it_is_refused(found, problem, machine):
    with pytest.raises(ValueError, match=problem):
        machine("cuda", 2, found)


def test_side_by_side():
    shown = show.side_by_side(show.table, show.script)
    assert [listing.code.splitlines()[0].split("(")[0] for listing in shown.listings] == ["def table", "def script"]
    assert shown._repr_html_().count("<pre") == 2 and "def script(" in repr(shown)
