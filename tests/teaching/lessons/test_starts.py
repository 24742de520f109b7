"""Each way to start a model gives each rank its shards, in as much memory as is said."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fsdp_helpers.models.series import count_params
from fsdp_helpers.models.shapes import ViTShape
from fsdp_helpers.ranks.launch import launch
from fsdp_helpers.teaching.lessons import starts

SHAPE = ViTShape(image_size=28, channels=1, patch_size=4, width=96, depth=3, num_heads=4, mlp_width=384, num_classes=10)
NUM_TENSORS = 3 * 12 + 2 + 2 + 2  # of the state dict: three blocks, patches, norm, head; the waves are in none


def started(way: str, *path: str, world_size: int = 2) -> list[starts.StartRecord]:
    return launch(starts.measure_start, way, SHAPE, *path, world_size=world_size, device="cpu", progress=False)


@pytest.fixture(scope="module")
def sizes() -> dict[str, int]:
    """In bytes: the model, a rank's half, the buffer, a block, the largest layer, its weight."""
    with torch.device("meta"):
        model = starts.WaveViT(SHAPE)
    layers = [sum(own.numel() for own in layer.parameters(recurse=False)) for layer in model.modules()]
    return {
        "model": 4 * count_params(model),
        "shards": 2 * count_params(model),
        "buffer": model.positions.nbytes,
        "block": 4 * count_params(model.blocks[0]),
        "layer": 4 * max(layers),
        "tensor": 4 * max(own.numel() for own in model.parameters()),
    }


def test_whole_and_then_sharded(sizes):
    for record in started("whole, then sharded"):
        # the whole model, and the first block's shards, before that block is let go
        assert record.curve.peak_bytes == sizes["model"] + sizes["buffer"] + sizes["block"] // 2
        assert record.num_equal == record.num_tensors == NUM_TENSORS
        assert record.buffers_right


def test_layer_by_layer_is_a_plain_start_that_is_never_whole(sizes):
    for record in started("on meta, layer by layer"):
        copied = sizes["tensor"] // 2
        assert record.curve.peak_bytes == sizes["shards"] + sizes["buffer"] + sizes["layer"] + copied
        assert record.shards_bytes == sizes["shards"]
        assert record.num_equal == record.num_tensors == NUM_TENSORS
        assert record.buffers_right


def test_own_shards_are_drawn_in_place(sizes, capfd):
    for record in started("on meta, own shards drawn"):
        assert record.curve.peak_bytes < 1.2 * sizes["shards"] + sizes["buffer"]
        # Constants are equal: weight and bias of seven norms
        assert record.num_equal == 2 * 7
        assert record.buffers_right
    assert "Warning" not in capfd.readouterr().err


def test_rank_0_has_it_all_and_the_others_a_tensor(sizes):
    first, second = started("on meta, sent by rank 0")
    assert first.curve.peak_bytes > sizes["model"] + sizes["shards"]
    assert second.curve.peak_bytes < sizes["shards"] + sizes["buffer"] + 1.1 * sizes["tensor"]
    assert first.num_equal == second.num_equal == NUM_TENSORS
    assert first.buffers_right and second.buffers_right


def test_fsdp1_unit_by_unit(sizes):
    for record in started("on meta, FSDP1 unit by unit"):
        assert record.curve.peak_bytes < sizes["shards"] + sizes["buffer"] + 2 * sizes["block"]
        assert record.buffers_right


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("pretrained")
    torch.manual_seed(starts.SEED)
    state = starts.WaveViT(SHAPE).state_dict()
    torch.save(state, folder / "model.pt")
    save_file(state, folder / "model.safetensors")
    return {"sent by rank 0": str(folder / "model.pt"), "own rows": str(folder / "model.safetensors")}


@pytest.mark.parametrize("way", ["sent by rank 0", "own rows"])
def test_from_a_file_on_three_ranks(way, files, sizes):
    """Three ranks: rows that do not divide, and positions of ranks that have none."""
    for rank, record in enumerate(started(f"from a file, {way}", files[way], world_size=3)):
        assert record.num_equal == record.num_tensors == NUM_TENSORS
        assert record.buffers_right
        if way == "own rows" or rank > 0:  # else the mapped file counts
            kept = sizes["model"] / 3 + sizes["buffer"]
            passing = 3 * sizes["buffer"] if way == "own rows" else 1.1 * sizes["tensor"]  # while the buffer is filled
            assert record.curve.peak_bytes < 1.01 * kept + passing


@pytest.mark.long
@pytest.mark.parametrize("way", ["on meta, layer by layer", "on meta, sent by rank 0"])
def test_a_plain_start_on_three_ranks(way):
    assert [record.num_equal for record in started(way, world_size=3)] == [NUM_TENSORS] * 3


def test_children_come_before_their_parent():
    model = nn.Sequential(nn.Sequential(nn.Linear(1, 1), nn.ReLU()), nn.Linear(1, 1))
    assert [name for name, _ in starts.in_order_of_construction(model)] == ["0.0", "0.1", "0", "1", ""]


def test_the_waves_are_no_parameter_and_in_no_state_dict():
    model = starts.WaveViT(SHAPE)
    assert "positions" not in model.state_dict() and "positions" not in dict(model.named_parameters())
    assert model.positions.abs().max() <= 1 and model.positions[0, 0].abs().max() == 0
    assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
