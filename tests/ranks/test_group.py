import socket

import pytest
import torch
import torch.distributed as dist

from fsdp_helpers.ranks import group


@pytest.mark.parametrize(
    "ranks_here, ranks_elsewhere, expected",
    [
        (1, 0, 8),
        (2, 2, 4),  # 8 cores for the two ranks of this machine; the other machine has cores of its own
        (3, 5, 2),  # 8 // 3
        (16, 0, 1),  # never none
    ],
)
def test_a_rank_gets_its_share_of_its_own_machine(ranks_here, ranks_elsewhere, expected, monkeypatch):
    def all_gather_object(hosts, own):
        hosts[:] = [own] * ranks_here + ["elsewhere"] * ranks_elsewhere

    shares = []
    monkeypatch.setattr(dist, "get_world_size", lambda: ranks_here + ranks_elsewhere)
    monkeypatch.setattr(dist, "all_gather_object", all_gather_object)
    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    monkeypatch.setattr(group, "num_cores", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", shares.append)
    group.share_cores()
    assert shares == [expected]
