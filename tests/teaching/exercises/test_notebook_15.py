"""The exercises of notebook 15: right answers pass, plausible wrong ones do not."""

import re

import nbformat
import pytest
from builds import BuildTests, BuildTestsOnRanks
from leftovers import PROJECT

from fsdp_helpers.teaching.exercises import notebook_15
from fsdp_helpers.teaching.exercises.answers import NotYet

NO_ENTER = ("Enter.apply(x, self.group)", "x")
BIAS_INSIDE = [
    ("F.linear(hidden, self.down_weight), self.group) + self.down_bias", "F.linear(hidden, self.down_weight, self.down_bias), self.group)"),
]  # fmt: skip
GATHER = """
    def forward(self, x):
        hidden = F.gelu(F.linear(Enter.apply(x, self.group), self.up_weight, self.up_bias))
        term = F.linear(hidden, self.down_weight)
        terms = [torch.empty_like(term) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(terms, term.detach(), group=self.group)
        terms[dist.get_rank(self.group)] = term
        return sum(terms) + self.down_bias
"""
BIAS_ON_RANK_0 = [
    ("+ self.down_bias", ""),
    ("F.linear(hidden, self.down_weight)", "F.linear(hidden, self.down_weight, self.down_bias if dist.get_rank(self.group) == 0 else None)"),
]  # fmt: skip


PARALLELIZED = """
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def SplitMLP(up, down, group):
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(nn.Sequential(up, nn.GELU(), down), DeviceMesh.from_group(group, "cpu"), plan)
"""


class TestSplitMLP(BuildTestsOnRanks):
    name = "my_mlp"
    checker = staticmethod(notebook_15.check_split_mlp)
    starter = "on 2 ranks, my_mlp.py fails: "
    wrong = [
        (BIAS_INSIDE, "the losses don't match a single-process run: .* in step 1$"),
        ([NO_ENTER], "the input gradient, which the layers below need, doesn't match a single-process run"),
        ([(".chunk(size)[rank]", ""), (".chunk(size, dim=1)[rank]", "")], "your MLP keeps .* values; a rank's part of both weights"),
        ([(".clone())", ")")], "your MLP keeps 514 values; a rank's part"),
        ([("Leave.apply(F.linear(hidden, self.down_weight), self.group)", "F.linear(hidden, self.down_weight)")], "forward runs no collective; it needs one all-reduce"),
        ([("        return total, None", "        return total / 2, None")], "the input gradient"),
        ([("hidden = F.gelu(F.linear", "hidden = F.relu(F.linear")], "the losses don't match a single-process run"),
        ([("        return total, None", "        dist.all_reduce(total, group=ctx.group)\n        return total / 2, None")], "backward runs all-reduce, all-reduce; it"),
        ([("class SplitMLP(nn.Module)", "def SplitMLP(up, down, group):\n    return None\n\n\nclass Unused(nn.Module)")], "SplitMLP creates an object of type NoneType; it should be an nn.Module"),
    ]  # fmt: skip

    @pytest.mark.parametrize("way", ["the bias inside the sum, on one rank alone", "torch's own"])
    def test_other_ways_are_accepted(self, write, way):
        write(PARALLELIZED if way == "torch's own" else self.changed(*BIAS_ON_RANK_0))
        self.accept(**self.settings)

    def test_a_gather_is_not_an_all_reduce(self, write):
        code = self.changed()
        write(code[: code.index("    def forward(self, x):")] + GATHER)
        self.refuse("forward runs all-gather; it needs one all-reduce")


class TestLabels(BuildTests):
    name = "my_labels"
    checker = staticmethod(notebook_15.check_labels)
    starter = "replace the ... with your answer"
    wrong = [
        ([("pieces[-1 - rank]", "pieces[rank + world_size]")], "some ranks compute more scores than others"),
        ([("pieces[-1 - rank]", "pieces[-1]")], "the ranks don't cover every place exactly once"),
        ([("tokens[:, places + 1]", "tokens[:, places].roll(-1, 1)")], "the label at place .* isn't the token at place"),
        ([("return tokens[:, places], tokens[:, places + 1], places", "return tokens[:, places], tokens[:, places + 1]")], "split should return three tensors"),
        ([("2 * world_size", "world_size"), ("torch.cat([pieces[rank], pieces[-1 - rank]])", "pieces[rank]")], "some ranks compute more scores"),
        ([("tokens[:, places], tokens", "tokens[:, places].T, tokens")], "the shapes are"),
        ([("torch.arange(length)", "(torch.arange(length) + 1)")], "your function fails: IndexError"),
        ([("torch.arange(length)", "(torch.arange(length) - 1)")], "place -1 doesn't exist"),
    ]  # fmt: skip


SOLUTION = {
    "choice": {"data": 128, "tensor": 8, "context": 1, "pipeline": 1},
    "sent_gb": {"data": 52.5, "tensor": 300.6},
}
OTHERS = [
    ({"data": 128, "tensor": 4, "context": 1, "pipeline": 2}, {"data": 35.0, "tensor": 128.8, "pipeline": 0.537}),
    ({"data": 32, "tensor": 1, "context": 8, "pipeline": 4}, {"data": 70.3, "context": 18.8, "pipeline": 0.537}),
]


def test_right_dimensions():
    assert notebook_15.check_dimensions(**SOLUTION).startswith("Right")
    for choice, sent_gb in OTHERS:
        assert notebook_15.check_dimensions(choice, sent_gb).startswith("Right")


def test_the_folded_solution_is_right():
    notebook = nbformat.read(PROJECT / "notebooks" / "15_more_dimensions.ipynb", as_version=4)
    (text,) = [cell.source for cell in notebook.cells if cell.id == "exercise-3"]
    names: dict = {}
    exec(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1], names)
    assert notebook_15.check_dimensions(names["choice"], names["sent_gb"]).startswith("Right")


@pytest.mark.parametrize(
    "choice, says",
    [
        (..., "replace the ... with your answer"),
        ({"data": 1024}, "choice needs exactly these names: tensor, context, data, pipeline"),
        ({"data": ...}, "it should be a number|replace|choice needs"),
        ({"data": 64, "tensor": 8, "context": 1, "pipeline": 1}, "is 512 GPUs, but there are 1,024"),
        ({"data": 1024, "tensor": 1, "context": 1, "pipeline": 1}, "512 sequences can't be split evenly across 1024"),
        ({"data": 64, "tensor": 16, "context": 1, "pipeline": 1}, "8 key heads can't be split across 16 ranks"),
        ({"data": 128, "tensor": 1, "context": 1, "pipeline": 8}, "80 layers|keep the bubble to 25%"),
        ({"data": 512, "tensor": 2, "context": 1, "pipeline": 1}, "communication takes 100% as long as the arithmetic"),
        ({"data": 512, "tensor": 1, "context": 2, "pipeline": 1}, "communication takes 195% as long"),
        ({"data": 32, "tensor": 1, "context": 1, "pipeline": 32}, "80 layers can't be split evenly into 32 stages"),
        ({"data": 128, "tensor": 8, "context": 1, "pipeline": 1.5}, "it should be a whole number of ranks"),
    ],
)
def test_wrong_dimensions(choice, says):
    with pytest.raises(NotYet, match=says) as refused:
        notebook_15.check_dimensions(choice, SOLUTION["sent_gb"])
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize(
    "sent_gb, name",
    [
        ({"data": 423, "tensor": 300.6}, "data"),  # all parameters, as if tensor had no part in them
        ({"data": 52.5, "tensor": 601}, "tensor"),  # fp32
        ({"data": 52.5}, "tensor"),
        ({"data": 52.5, "tensor": 300.6, "pipeline": 1}, "pipeline"),
    ],
)
def test_wrong_bytes(sent_gb, name):
    with pytest.raises(NotYet, match=f"along {name}, a rank doesn't send") as refused:
        notebook_15.check_dimensions(SOLUTION["choice"], sent_gb)
    assert "52.5" not in str(refused.value) or name != "data"
