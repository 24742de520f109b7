"""What notebook 08 shows about a real model holds on small ones."""

import shutil
from dataclasses import replace

import pytest
import torch
from clipping_workers import clip_by_the_package

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.models.shapes import VIT_SHAPES
from fsdp_helpers.ranks.launch import launch
from fsdp_helpers.teaching.lessons import real_model
from fsdp_helpers.teaching.lessons.probes import norms_of_a_gradient

SHAPE = VIT_SHAPES["vit-mnist"]


@pytest.fixture
def config(digits_dir) -> TrainConfig:
    return TrainConfig(model="vit-mnist", global_batch_size=8, max_steps=3, data_dir=str(digits_dir))


def on_ranks(worker, *args, world_size=2, timeout_s=240):
    return launch(worker, *args, world_size=world_size, device="cpu", timeout_s=timeout_s, progress=False)


@pytest.fixture
def alone(config) -> list[float]:
    return on_ranks(real_model.losses_unsharded, config, world_size=1)[0]


def test_three_ways_to_the_same_units():
    (units, *others) = on_ranks(real_model.cut_by_class, SHAPE)[0].values()
    assert units == ["root", *(f"blocks.{index}" for index in range(4))]
    assert others == [units, units]


def test_gathers_come_as_early_as_they_are_asked_for(capfd):
    orders = {ahead: on_ranks(real_model.order_of_forward, SHAPE, ahead)[0] for ahead in (0, 2)}
    assert orders[0] == [f"{kind} {index}" for index in range(4) for kind in ("gather", "compute")]
    first = ["gather 0", "gather 1", "gather 2", "compute 0", "gather 3", "compute 1"]
    assert orders[2] == [*first, "compute 2", "compute 3"]
    assert capfd.readouterr().err == ""


@pytest.mark.long
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_compiled_blocks_learn_the_same(backend, config, alone, capfd, monkeypatch, tmp_path):
    if backend == "inductor" and not shutil.which("g++"):
        pytest.skip("there is no C++ compiler")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    found = on_ranks(real_model.losses_compiled, config, backend, timeout_s=280)[0]
    assert found == pytest.approx(alone, abs=1e-5)
    assert list(tmp_path.glob("inductor/**/*.so")) != [] or backend == "eager"  # machine code, not a way around it
    assert capfd.readouterr().err == ""


def test_in_two_dimensions_they_learn_the_same(config, alone, capfd):
    for losses, parameters, counts in on_ranks(real_model.train_in_two_dimensions, config, world_size=4):
        assert losses == pytest.approx(alone, abs=1e-5)
        # Rows by both, or columns by the one and rows by the other: 192 x 64 / 4 and 64 x 64 / (2 x 2)
        shapes = {name: (whole, own) for name, _, whole, own in parameters}
        assert shapes["attention.qkv.weight"] == ([192, 64], [48, 64])
        assert shapes["attention.out.weight"] == ([64, 64], [32, 32])
        # Two in forward and two in backward, in each of four blocks; FSDP has five units
        assert (counts["all_reduce"], counts["_allgather_base_"], counts["_reduce_scatter_base_"]) == (16, 9, 5)
    warnings = [line for line in capfd.readouterr().err.splitlines() if "Warning" in line]
    if torch.__version__.startswith("2.11"):  # which says this of its own hooks
        warnings = [line for line in warnings if "Full backward hook" not in line]
    assert warnings == []


def test_clipping_in_two_dimensions_finds_the_norm_of_one_process(config, capfd):
    """By the package; torch's function cannot, as 15 shows."""
    ((_, one),) = on_ranks(norms_of_a_gradient, replace(config, strategy="local"), world_size=1)
    for norm, afterward in on_ranks(clip_by_the_package, config, 0.1, world_size=4):
        assert norm == pytest.approx(one, rel=1e-5)
        assert afterward == pytest.approx(0.1, rel=1e-4)
    said = capfd.readouterr().err
    assert "Warning" not in said and "suboptimal" not in said
