"""FSDP on CUDA tensors without a GPU: fake tensors on "cuda:0", torch's fake process group, and the simulated driver.

State and collectives are exact there; losses do not exist. Two things do not work on fake tensors, and wait for a real
GPU: CPU offload, since pinned memory and FSDP1's handles want real storage, and DDP, whose buckets do.
"""

import json
import sys
from pathlib import Path

import pytest
from gpu_driver import SimulatedGpus

APIS = ("fsdp1", "fsdp2")
# FSDP1 cuts each unit, 330 and 217 parameters, into four equal pieces: ceil(330 / 4) + ceil(217 / 4) = 83 + 55 = 138.
# FSDP2 cuts each tensor by rows, ceil(30 / 4) = 8 and ceil(7 / 4) = 2: 8 x 10 + 8 + 2 x 30 + 2 = 150.
SHARD = {"fsdp1": 138, "fsdp2": 150}
# In bf16 FSDP1 pads each piece to a multiple of 16 bytes, 4 parameters in fp32: 84 + 56 = 140.
BF16_SHARD = {"fsdp1": 140, "fsdp2": 150}


@pytest.fixture(scope="module")
def found(libraries, run_beside, tmp_path_factory) -> dict:
    """What every run keeps and sends: one process for all, since each loads torch."""
    gpus = SimulatedGpus(libraries, tmp_path_factory.mktemp("fake-cuda") / "uses.log")
    program = Path(__file__).with_name("fake_cuda.py")
    runs = json.loads(run_beside([sys.executable, program], gpus.environment()).stdout)
    assert "allocate" not in {use.what for use in gpus.uses()}, "a tensor was real"
    return runs


def state_of(pieces: int) -> dict:
    """4 bytes for a parameter and for its gradient, 8 for Adam's two moments."""
    return {"parameter_bytes": 4 * pieces, "gradient_bytes": 4 * pieces, "optimizer_bytes": 8 * pieces}


@pytest.mark.parametrize("api", APIS)
def test_state_and_collectives(found, api):
    run, full_bytes = found[api], 4 * 4 * SHARD[api]
    assert run["devices"] == ["cuda:0"]
    assert run["state"] == state_of(SHARD[api])
    # Both units are gathered in forward and in backward, and reduced once; the root has no parameters of its own.
    assert run["collectives"] == [["all_gather", 4, 2 * full_bytes], ["reduce_scatter", 2, full_bytes]]


@pytest.mark.parametrize("api", APIS)
def test_bf16_halves_what_is_gathered_and_nothing_else(found, api):
    run, full_bytes = found[f"{api}, bf16"], 4 * 4 * BF16_SHARD[api]
    assert run["state"] == state_of(BF16_SHARD[api])
    assert run["collectives"] == [["all_gather", 4, full_bytes], ["reduce_scatter", 2, full_bytes]]
