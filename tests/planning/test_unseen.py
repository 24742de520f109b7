"""Ten models that no rule of the planner was made for, each in three ways on 2 ranks, one on 3; torch's own tracker.

`pytest -s tests/planning/test_unseen.py` shows every row.
"""

import pytest
import torch
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from zoo_ranks import ANIMALS
from zoo_record import WAYS, measure_cases
from zoo_unseen import UNSEEN

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.measuring.own_plan import fake_step
from fsdp_helpers.measuring.rank_of_n import distribute_model, fake_group
from fsdp_helpers.planning.peak import walk_step

THREE = ("DDP", "auto-wrap", "bf16")
TELLING = ("recurrent cell", "autoencoder")
LONG = pytest.mark.long


@pytest.mark.parametrize(
    "name, ranks",
    [pytest.param(name, 2, marks=() if name in TELLING else LONG) for name in UNSEEN]
    + [pytest.param("mixture of depths", 3, marks=LONG)],
)
def test_an_unseen_model_on_real_ranks(name, ranks):
    rows = measure_cases([(name, way) for way in THREE], ranks)
    assert [row.variant for row in rows if not row.is_exact] == []
    assert {row.variant: round(row.error, 4) for row in rows if not -0.01 < row.error < 0.01} == {}


def tracked_bytes(name: str, config: TrainConfig, ranks: int) -> int:
    """Return the tracker's peak of a forward and a backward, with Adam's moments, without the batch."""
    animal = ANIMALS[name]
    torch.manual_seed(0)
    batch = animal.batch()
    with fake_group(ranks):
        model = distribute_model(animal.build(), config, animal.units).train()
        optimizer = torch.optim.Adam(model.parameters(), fused=True)
        animal.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        tracker = FSDPMemTracker(model, optimizer)
        tracker.track_inputs((batch,))
        with tracker:
            animal.loss(model, batch).backward()
    (snapshot,) = tracker.get_tracker_snapshot("peak").values()
    return snapshot["Total"] - snapshot[next(kind for kind in snapshot if str(kind).endswith("INP"))]


@pytest.mark.parametrize("name", UNSEEN)
def test_torchs_tracker_agrees(name):
    """It sees what operations return, as the shapes do, but not what they take inside: scratch of a convolution, say.

    It has gradients freed when a reduce-scatter is done. FSDP2 frees them before it allocates the output, and real
    ranks agree with that; only where units are reduced at the end of backward is the difference the peak.
    """
    config, animal = TrainConfig(**WAYS["auto-wrap"]), UNSEEN[name]
    torch.manual_seed(0)
    profile = fake_step(animal.build(), animal.batch(), animal.loss, animal.units, "fp32")
    planned = walk_step(profile, config, 2, animal.units, backend="fake").peak.bytes
    tracked = tracked_bytes(name, config, 2)
    print(f"{name}: planned from shapes {planned:,}, tracked {tracked:,}: {tracked / planned:.5f}")
    assert tracked / planned == pytest.approx(1, abs=0.045 if name == "retrieval" else 0.001)
