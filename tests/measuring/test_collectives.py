import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import workers_for_tests as workers

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.measuring import collectives
from fsdp_helpers.measuring.collectives import trace_collectives
from fsdp_helpers.ranks.group import gather_over_ranks, sum_over_ranks
from fsdp_helpers.ranks.launch import launch
from fsdp_helpers.records import CollectiveCount
from fsdp_helpers.training.worker import train_worker


def test_every_collective_is_counted_with_its_full_bytes_and_what_the_rank_sends():
    # 4 bytes a value, three ranks. Full tensors: all_reduce of 3 and of 7 values, 40 bytes in all, to be sent at
    # 2 x 2 / 3 of each: 16 + 37.3 = 53
    # all_gather of 1 value a rank and of 2: 12 + 24 bytes, of which every rank sends 2 / 3
    # reduce_scatter of 3 values to 1 a rank: 12; broadcasts of 5 values from rank 0 and of 6 from rank 1: 44
    for rank, counts in enumerate(launch(workers.trace_one_of_each, world_size=3, device="cpu")):
        broadcast = {0: 20, 1: 24}.get(rank, 0)  # the full tensor from its source, nothing from the others
        assert counts == (
            CollectiveCount(op="all_reduce", count=2, bytes=40, sent_bytes=53),
            CollectiveCount(op="all_gather", count=2, bytes=36, sent_bytes=24),
            CollectiveCount(op="reduce_scatter", count=1, bytes=12, sent_bytes=8),
            CollectiveCount(op="broadcast", count=2, bytes=44, sent_bytes=broadcast),
            # 1 value a rank to and from rank 1: who is no root sees its own part only
            CollectiveCount(op="gather", count=1, bytes=12, sent_bytes=4 if rank != 1 else 0),
            CollectiveCount(op="scatter", count=1, bytes=12, sent_bytes=0 if rank != 1 else 8),
            # Of 8 bytes within ranks 0 and 1: each sends 2 (2 - 1) / 2 of them, whatever the number of all ranks
            *([CollectiveCount(op="pair", count=1, bytes=8, sent_bytes=8)] if rank < 2 else []),
        )


def test_functional_collectives_are_counted_too():
    # Three ranks. Rows of 3 values, 12 bytes: a full tensor of 6 rows has 72, of which 2/3 are sent, or 4/3 to sum them
    for rank, found in enumerate(launch(workers.trace_functional, world_size=3, device="cpu")):
        assert found["gather"] == [("all_gather", 72, 48)]
        assert found["sum"] == found["implied"] == [("all_reduce", 72, 96)]
        assert found["scatter"] == [("reduce_scatter", 72, 48)]
        # Rows of 20 bytes: rank + 1 of them to each of two others, and in backward back what they sent: 1 + 2 + 3 rows
        # without one's own
        out, back = 2 * (rank + 1) * 20, (6 - (rank + 1)) * 20
        assert [(op, sent) for op, _, sent in found["there and back"]] == [("all_to_all", out), ("all_to_all", back)]
        assert [sent for _, _, sent in found["even"]] == [2 * 20]
        # Nobody waits for a send before its receive has begun
        assert [(op, sent) for op, _, sent in found["around"]] == [("send", 16), ("recv", 0)]


def test_a_ddp_step_sums_to_the_gradients(digits_dir):
    config = TrainConfig(
        strategy="ddp", global_batch_size=8, max_steps=4, test_images=10, data_dir=str(digits_dir), dropout=False
    )
    record = launch(train_worker, config, world_size=2, device="cpu")[0]
    # ShallowNet: 1,199,882 parameters x 4 bytes, each reduced once, in however many buckets
    for rank in record.ranks:
        assert [count.op for count in rank.collectives] == ["all_reduce"]
        assert sum(count.bytes for count in rank.collectives) == 1_199_882 * 4 == 4_799_528
        assert sum(count.sent_bytes for count in rank.collectives) == 4_799_528  # 2 (N - 1) / N is 1 on two ranks
    for trace in record.traces:
        assert sum(event.bytes for event in trace.collectives) == 4_799_528
        (backward,) = [phase for phase in trace.curve.phases if phase.name == "backward"]
        assert all(backward.start_s < event.start_s < event.end_s < backward.end_s for event in trace.collectives)


def test_sums_and_gathers_over_ranks():
    # 0 + 1 + 2 = 3 everywhere, and each rank's own value stays as it was
    results = launch(workers.sum_and_gather, world_size=3, device="cpu")
    assert results == [(3.0, float(rank), ["from 0", "from 1", "from 2"]) for rank in range(3)]


def test_without_a_group_they_do_nothing():
    values = torch.ones(2)
    assert sum_over_ranks(values) is values
    assert gather_over_ranks("alone") == ["alone"]


def test_a_collective_may_return_nothing_to_wait_for(tmp_path, monkeypatch):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    # NCCL's synchronous collectives, which run on the current stream
    monkeypatch.setattr(collectives.dist, "Work", SimpleNamespace(unbox=lambda leaf: None))
    with trace_collectives() as events:
        dist.all_reduce(torch.ones(3))
    assert [(event.op, event.bytes) for event in events] == [("all_reduce", 12)]


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone says which threads run")
def test_a_thread_that_still_runs_is_waited_for(monkeypatch):
    """On a busy machine gloo's thread is late to free a buffer, which then stood at the peak of what came next."""
    monkeypatch.setattr(collectives, "BUSY_SETTLE_S", 100)
    freed = threading.Event()

    def free_late():
        end_s = time.monotonic() + 0.2
        while time.monotonic() < end_s:
            pass
        freed.set()

    thread = threading.Thread(target=free_late)
    thread.start()
    collectives._settle()
    assert freed.is_set()
    thread.join()
