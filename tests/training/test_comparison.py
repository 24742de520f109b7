import json
import os
from dataclasses import replace

import pytest
from leftovers import PROJECT
from runs import main_in_process, tiny_record

from fsdp_helpers.config import APIS, STRATEGIES, TrainConfig, is_sharded
from fsdp_helpers.records import ComparisonRow
from fsdp_helpers.training.comparison import (
    SHORT_HEADERS,
    comparison_cells,
    comparison_configs,
    comparison_row,
    plain_table,
    why_left_out,
)

# Every strategy, DDP also with its gradients in the buckets, FSDP with both APIs
LABELS = {name: [f"{name} ({api})" for api in APIS] if is_sharded(name) else [name] for name in STRATEGIES}
LABELS["ddp"].append("ddp, lean")
ON_CUDA = [label for labels in LABELS.values() for label in labels]
ON_CPU = [label for label in ON_CUDA if label != "fsdp-offload (fsdp1)"]
KEPT = PROJECT / "notebooks" / "reference" / "compare-cpu.json"


def row_of(config: TrainConfig) -> ComparisonRow:
    """Its row before anything is measured."""
    numbers = {"world_size": 2, "step_s": 0.0123, "held_bytes": 9_600_000, "peak_bytes": 23_500_000}
    numbers |= {"moved_bytes": 9_600_000, "final_loss": 0.83317}
    api = config.api if config.is_sharded else None
    which = {"model": config.model, "strategy": config.strategy, "api": api, "bucket_view": config.bucket_view}
    return ComparisonRow(**which, **numbers)


@pytest.mark.parametrize("device, labels", [("cpu", ON_CPU), ("cuda", ON_CUDA)])
def test_what_runs_where(device, labels):
    assert [row_of(config).label for config in comparison_configs(["shallow"], TrainConfig(), device)] == labels


def test_the_kept_record_has_its_rows():
    rows = [ComparisonRow(**row) for row in json.loads(KEPT.read_text())["rows"]]
    assert {"local", "ddp", "fsdp (fsdp2)"} <= {row.label for row in rows}


def test_why_one_is_left_out():
    config = TrainConfig(strategy="fsdp-offload", api="fsdp1")
    assert "pinning needs an accelerator" in why_left_out(config, "cpu")
    assert why_left_out(config, "cuda") is None


def test_the_median_is_that_of_the_steady_steps():
    # Three steps warm up. Of 4, 1 and 2 s the median is 2 s; with the warm-up it would be 7 s.
    record = replace(tiny_record(), step_seconds=(10.0, 11.0, 12.0, 4.0, 1.0, 2.0))
    assert comparison_row(record).step_s == 2.0


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
        sent_bytes=4_810_000,
        final_loss=0.83317,
    )
    header, line = plain_table([row]).splitlines()
    assert len(header) == len(line)
    assert header.split() == " ".join(SHORT_HEADERS).split()
    assert line.startswith("shallow fsdp (fsdp1) ") and line.endswith("0.8332")
    assert [text in line for text in ("12.3 ms", "9.60 MB", "23.5 MB", "4.81 MB")] == [True] * 4


def test_a_record_from_before_sent_bytes_still_loads():
    kept = json.loads(KEPT.read_text())
    rows = [
        ComparisonRow(**{name: value for name, value in row.items() if name != "sent_bytes"}) for row in kept["rows"]
    ]
    assert len(plain_table(rows).splitlines()) == 1 + len(rows)
    assert all(comparison_cells(row)[6] == "?" for row in rows)


def test_the_table_fits_a_terminal():
    sizes = {"held_bytes": 88_800_000, "peak_bytes": 88_800_000, "moved_bytes": 88_800_000, "sent_bytes": 88_800_000}
    longest = {"model": "vit-deep", "strategy": "fsdp-auto-wrap", "api": "fsdp2", "world_size": 16}
    row = ComparisonRow(**longest, **sizes, step_s=0.0888, final_loss=2.3333)
    assert {len(line) for line in plain_table([row]).splitlines()} == {80}


def test_the_pictures_of_the_readme_are_small():
    images = PROJECT / "notebooks" / "images"
    assert sum(path.stat().st_size for path in (PROJECT / "README.md", *images.iterdir())) < 2_000_000


def test_the_command(digits_dir, tmp_path, monkeypatch, capfd):
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    arguments = ["compare", "--models", "shallow", "--steps", 4, "--device", "cpu", "--data-dir", digits_dir]
    assert main_in_process(*arguments, "--json", tmp_path / "table.json") == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].split() == " ".join(SHORT_HEADERS).split()
    assert [label for label in ON_CPU if not any(f" {label} " in line for line in lines)] == []
    content = json.loads((tmp_path / "table.json").read_text())
    assert content.keys() == {"device", "device_name", "finished", "versions", "rows"}
    rows = content["rows"]
    assert len(rows) == len(lines) - 1 == len(ON_CPU)
    assert [row["world_size"] for row in rows] == [1] + [2] * len(rows[1:])
    # The first has one process's dropout; the others draw the same masks
    assert [row["final_loss"] for row in rows[1:]] == pytest.approx([rows[1]["final_loss"]] * len(rows[1:]), abs=1e-5)
    assert all(row["step_s"] > 0 and row["peak_bytes"] > row["held_bytes"] > 0 for row in rows)
    by_label = dict(zip(ON_CPU, rows, strict=True))
    expected = {
        # one process sends nothing; DDP moves 4 x 1,199,882 bytes once, FSDP as one unit twice; on two ranks each sends
        # half of what it moves in a half of an all-reduce, all of it in a whole one. And 16 P are held in one process,
        # 4 P more in DDP's buckets, unless its gradients lie in them, 16 P / 2 sharded
        "local": (0, 0, 16),
        "ddp": (4_799_528, 4_799_528, 20),
        "ddp, lean": (4_799_528, 4_799_528, 16),
        "fsdp (fsdp1)": (9_599_056, 4_799_528, 8),
        "fsdp (fsdp2)": (9_599_056, 4_799_528, 8),
    }
    for label, (moved_bytes, sent_bytes, bytes_a_parameter) in expected.items():
        row = by_label[label]
        assert (row["moved_bytes"], row["sent_bytes"]) == (moved_bytes, sent_bytes), label
        assert row["held_bytes"] == pytest.approx(bytes_a_parameter * 1_199_882, rel=1e-3), label
    assert by_label["fsdp-auto-wrap (fsdp1)"]["sent_bytes"] == 7_159_080
    assert by_label["ddp, lean"]["peak_bytes"] < by_label["ddp"]["peak_bytes"]
    assert by_label["ddp, lean"]["final_loss"] == by_label["ddp"]["final_loss"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cwd", "no-mnist", "table.json"]
    assert os.listdir(tmp_path / "cwd") == []


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--models", "huge"], "huge"),
        (["--steps", "3"], "--steps 3: the first 3 steps aren't timed; use 4 or more"),
        (["--world-size", "3"], "64 isn't divisible by world_size 3"),
        (["--json", "no-such-folder/table.json"], "no-such-folder doesn't exist"),
        (["--json", "."], "is a folder; give a file"),
        (["--device", "cuda", "--world-size", "64"], "64 CUDA devices"),
    ],
)
def test_bad_input(arguments, message, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "fsdp_helpers.ranks.launch.Processes", lambda *args, **settings: pytest.fail("a rank was started")
    )
    assert main_in_process("compare", *arguments, "--data-dir", "data") == 2
    output = capfd.readouterr()
    assert len(output.err.splitlines()) == 1, output.err
    assert message in output.err
    assert output.out == ""
    assert os.listdir(tmp_path) == []
