"""Plans of models that the planner was not made for, against real ranks: peaks, state, and sent bytes."""

from functools import cache

import pytest
import torch
from zoo import ZOO, measure_zoo

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.measuring.step_profile import measure_step
from fsdp_helpers.planning.held import own_state
from fsdp_helpers.planning.peak import walk_step
from fsdp_helpers.ranks.launching.launch import launch
from fsdp_helpers.sharding.recompute import checkpoint_activations

WAYS = {
    "DDP": {"strategy": "ddp"},
    "FSDP1": {"strategy": "fsdp-auto-wrap", "api": "fsdp1"},
    "FSDP2": {"strategy": "fsdp-auto-wrap"},
    "recomputed": {"strategy": "fsdp-auto-wrap", "activation_checkpointing": "units"},
    "bf16": {"strategy": "fsdp-auto-wrap", "precision": "bf16"},
}
REFUSED = {("ResNet", "bf16")}  # statistics in fp32 beside weights in bf16: `test_own_plan`
# Where the plan is known to be off, with the lowest and the highest measured / predicted that is let through:
OFF = {
    ("nested", "recomputed"): (0.90, 1.02),  # too high: torch frees a buffer of an inner unit earlier than the walk
    ("experts", "FSDP1"): (0.86, 1.02),  # too high: FSDP1 reduces with the last gradient, not when the unit is left
    ("used again", "FSDP1"): (0.98, 1.10),  # too low
    # too low: the views of a flat tensor with one trained parameter all get gradients, frozen ones too
    ("LoRA", "FSDP1"): (0.98, 1.20),
    ("LoRA, loss in chunks", "FSDP1"): (0.98, 1.20),
}
FAST = [(name, "FSDP2") for name in ZOO] + [("nested", "recomputed"), ("LoRA", "DDP"), ("Llama", "bf16")]
ALL = [(name, way) for name in ZOO for way in WAYS if (name, way) not in REFUSED]


@cache
def profile(name: str, checkpointing: str, precision: str):
    animal, dtype = ZOO[name], torch.bfloat16 if precision == "bf16" else torch.float32
    model, batch = animal.build().to(dtype), animal.batch()
    if checkpointing != "none":
        model = checkpoint_activations(model, animal.units, checkpointing)
    batch = batch.to(dtype) if batch.is_floating_point() else batch
    return measure_step(model, lambda: animal.loss(model, batch), animal.units)


def compare(cases: list[tuple[str, str]], ranks: int) -> dict[tuple[str, str], float]:
    """Measured over predicted peaks; state and sent bytes have to be equal."""
    found = launch(
        measure_zoo, [(name, WAYS[way]) for name, way in cases], world_size=ranks, device="cpu", progress=False
    )[0]
    ratios, wrong = {}, []
    for (name, way), measured in zip(cases, found, strict=True):
        config, units = TrainConfig(**WAYS[way]), ZOO[name].units
        recorded = profile(name, config.activation_checkpointing, config.precision)
        step = walk_step(recorded, config, ranks, units, backend="gloo")
        state = own_state(recorded, config, ranks, units)
        ratios[name, way] = measured.peak_bytes / step.peak.bytes
        # buffers, which DDP broadcasts before each forward, are not planned
        sent = sum(seen.sent_bytes for seen in measured.collectives if seen.op != "broadcast")
        pairs = {"sent": (step.sent_bytes, sent), "state": (state, measured.state)}
        differing = {what: pair for what, pair in pairs.items() if pair[0] != pair[1]}
        print(f"{ranks} ranks, {name}, {way}: {ratios[name, way]:.4f}, {step.peak.when} {differing}")
        wrong += [(name, way, what) for what in differing]
    assert wrong == []
    return ratios


def check(ratios: dict[tuple[str, str], float]) -> None:
    """Nine of ten within 2 %, the worst within 5 %, but for what is known to be off."""
    for case in OFF.keys() & ratios.keys():
        lowest, highest = OFF[case]
        assert lowest < ratios[case] < highest, case
    errors = sorted(abs(ratio - 1) for case, ratio in ratios.items() if case not in OFF)
    assert errors[len(errors) * 9 // 10 - 1] < 0.02
    assert errors[-1] < 0.05


def test_the_zoo_on_two_ranks():
    check(compare(FAST, 2))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_whole_zoo(ranks):
    check(compare(ALL, ranks))
