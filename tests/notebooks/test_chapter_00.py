"""Notebook 00: its cells for the ranks run twice, and the model is shared by `fully_shard` alone."""

import pytest
from chapters import Chapter


@pytest.fixture(scope="module")  # its temporary folder has a short name, as the sockets in it need
def chapter(tmp_path_factory):
    with Chapter("00", tmp_path_factory.mktemp("00") / "notebooks") as chapter:
        chapter.run_all(chapter.set_up_cells())
        chapter.run_twice(chapter.ranks_cells())
        yield chapter


@pytest.mark.long
def test_each_rank_keeps_its_shard(chapter):
    assert len(chapter.twice) == 2 and chapter.others() == []
    assert chapter.value("sum(ranks['kept']) == ranks['num_parameters'][0]") is True
    line = "fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))\n"
    source = chapter.source("first-sharded", {"first-sharded": (line, "")})
    chapter.execute(source.replace("parameter.to_local().numel()", "parameter.numel()"))
    assert chapter.value("sum(ranks['kept']) == 2 * ranks['num_parameters'][0]") is True
