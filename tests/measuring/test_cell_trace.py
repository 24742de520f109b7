"""`%%ranks --trace` records a cell's collectives and bytes without changing them, on any model and loop."""

import json
import textwrap
from contextlib import nullcontext
from math import inf
from pathlib import Path

import pytest

from fsdp_helpers import Ranks
from fsdp_helpers.measuring.cell_trace import assembled, compared, record_cell
from fsdp_helpers.measuring.collectives import OP_NAMES, count_collectives
from fsdp_helpers.ranks.errors import RankError
from fsdp_helpers.records import Collective
from fsdp_helpers.teaching.page.traced_cell import show_trace

GPT = """
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

class GPT(nn.Sequential):
    def __init__(self):
        blocks = [nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True) for _ in range(4)]
        super().__init__(nn.Embedding(50, 32), *blocks, nn.Linear(32, 50, bias=False))
        self[-1].weight = self[0].weight  # tied
"""
TRAIN = """
torch.manual_seed(0)
model, losses = GPT(), []
_, *blocks, _ = model
units = [model, *([blocks[:2], blocks[2:]] if world_size == 2 else blocks)]
for unit in reversed(units):
    fully_shard(unit)
optimizer, tokens = torch.optim.Adam(model.parameters()), (torch.arange(64).view(4, 16) + rank) % 50
for _ in range(2):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
groups = [fully_shard.state(unit[0] if isinstance(unit, list) else unit)._fsdp_param_group for unit in units]
full = {group._module_fqn or "root": sum(p._sharded_param_data.nbytes for p in group.fsdp_params) for group in groups}
"""
FIFTEEN = ["redistribute", "model", "block", "build", "train", "fsdp", "tensor-functions", "tensor-by-hand"]
FSDP_OF_8 = {"all_gather": 8, "reduce_scatter": 8}
PIPELINE = [*FIFTEEN, "gpipe", "gpipe-train", "pipeline"]
LOOPS = {  # ranks, cells that come first, the cell, the variable to compare, and the expected collectives
    "02 by hand": (2, ["all-reduce", "cell-17"], "cell-20", "losses", {"broadcast": 8, "all_reduce": 80}),
    "03 FlatUnit": (2, ["rank-batches", "cell-11"], "cell-13", "losses", {"broadcast": 8} | FSDP_OF_8),
    # Pairs of blocks are two units, and the root a third: in each step 2 · 3 - 1 all-gathers and 3 reduce-scatters.
    "lists of blocks": (2, GPT, TRAIN, "losses", {"all_gather": 10, "reduce_scatter": 6}),
    "tied weights on three ranks": (3, GPT, TRAIN, "losses", {"all_gather": 18, "reduce_scatter": 10}),
    "15 tensor": (4, FIFTEEN, "tensor", "runs", None),
    "15 pipeline": (4, PIPELINE, "(losses, _), order = train_pipeline(ScheduleGPipe)", "losses", None),
}


@pytest.fixture(scope="module")
def ranks(request):
    with Ranks(request.param, device="cpu", timeout_s=60) as opened:
        yield opened


def traced(ranks: Ranks, code: str, error: type[Exception] | None = None) -> dict:
    shown = []
    with pytest.raises(error) if error else nullcontext():
        ranks.run(code, tracer=(record_cell, shown.append))
    return compared({rank: assembled(sent) for rank, sent in shown[0].items()})


@pytest.mark.parametrize("ranks, name", [(loop[0], name) for name, loop in LOOPS.items()], indirect=["ranks"])
def test_a_traced_cell_has_the_same_losses_and_the_same_collectives(name, ranks):
    _, first, code, variable, expected = LOOPS[name]
    chapter = name[:2] if name[0].isdigit() else ""
    if chapter:
        (path,) = (Path(__file__).parents[2] / "notebooks").glob(f"{chapter}_*.ipynb")
        cells = {cell["id"]: "".join(cell["source"][1:]) for cell in json.loads(path.read_text())["cells"]}
        first, code = "\n".join(cells[cell] for cell in first), cells.get(code, code)
    ranks.run(first)
    ranks.run(code)
    untraced = ranks[variable]
    assert ranks._processes.traced == {}, "without --trace, nothing is recorded"
    traces = traced(ranks, code)
    assert ranks[variable] == untraced, "bitwise"
    recorder = "torch.distributed.tensor.debug import CommDebugMode"
    if chapter:  # with these models, its hooks fail
        recorder = "fsdp_helpers.measuring.collectives import trace_collectives"
    ranks.run(f"from {recorder} as recorder\nwith recorder() as seen:\n{textwrap.indent(code, '    ')}")
    ranks.run(
        "seen = list(seen) if isinstance(seen, list) else {str(op): n for op, n in seen.get_comm_counts().items()}"
    )
    for rank, seen in enumerate(ranks["seen"]):
        counts = count_collectives(traces[rank].collectives)
        ours = {kind.op: kind.count for kind in counts}
        assert expected in (ours, None) and sum(ours.values()) > 5
        if chapter:
            assert counts == count_collectives(seen)
        else:
            assert ours == {OP_NAMES[op.split(".")[1]]: count for op, count in seen.items()}
            moved = {one.unit: one.bytes // len(traces) for one in traces[rank].collectives}
            assert moved == ranks["full"][rank]
        assert expected is None or len(traces[rank].steps_s) == len(untraced[0])
    if chapter == "02":  # all of ShallowNet's parameters, once per step and once at the start
        assert [kind.bytes for kind in counts] == [4 * 1_199_882, 10 * 4 * 1_199_882]
    everything = [seen for trace in traces.values() for seen in trace.collectives]
    assert not any(seen.unequal for seen in everything) and any(seen.waited_s for seen in everything)


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_memory_held_before_the_cell_counts_until_it_is_freed(ranks, capfd):
    ranks.run("import torch\nkept, freed = torch.ones(1000), torch.ones(500)")
    before = traced(ranks, "1")[0].curve.held_bytes
    curve = traced(ranks, "del freed\nmore = torch.ones(100)")[0].curve
    assert curve.allocated_bytes[0] == before and curve.held_bytes == before - 2000 + 400
    ranks.run("del more")
    trace = traced(ranks, "2")[0]
    assert trace.collectives == () and trace.curve.held_bytes == before - 2000
    assert "unknown size" not in capfd.readouterr().out


@pytest.mark.parametrize("ranks", [2], indirect=True)
@pytest.mark.parametrize("ends", ["os._exit(3)", "1 / 0"], ids=["leaves early", "raises"])
def test_a_failed_cell_shows_how_far_each_rank_came_and_what_was_unequal(ends, ranks, capsys, tmp_path):
    code = f"""import os, pathlib, time, torch, torch.distributed as dist
dist.all_reduce(torch.ones(3, 2) if rank else torch.ones(2, 3))
last = pathlib.Path({str(tmp_path / "last")!r})
if rank:
    while not last.exists(): time.sleep(0.05)
    time.sleep(1)  # in which rank 0 begins its last collective
    {ends}
last.touch()
dist.barrier()"""
    traces = traced(ranks, code, RankError)
    assert [[seen.end_s == inf for seen in trace.collectives] for trace in traces.values()] == [[False, True], [False]]
    said = "rank 0: all-reduce of float32 [2, 3]; rank 1: all-reduce of float32 [3, 2]"
    assert {trace.collectives[0].unequal for trace in traces.values()} == {said}
    capsys.readouterr()
    show_trace({rank: list(trace.collectives) for rank, trace in traces.items()})
    assert "Collectives begun: 2 on rank 0, 1 on rank 1; number 2 on rank 0 never ended" in capsys.readouterr().out


def test_a_rank_that_ended_before_it_did_anything_leaves_the_others_their_times():
    one = Collective(op="all_reduce", bytes=4, sent_bytes=4, start_s=7.0, end_s=inf, shapes="", group=("0", 0, 1))
    traces = compared(compared({0: assembled([]), 1: assembled([one])}))  # as a cell does, and its figure once more
    assert traces[1].collectives[0].start_s == 0.0 and traces[0].collectives == ()
