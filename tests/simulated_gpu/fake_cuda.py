"""One rank of four on fake CUDA tensors: `python fake_cuda.py` beside a simulated GPU prints what it keeps and sends.

A fake tensor has a shape, a type and a device, and no memory; torch's fake process group answers every collective. So
the real code of FSDP runs on "cuda:0", down to its streams and events, which the simulated driver gives it.
"""

import json
import warnings
from dataclasses import asdict
from unittest.mock import patch

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.measuring.collectives import count_collectives, trace_collectives
from fsdp_helpers.measuring.memory import state_bytes
from fsdp_helpers.measuring.rank_of_n import fake_group
from fsdp_helpers.sharding import strategies

NUM_RANKS, STEPS = 4, 2
CUDA = torch.device("cuda", 0)
CUT = {"strategy": "fsdp-auto-wrap", "min_num_params": 200}  # each Linear is a unit
RUNS = {
    f"{api}{name}": {**CUT, "api": api, **levers}
    for api in ("fsdp1", "fsdp2")
    for name, levers in {"": {}, ", bf16": {"precision": "bf16"}}.items()
}


def build_model() -> nn.Module:
    """330 and 217 parameters: four ranks divide neither, nor the 30 and 7 rows."""
    return nn.Sequential(nn.Linear(10, 30), nn.ReLU(), nn.Linear(30, 7))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.zeros(2, 10, device=CUDA)).float().sum().backward()
    optimizer.step()


def run(settings: dict) -> dict:
    """State and collectives of the last step, and where the parameters live."""
    config = TrainConfig(**settings)
    with fake_group(NUM_RANKS):
        mesh = strategies.make_mesh(CUDA, config)  # before: a mesh reads values, and fake tensors have none
        with patch.object(strategies, "make_mesh", return_value=mesh), FakeTensorMode(), torch.device(CUDA):
            model = strategies.APPLY_STRATEGY[config.strategy](build_model(), CUDA, config)
            optimizer = torch.optim.Adam(model.parameters(), fused=True)
            for _ in range(STEPS):
                with trace_collectives() as seen:
                    train_step(model, optimizer)
            return {
                "state": asdict(state_bytes(model, optimizer)),
                "devices": sorted({str(parameter.device) for parameter in model.parameters()}),
                "collectives": [[one.op, one.count, one.bytes] for one in count_collectives(seen)],
            }


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor is deprecated")
    found = {name: run(settings) for name, settings in RUNS.items()}
    print(json.dumps(found))
