"""What each rank measures of the model zoo."""

import torch
from zoo import ZOO

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.measuring.memory import one_thread
from fsdp_helpers.measuring.rank_of_n import RankOfN, distribute_model, trace_steps


def measure_zoo(rank: int, world_size: int, cases: list[tuple[str, dict]]) -> list[RankOfN]:
    """Measure each case, one after the other, in whatever group this rank is."""
    found = []
    for name, changes in cases:
        entry, config = ZOO[name], TrainConfig(**changes)
        torch.manual_seed(0)  # experts are chosen by what is drawn
        batch = entry.batch()
        with one_thread():  # on a CPU, convolutions take scratch memory for each
            measured = trace_steps(
                lambda entry=entry, config=config: distribute_model(entry.build(), config, entry.units),
                lambda model, entry=entry, batch=batch: entry.loss(model, batch),
            )
        found.append(measured)
    return found
