import json
import math
import os

import pytest
from runs import main_in_process

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.records import ComparisonRow
from fsdp_helpers.training.compare import HEADERS, comparison_configs, left_out, plain_table

LABELS = ["local", "ddp", "fsdp (fsdp1)", "fsdp (fsdp2)", "fsdp-auto-wrap (fsdp1)", "fsdp-auto-wrap (fsdp2)"]


def test_what_runs_where():
    on_cpu, on_cuda = (
        [
            (config.strategy, config.api if config.strategy.startswith("fsdp") else None)
            for config in comparison_configs(["shallow"], TrainConfig(), device)
        ]
        for device in ("cpu", "cuda")
    )
    assert on_cuda == [
        ("local", None),
        ("ddp", None),
        *[(strategy, api) for strategy in ("fsdp", "fsdp-auto-wrap", "fsdp-offload") for api in ("fsdp1", "fsdp2")],
    ]
    assert set(on_cuda) - set(on_cpu) == {("fsdp-offload", "fsdp1")}


def test_why_one_is_left_out():
    config = TrainConfig(strategy="fsdp-offload", api="fsdp1")
    assert "pinning needs an accelerator" in left_out(config, "cpu")
    assert left_out(config, "cuda") is None


def test_the_models_one_after_the_other():
    models = [config.model for config in comparison_configs(["shallow", "deep"], TrainConfig(), "cpu")]
    assert models == ["shallow"] * 7 + ["deep"] * 7


def test_the_table_is_straight():
    row = ComparisonRow(
        model="shallow",
        strategy="fsdp",
        api="fsdp1",
        world_size=2,
        step_s=0.0123,
        held_bytes=9_600_000,
        peak_bytes=23_500_000,
        moved_bytes=9_600_000,
        final_loss=0.83317,
    )
    header, line = plain_table([row]).splitlines()
    assert len(header) == len(line)
    assert header.split() == " ".join(HEADERS).split()
    assert line.startswith("shallow  fsdp (fsdp1)  ") and line.endswith("0.8332")
    assert "12.3 ms" in line and "9.60 MB" in line and "23.5 MB" in line


def test_the_command(run_cli, digits_dir, tmp_path):
    arguments = ["compare", "--models", "shallow", "--steps", 4, "--device", "cpu", "--data-dir", digits_dir]
    done = run_cli(*arguments, "--json", tmp_path / "table.json", "--figure", tmp_path / "table.png", offline=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split() == " ".join(HEADERS).split()
    assert [any(f" {label} " in line for line in lines) for label in [*LABELS, "fsdp-offload (fsdp2)"]] == [True] * 7
    content = json.loads((tmp_path / "table.json").read_text())
    assert content.keys() == {"device", "device_name", "finished", "versions", "rows"}
    rows = content["rows"]
    assert len(rows) == len(lines) - 1 == 7
    assert [row["world_size"] for row in rows] == [1, 2, 2, 2, 2, 2, 2]
    # The first has one process's dropout; the others draw the same masks
    assert [row["final_loss"] for row in rows[1:]] == pytest.approx([rows[1]["final_loss"]] * 6, abs=1e-5)
    assert all(row["step_s"] > 0 and row["peak_bytes"] > row["held_bytes"] > 0 for row in rows)
    # one process sends nothing; DDP 4 x 1,199,882 bytes once, FSDP as one unit twice
    assert [row["moved_bytes"] for row in rows[:4]] == [0, 4_799_528, 9_599_056, 9_599_056]
    assert (tmp_path / "table.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cwd", "no-mnist", "table.json", "table.png"]
    assert os.listdir(tmp_path / "cwd") == []


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--models", "huge"], "huge"),
        (["--steps", "3"], "--steps 3: the first 3 are not timed, give 4 or more"),
        (["--world-size", "0"], "world_size is 0"),
        (["--world-size", "3"], "64 does not divide by world_size 3"),
        (["--global-batch-size", "0"], "global_batch_size is 0"),
        (["--figure", "table.txt"], "choose a name that ends in one of .png, .svg, .pdf"),
        (["--figure", "no-such-folder/table.png"], "no-such-folder does not exist"),
        (["--json", "no-such-folder/table.json"], "no-such-folder does not exist"),
        (["--json", "."], "is a folder; give a file"),
        (["--device", "cuda", "--world-size", "64"], "64 CUDA devices"),
    ],
)
def test_bad_input(arguments, message, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fsdp_helpers.ranks.launch._start_rank", lambda *args: pytest.fail("a rank was started"))
    assert main_in_process("compare", *arguments, "--data-dir", "data") == 2
    output = capfd.readouterr()
    assert len(output.err.splitlines()) == 1, output.err
    assert message in output.err
    assert output.out == ""
    assert os.listdir(tmp_path) == []


@pytest.mark.long
def test_more_steps_than_an_epoch_has(digits_dir, tmp_path, capfd):
    # 1,437 digits in batches of 512 are 2 steps an epoch: the fourth step is in the second epoch
    arguments = ["compare", "--models", "simple", "--steps", 4, "--global-batch-size", 512, "--device", "cpu"]
    assert main_in_process(*arguments, "--data-dir", digits_dir, "--json", tmp_path / "t.json") == 0, capfd.readouterr()
    assert all(math.isfinite(row["step_s"]) for row in json.loads((tmp_path / "t.json").read_text())["rows"])
