"""The exercises of notebook 07: right answers pass, plausible wrong ones do not."""

from builds import BuildTestsOnRanks
from small_exercises import UNDER_LIMITS, RunTests, attempt

from fsdp_helpers.teaching.exercises import notebook_07

VIT = {"model": "vit-deep", "strategy": "fsdp-auto-wrap", "global_batch_size": 64, "precision": "bf16"}


class TestLevers(RunTests):
    checker = staticmethod(notebook_07.check_levers)
    right = [
        attempt(75_000_000, **VIT),
        attempt(UNDER_LIMITS, **VIT, micro_batches=4, sync_micro_batches=True, api="fsdp1"),
    ]
    missed = [
        (attempt(90_000_000, **VIT), "peaks at 90.0 MB"),
        (attempt(UNDER_LIMITS, **VIT, activation_checkpointing="units"), "keeps activation_checkpointing at 'none'"),
        (attempt(UNDER_LIMITS, **VIT, activation_checkpointing="selective"), "keeps activation_checkpointing"),
        (attempt(UNDER_LIMITS, **{**VIT, "global_batch_size": 32}), "keeps global_batch_size at 64; your run has 32"),
        (attempt(UNDER_LIMITS, **{**VIT, "model": "vit"}), "keeps model at 'vit-deep'; your run has 'vit'"),
        (attempt(UNDER_LIMITS, world_size=4, **VIT), r"asks for a world size of 2"),
    ]
    wrong = [attempt(UNDER_LIMITS, **VIT, dropout=False)]  # it changes what the text leaves as it is


# ---------------------------------------------------------------- the build

WITH_TORCH = ("import torch.distributed as dist", "import torch\nimport torch.distributed as dist")
AS_ONE = "    parts = [tuple(torch.cat(column) for column in zip(*parts, strict=True))]\n"
ONE_BY_ONE = """    for index, (inputs, labels) in enumerate(parts):
        model.set_requires_gradient_sync(index == len(parts) - 1)  # the last backward reduces the sum
        loss = loss_of(model, inputs, labels) / len(parts)
        loss.backward()
"""
TOGETHER = """    losses = [loss_of(model, *part) / len(parts) for part in parts]
    model.set_requires_gradient_sync(False)
    for loss in losses[:-1]:
        loss.backward()
    model.set_requires_gradient_sync(True)
    losses[-1].backward()
"""
BY_SQUARES = """    squares = sum(parameter.grad.to_local().square().sum() for parameter in model.parameters())
    dist.all_reduce(squares)  # shards are parts of one gradient: their squares add up
    return squares.sqrt()
"""
CLIPPED = "    return torch.nn.utils.clip_grad_norm_(model.parameters(), {})\n"
OTHER_WAY = """
import torch

def add_up_gradients(model, parts, loss_of):
    model.set_requires_gradient_sync(False)
    for part in parts[:-1]:
        (loss_of(model, *part) / len(parts)).backward()
    model.set_requires_gradient_sync(True)
    (loss_of(model, *parts[-1]) / len(parts)).backward()

def gradient_norm(model):
    return torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf")).full_tensor().item()
"""


class TestAccumulation(BuildTestsOnRanks):
    name = "my_accumulation"
    checker = staticmethod(notebook_07.check_accumulation)
    starter = "on 2 ranks, with 4 parts, rank 0: no gradients were reduced"
    wrong = [
        ([("index == len(parts) - 1", "True")], "a step runs 12 reduce-scatters.*memory-accumulation"),
        ([("index == len(parts) - 1", "False")], "no gradients were reduced"),
        (
            [(" / len(parts)", "")],
            "4.00 times the norm in a single process; a sum over 4 parts becomes their mean only",
        ),
        (
            [("index == len(parts) - 1", "index == 0")],
            "reduced before the last backward pass; what later parts add never is$",
        ),
        ([("    dist.all_reduce(squares)", "    pass")], "not the norm of the full gradient.*wrong-clip-local-norm"),
        ([("    dist.all_reduce(squares)", "    dist.reduce(squares, 0)")], "rank 1: gradient_norm returns"),
        (
            [WITH_TORCH, ("    for index", AS_ONE + "    for index")],
            "rank 0: a forward pass gets 12 images; a part has only 3",
        ),
        ([(ONE_BY_ONE, TOGETHER)], "the second forward pass comes before the first backward pass"),
        (
            [WITH_TORCH, (BY_SQUARES, CLIPPED.format(1e9))],
            "gradient_norm returns an object of type DTensor; it should be a number",
        ),
        (
            [WITH_TORCH, (BY_SQUARES, CLIPPED.format(0.1).rstrip() + ".full_tensor()\n")],
            "gradient_norm must not change the gradient",
        ),
    ]

    def test_another_way_is_accepted(self, write):
        write(OTHER_WAY)
        self.accept(**self.settings)
