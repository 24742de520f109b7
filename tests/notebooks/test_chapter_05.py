"""Chapter 05 with lines of its cells changed: without the policy no copy is asked for."""

import pytest
from chapters import Chapter

CELLS = ["offloaded", "train", "offload-fsdp1", "copies"]
TO_DEVICE, TO_HOST = "to the device", "to the host"


@pytest.fixture(scope="module")
def chapter(tmp_path_factory):
    with Chapter("05", tmp_path_factory.mktemp("chapter") / "05") as chapter:
        chapter.run_all([*chapter.set_up_cells(), "offloaded", "train", "copies"])
        yield chapter


def copies(chapter) -> dict[str, int]:
    chapter.run("copies-figure")
    ways = chapter.value("[copy.way for copy in copies if copy.name == 'blocks.1.linear1.weight']")
    return {way: ways.count(way) for way in (TO_DEVICE, TO_HOST)}


@pytest.mark.long
def test_a_cell_run_again_gives_the_same_output(chapter):
    assert chapter.ranks_cells() == CELLS
    chapter.run_twice(CELLS)
    assert chapter.others() == []


def test_a_blocks_shard_goes_to_the_device_twice_and_its_gradient_comes_back_once(chapter):
    assert copies(chapter) == {TO_DEVICE: 2, TO_HOST: 1}
    chapter.run("copied")
    assert chapter.value("there == sum(sizes.values()) + in_blocks and back == sum(sizes.values())")


@pytest.mark.parametrize(
    "change, expected",
    [
        (
            {"offloaded": ("fully_shard(block, mesh=mesh, offload_policy=policy)", "fully_shard(block, mesh=mesh)")},
            {TO_DEVICE: 0, TO_HOST: 0},
        ),
        (
            {
                "offloaded": (
                    "fully_shard(block, mesh=mesh, offload_policy=policy)",
                    "fully_shard(block, mesh=mesh, offload_policy=policy, reshard_after_forward=False)",
                )
            },
            {TO_DEVICE: 1, TO_HOST: 1},
        ),
    ],
    ids=["blocks without the policy", "blocks that stay unsharded"],
)
def test_the_copies_follow_the_policy_and_the_units(chapter, change, expected):
    try:
        chapter.run_all(["offloaded", "copies"], change)
        assert copies(chapter) == expected
    finally:
        chapter.run_all(["offloaded", "copies"])


def test_fsdp1_offloads_only_where_memory_can_be_pinned(chapter):
    """On the CPU it is refused; without the argument it is not."""
    chapter.run("offload-fsdp1")
    assert all(chapter.value("ranks['refused']"))
    try:
        chapter.run("offload-fsdp1", {"offload-fsdp1": ("cpu_offload=CPUOffload(offload_params=True), ", "")})
        assert chapter.value("ranks['refused']") == ["", ""]
    finally:
        chapter.run("offload-fsdp1")
