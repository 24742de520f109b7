"""For notebook 14: a check that finds a moved job's faults before they cost a day."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from fsdp_helpers.field_guide import cards
from fsdp_helpers.ranks.group import rank_device
from fsdp_helpers.teaching.lessons.moved_job import build_model, make_optimizer, shard

SMALL_UNIT = 10_000  # parameters; a unit with fewer isn't worth a collective
STEPS_DONE = 2


def look_at(model: nn.Module, optimizer: torch.optim.Optimizer, num_batches: int, steps_done: int) -> list[str]:
    """Return a job's problems, one line each. Call this on every rank, after a step, before leaving the job unattended.

    `num_batches` is the length of this rank's data loader; `steps_done` counts from the very first job.
    """
    findings = []
    parameters = dict(model.named_parameters())
    own = {id(parameter) for parameter in parameters.values()}
    in_optimizer = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    strangers = sum(id(parameter) not in own for parameter in in_optimizer)
    whole = [name for name, parameter in parameters.items() if not isinstance(parameter, DTensor)]
    if strangers > len(whole):  # a root that isn't resharded hides its shards, so the two numbers are equal
        findings.append(f"{strangers} of the optimizer's parameters aren't the model's: build it after fully_shard")
    if whole:
        findings.append(
            f"{len(whole)} parameters aren't sharded, including {whole[0]}: ignored, or reshard() wasn't called"
        )
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if len(units) == 1:
        findings.append("there's only one unit, so the full model is unsharded at once")
    small = sum(sum(own.numel() for own in unit.parameters()) < SMALL_UNIT for unit in units)
    if small > len(units) // 2:
        findings.append(
            f"{small} of {len(units)} units have fewer than {SMALL_UNIT:,} parameters: many calls for few bytes"
        )
    lengths = [0] * dist.get_world_size()
    dist.all_gather_object(lengths, num_batches)
    if len(set(lengths)) > 1:
        findings.append(f"the ranks have {lengths} batches: those with more will wait forever")
    trained = [name for name, parameter in parameters.items() if parameter in optimizer.state]
    on_ranks = [[]] * dist.get_world_size()
    dist.all_gather_object(on_ranks, trained)
    if differing := sorted(set().union(*on_ranks) - set(on_ranks[0]).intersection(*on_ranks)):
        findings.append(
            f"the ranks have trained different parameters, including {differing[0]}: call every unit on every"
            " rank, and call set_reduce_scatter_unused_params(True)"
        )
    counted = max((int(state["step"]) for state in optimizer.state.values() if "step" in state), default=0)
    if counted != steps_done:  # some parameters may have had fewer gradients
        findings.append(f"Adam has counted {counted} steps instead of {steps_done}: was its state loaded?")
    return findings


def visit(rank: int, world_size: int) -> dict[str, list[str]]:
    """Return the findings of `look_at` for small jobs with one fault each, and for healthy ones."""
    return {case: visit_one(rank, world_size, case) for _, case, *_ in SYMPTOMS}


def visit_one(rank: int, world_size: int, case: str) -> list[str]:
    """Train for a few steps, with one fault or none, and check the job."""
    mesh = init_device_mesh(rank_device().type, (world_size,))
    model = build_model(seed=0).to(rank_device())
    optimizer = make_optimizer(model)
    if case == "one unit":
        fully_shard(model, mesh=mesh)
    elif case == "every layer a unit":
        for layer in [module for module in model.modules() if not list(module.children())]:
            if list(layer.parameters()):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif case == "ranks use different heads":
        model.heads = nn.ModuleList(nn.Linear(10, 10) for _ in range(world_size)).to(rank_device())
        shard(model, mesh)
    else:
        shard(model, mesh)
    if case != "optimizer built first":
        optimizer = make_optimizer(model)

    images = torch.zeros(2, 1, 28, 28, device=rank_device())
    for _ in range(1 if case == "Adam's state not loaded" else STEPS_DONE):
        outputs = model(images)
        if case == "ranks use different heads":
            outputs = model.heads[rank](outputs)
        outputs.square().mean().backward()
        if case == "a head used every other step" and not optimizer.state:
            model.head.weight.grad = model.head.bias.grad = None
        optimizer.step()
        optimizer.zero_grad()
    if case == "evaluated, not resharded":
        with torch.no_grad():
            model(images)
    num_batches = 5 + rank if case == "uneven data" else 5
    return look_at(model, optimizer, num_batches, STEPS_DONE)


# The symptom, the case in `visit_one` that has it, what to do, and the failures that show it.
SYMPTOMS = [
    ("none: all is well", "no fault", "", ()),
    ("none: all is well", "a head used every other step", "", ()),
    (
        "gradients are wrong, without an error",
        "ranks use different heads",
        "call every unit on every rank; `set_reduce_scatter_unused_params(True)`",
        ("wrong-unused-parameters", "wrong-unused-units"),
    ),
    (
        "the loss doesn't change",
        "optimizer built first",
        "build the optimizer after `fully_shard`",
        ("wrong-optimizer-first",),
    ),
    (
        "memory didn't go down",
        "one unit",
        "a unit per block; then the levers in [07](07_memory_levers.ipynb)",
        ("memory-root-only", "memory-default-threshold"),
    ),
    (
        "slower than DDP",
        "every layer a unit",
        "fewer, larger units; a larger batch",
        ("slow-many-units", "slow-gather-every-micro-batch"),
    ),
    (
        "hangs in evaluation",
        "uneven data",
        "give every rank the same number of batches, some of them empty",
        ("hang-uneven-batches", "hang-gather-on-rank-0"),
    ),
    (
        "can't resume, or the loss jumps",
        "Adam's state not loaded",
        "`set_optimizer_state_dict`, by name",
        ("save-module-prefix", "save-plain-optimizer-state"),
    ),
    (
        "mixed Tensor and DTensor, or an average that has no effect",
        "evaluated, not resharded",
        "`model.reshard()` after evaluation",
        ("crash-mixed-tensor-dtensor", "save-average-lost"),
    ),
]


def checklist(found: dict[str, list[str]]) -> list[list[str]]:
    """Return the checklist rows: symptom, case, `look_at` findings, what to do, and links to failures."""
    return [
        [symptom, case, "; ".join(found[case]) or "nothing", remedy, " ".join(cards()[name].link for name in names)]
        for symptom, case, remedy, names in SYMPTOMS
    ]
