"""The exercises of notebook 03: right answers pass, plausible wrong ones do not."""

from dataclasses import replace

import pytest
from builds import BuildTestsOnRanks
from small_exercises import UNDER_LIMITS, RunTests, attempt, refused

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.teaching.exercises import notebook_03
from fsdp_helpers.training.run import train

FSDP = {"strategy": "fsdp", "global_batch_size": 96}


class TestLowerPeak(RunTests):
    checker = staticmethod(notebook_03.check_lower_peak)
    right = [
        attempt(29_000_000, world_size=4, **FSDP),
        attempt(UNDER_LIMITS, world_size=3, **{**FSDP, "strategy": "fsdp-auto-wrap"}),
    ]
    missed = [
        (attempt(36_000_000, **FSDP), "a rank peaks at 36.0 MB; every rank has to stay below 30.0 MB"),
        (attempt(UNDER_LIMITS, **{**FSDP, "global_batch_size": 48}), "keeps global_batch_size at 96; your run has 48"),
        (attempt(UNDER_LIMITS, **FSDP, precision="bf16"), "keeps precision"),
        (attempt(UNDER_LIMITS, **FSDP, activation_checkpointing="units"), "keeps activation_checkpointing"),
        (attempt(UNDER_LIMITS, **FSDP, micro_batches=2), "keeps micro_batches"),
        (
            attempt(UNDER_LIMITS, world_size=12, **{**FSDP, "strategy": "ddp"}),
            "asks for the fsdp or fsdp-auto-wrap strategy",
        ),
    ]
    wrong = [attempt(UNDER_LIMITS, **FSDP, model="simple")]  # it changes what the text leaves as it is

    @pytest.fixture(autouse=True)
    def runs_again_as_told(self, monkeypatch, request) -> None:
        """No run of these records has been; a second one would be of minutes."""
        if "forged" not in request.node.name:
            told = [*self.right, *(record for record, _ in self.missed), *self.wrong]
            records = {(record.config, record.world_size): record for record in told}

            def train(config, world_size, **settings):
                return records[replace(config, max_steps=None), world_size]

            monkeypatch.setattr(notebook_03, "train", train)

    def test_a_forged_peak_is_found_by_running_again(self, digits_dir, monkeypatch):
        monkeypatch.setenv("FSDP_DATA_DIR", str(digits_dir))
        config = TrainConfig(**FSDP, max_steps=3, test_images=12)
        record = train(config, world_size=2, device="cpu", progress=False)
        forged = replace(record, ranks=tuple(replace(rank, peak_bytes=29_000_000) for rank in record.ranks))
        told = refused(self.checker, forged)
        assert "in your record, rank 0 peaks at 29.0 MB; when we repeated the run with the same settings" in told

    def test_a_single_rank_above_the_limit_is_found(self):
        record = attempt(UNDER_LIMITS, world_size=3, **FSDP)
        too_high = replace(record.ranks[1], peak_bytes=36_000_000)
        told = refused(self.checker, replace(record, ranks=(record.ranks[0], too_high, record.ranks[2])))
        assert "a rank peaks at 36.0 MB" in told


# ---------------------------------------------------------------- the build


FLATTEN = """        flat = torch.cat([tensor.flatten() for tensor in tensors])
        return nn.functional.pad(flat, (0, -len(flat) % self.world_size))
"""
PADDED_EACH = [
    (
        FLATTEN,
        "        return torch.cat([nn.functional.pad(own.flatten(), (0, -own.numel() % self.world_size)) for own in tensors])\n",
    ),
    ("full[: sum(sizes)].split(sizes)", "full.split([size + -size % self.world_size for size in sizes])"),
    ("view.view(shape)", "view[: shape.numel()].view(shape)"),
]


class TestUnit(BuildTestsOnRanks):
    name = "my_unit"
    checker = staticmethod(notebook_03.check_unit)
    starter = "on 2 ranks, my_unit.py fails: TypeError: a Unit needs `shard`"
    wrong = [
        (
            [("        self.shard.grad /= self.world_size\n", "")],
            "gradient norm is 2.00 times .*; a sum over 2 ranks becomes their mean only when it's divided by 2$",
        ),
        ([("self.shard.grad /= self.world_size", "self.shard.grad /= 4")], "norm is 0.50 times .*wrong-summed-loss"),
        ([("self.shard.grad =", "own ="), ("self.shard.grad", "own")], "after reduce_gradients, `shard.grad` is None"),
        (
            [("full.chunk(world_size)[rank]", "full.chunk(world_size)[0]")],
            "the first loss is wrong.*`unshard`.* in step 1$",
        ),
        (PADDED_EACH, r"the shard has 5,964 values; .*ceil\(P / N\) = 5,962$"),
        # divided as if there were always two ranks
        (
            [("        self.shard.grad /= self.world_size\n", "        self.shard.grad /= 2\n")],
            "on 3 ranks.*the gradient norm is 1.50 times the norm in a single process$",
        ),
        ([("parameter.data = torch.empty(0)", "pass")], "bytes are held after __init__"),
        ([("        self.reshard()\n\n", "\n")], "bytes are held after __init__, more than a shard needs"),
        (
            [("            parameter.grad = None\n", "            pass\n")],
            "bytes are held between steps, more than four shards need",
        ),
        # a second copy of all values, where torch does not look
        (
            [("        self.reshard()\n\n", "        self.kept = full.numpy().copy()\n        self.reshard()\n\n")],
            r"4\d,... bytes are held between steps outside torch, in NumPy or Python",
        ),
        (
            [("        self.reshard()\n\n", "        self.kept = bytes(full.numpy())\n        self.reshard()\n\n")],
            r"4\d,... bytes are held between steps outside torch, in NumPy or Python",
        ),
        # only rank 0 reshards
        (
            [
                ("        self.world_size = world_size\n", "        self.world_size, self.rank = world_size, rank\n"),
                ("parameter.data = torch.empty(0)", "parameter.data = parameter.data if self.rank else torch.empty(0)"),
            ],
            "on 2 ranks, rank 1: .* bytes are held after __init__",
        ),
        (
            [
                ("dist.reduce_scatter_tensor(self.shard.grad, full)", "dist.all_reduce(full)"),
                ("torch.empty_like(self.shard)", "full.chunk(self.world_size)[dist.get_rank()].clone()"),
            ],
            "'all_reduce': 1",
        ),
        (
            [("(0, -len(flat) % self.world_size)", "(0, 0)")],
            "the ranks' shards differ in length, 5,962 and 5,961; .* where does padding go",
        ),
    ]

    def test_the_package_s_own_answer_is_refused(self, write):
        write("from fsdp_helpers.sharding.strategies import shard_fsdp2 as Unit\n")
        self.refuse("my_unit.py imports fsdp_helpers; write the code yourself, with only torch")
