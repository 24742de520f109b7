"""The small exercises of notebook 08: right answers pass, plausible wrong ones do not."""

import math

import pytest
from builds import BuildTestsOnRanks
from small_exercises import refused

from fsdp_helpers.teaching.exercises import notebook_08
from fsdp_helpers.teaching.exercises.answers import NotYet


def vit_parameters(image_size, channels, patch_size, width, depth, num_heads, mlp_width, num_classes, class_token):
    tokens = (image_size // patch_size) ** 2 + class_token
    attention = 4 * width * width + 4 * width
    hidden = 2 * width * mlp_width + mlp_width + width
    patches = channels * patch_size**2 * width + width
    rest = tokens * width + class_token * width + 2 * width + width * num_classes + num_classes
    return patches + depth * (4 * width + attention + hidden) + rest


def fewest_ranks(layers, device_bytes):
    spare = device_bytes - 4 * max(layers)
    return max(1, math.ceil(4 * (sum(layers) + max(layers)) / spare)) if spare > 0 else None


def counted_up(layers, device_bytes):
    """The same, rank by rank."""
    needs = (4 * ((sum(layers) + max(layers)) / n + max(layers)) for n in range(1, 1_000))
    return next((n for n, size in enumerate(needs, start=1) if size <= device_bytes), None)


def test_right_answers():
    assert notebook_08.check_vit_parameters(vit_parameters).startswith("Right")
    assert notebook_08.check_fewest_ranks(fewest_ranks).startswith("Right")
    assert notebook_08.check_fewest_ranks(counted_up).startswith("Right")


def test_an_error_is_told_with_the_shape_it_was_called_with():
    with pytest.raises(
        NotYet, match=r"called with \(image_size=28, channels=1, .*\), your .* fails: TypeError"
    ) as refused:
        notebook_08.check_vit_parameters(lambda image_size: 1)
    assert "called with ()" not in str(refused.value)


WRONG = {
    notebook_08.check_vit_parameters: [
        lambda **shape: ...,
        lambda **shape: 204_938,  # of the first shape alone
        lambda **shape: vit_parameters(**shape) - shape["width"],  # a bias less
        lambda **shape: vit_parameters(**shape | {"class_token": False}),
        lambda **shape: vit_parameters(**shape | {"mlp_width": 4 * shape["width"]}),
        lambda **shape: str(vit_parameters(**shape)),
    ],
    notebook_08.check_fewest_ranks: [
        None,
        lambda layers, device_bytes: math.ceil(4 * sum(layers) / device_bytes),  # the shards alone
        lambda layers, device_bytes: fewest_ranks(layers, device_bytes) or 10**6,  # where no number does
        lambda layers, device_bytes: (fewest_ranks(layers, device_bytes) or 0) + 1,
        lambda layers, device_bytes: fewest_ranks([*layers, 0], device_bytes + max(layers)),
        lambda layers, device_bytes: counted_up(layers, device_bytes - 1),  # exactly full fits
        lambda layers, device_bytes: None,
        lambda layers, device_bytes: 1.5,
    ],
}


@pytest.mark.parametrize("checker, answer", [(checker, answer) for checker in WRONG for answer in WRONG[checker]])
def test_wrong_answers_are_refused_in_one_line(checker, answer):
    refused(checker, answer)


# ---------------------------------------------------------------- the build

ADD_KEY = """    if weights:  # rank 0's
        weights = {**weights, "head.weight": weights["embed.weight"]}
"""
MISSING_KEY = 'my_start.py fails on line .*: RuntimeError: .*Missing key.* "head.weight"'
UNTIED = "    model.head.weight = torch.nn.Parameter(model.head.weight.detach().clone())\n"
OTHER_WAY = """
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

def start_sharded(build, weights, mesh):
    with torch.device("meta"):
        model = build()
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=mesh)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, own in model.named_parameters():  # a tied one once; rank 0 fails if one is missing
            whole = weights[name] if weights else torch.empty(own.shape)
            own.copy_(distribute_tensor(whole, mesh, own.placements))
    model.fill_buffers()
    return model
"""


class TestStart(BuildTestsOnRanks):
    name = "my_start"
    checker = staticmethod(notebook_08.check_start)
    starter = "on 2 ranks, rank 0: 97 tensors aren't in any unit"
    wrong = [
        ([('with torch.device("meta")', "if True")], "on top of the sharded model, .* in memory for a moment"),
        ([("    model.fill_buffers()\n", "")], "the buffer has the wrong values.*wrong-meta-buffers"),
        ([("        fully_shard(block, mesh=mesh)", "        pass")], "the units are root; make one unit per block"),
        (
            [("model.to_empty(device=mesh.device_type)", "pass")],
            "1 tensors are still on meta, including waves .*wrong-meta-buffers",
        ),
        (
            [("set_model_state_dict(model, weights, options=options)", "torch.nn.init.normal_(model.head.weight)")],
            "the losses don't match those of a run with rank 0's weights: .* in step 1 ",  # counted as in the tables
        ),
        ([(ADD_KEY, "")], MISSING_KEY),
        (
            [(ADD_KEY, ""), ("broadcast_from_rank0=True)", "broadcast_from_rank0=True, strict=False)")],
            "start_sharded accepts weights without blocks.3.linear1.weight",
        ),
        (
            [("    model.fill_buffers()\n", UNTIED + "    model.fill_buffers()\n")],
            "rank 0: head.weight and embed.weight are now two parameters.*crash-tied-weights",
        ),
        ([("    return model", "    return None")], "returns an object of type NoneType; it should return the model"),
    ]

    def test_another_way_is_accepted(self, write):
        """Straight from meta to values: rank 0's take the place of the shapes, and only the buffer needs room."""
        write(OTHER_WAY)
        self.accept(**self.settings)
