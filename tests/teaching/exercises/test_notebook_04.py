"""The exercises of notebook 04: right answers pass, plausible wrong ones do not."""

from dataclasses import replace

from builds import BuildTestsOnRanks
from small_exercises import UNDER_LIMITS, RunTests, attempt, refused

from fsdp_helpers.teaching.exercises import notebook_04

CUT = {"model": "deep", "strategy": "fsdp-auto-wrap", "global_batch_size": 32}


class TestThreshold(RunTests):
    checker = staticmethod(notebook_04.check_threshold)
    right = [
        attempt(UNDER_LIMITS, num_collectives=8, **CUT),
        attempt(UNDER_LIMITS, num_collectives=9, **CUT, min_num_params=5_000_000),
    ]
    missed = [
        (attempt(1_500_000_000, num_collectives=5, **CUT), "peaks at 1.50 GB"),
        (attempt(UNDER_LIMITS, num_collectives=17, **CUT), "a step runs 17 collectives; the target is at most 9"),
        (attempt(UNDER_LIMITS, **{**CUT, "model": "shallow"}), "keeps model at 'deep'; your run has 'shallow'"),
        (attempt(UNDER_LIMITS, **{**CUT, "strategy": "ddp"}), "the fsdp-auto-wrap strategy; your run uses 'ddp'"),
        (attempt(UNDER_LIMITS, world_size=4, **CUT), r"asks for a world size of 2; your run has 4"),
        (attempt(UNDER_LIMITS, **CUT, api="fsdp1"), "keeps api at 'fsdp2'"),
        (attempt(UNDER_LIMITS, **CUT, reshard_after_forward=False), "keeps reshard_after_forward at True"),
    ]
    wrong = [attempt(UNDER_LIMITS, **{**CUT, "global_batch_size": 2})]  # it changes what the text leaves as it is

    def test_a_single_rank_with_too_many_collectives_is_found(self):
        record = attempt(UNDER_LIMITS, **CUT)
        counted = attempt(UNDER_LIMITS, num_collectives=17, **CUT).ranks[1].collectives
        too_many = replace(record.ranks[0], collectives=counted)
        told = refused(self.checker, replace(record, ranks=(too_many, record.ranks[1])))
        assert "a step runs 17 collectives" in told


# ---------------------------------------------------------------- the build

AS_ONE_UNIT = ("fully_shard(list(pair), mesh=mesh)", "pass")
PAIRS = "for pair in zip(blocks[::2], blocks[1::2], strict=True):"
OTHER_WAY = """
from torch.distributed.fsdp import fully_shard

def shard_model(model, mesh):
    modules = [model.embed, *model.blocks, model.head]
    for first, end in ((0, 3), (3, 5), (5, 7), (7, 10)):
        fully_shard(modules[first:end], mesh=mesh)
    return fully_shard(model, mesh=mesh)
"""


class TestCut(BuildTestsOnRanks):
    name = "my_cut"
    checker = staticmethod(notebook_04.check_cut)
    starter = "on 2 ranks, rank 0: 100 parameters aren't in any unit"
    wrong = [
        ([AS_ONE_UNIT], "the peak is .* the target is below .*: one unit is the entire model.*memory-root-only"),
        (
            [(PAIRS, "for pair in (blocks[:4], blocks[4:]):")],
            "the largest of 3 units has 452 kB of parameters; smaller units .* once$",
        ),
        (
            [("list(pair), mesh=mesh", "list(pair), mesh=mesh, reshard_after_forward=False")],
            "4 of 5 units aren't resharded after forward, in addition to the root$",
        ),
        ([("fully_shard(list(pair), mesh=mesh)", "[fully_shard(one, mesh=mesh) for one in pair]")], "26 collectives"),
        # four single blocks, and four are the root's: few collectives, and a low peak
        (
            [(PAIRS, "for pair in zip(blocks[4:]):")],
            "blocks.0, blocks.1, blocks.2, blocks.3 belong only to the root, .* until backward ends$",
        ),
        (
            [
                ("    blocks = list", "    fully_shard(model, mesh=mesh)\n    blocks = list"),
                ("    fully_shard(model, mesh=mesh)  # the root, last: embed and head\n", ""),
            ],
            "my_cut.py fails on line 8: a module became a unit after the module that contains it; shard inner modules first and the root last",
        ),
        (
            [("fully_shard(model, mesh=mesh)  # the root", "pass  # the root")],
            "my_cut.py fails: RuntimeError: FSDP requires a single root module",
        ),
    ]

    def test_another_way_is_accepted(self, write):
        """Four units that take embed and head along, and a root with nothing of its own."""
        write(OTHER_WAY)
        self.accept(**self.settings)


class TestHooks(BuildTestsOnRanks):
    name = "my_hooks"
    checker = staticmethod(notebook_04.check_hooks)
    starter = "on 2 ranks, rank 0: after hook_block, blocks still have 44,992 bytes"
    wrong = [
        # zeros take as many bytes
        (
            [("        storage.resize_(0)\n", "        whole.zero_()\n")],
            "after hook_block, blocks still have 4.,... bytes",
        ),
        (
            [("    block.register_forward_hook(reshard)\n", "")],
            "between forward and backward, blocks still have .* bytes",
        ),
        (
            [("    block.register_full_backward_pre_hook(unshard)\n", "")],
            "RuntimeError: in backward, a layer computes while its block's storage is empty",
        ),
        # without counting: it waits for the gradient of the block's inputs, and those of the first block have none
        (
            [
                ("        parameter.register_post_accumulate_grad_hook(gradient_arrived)\n", "        pass\n"),
                (
                    "    block.register_full_backward_pre_hook(unshard)\n",
                    "    block.register_full_backward_pre_hook(unshard)\n"
                    "    block.register_full_backward_hook(reshard)\n",
                ),
            ],
            "in backward, a layer computes while its block's storage is empty; this block's inputs need no"
            " gradient, so don't wait for one",
        ),
        # the first gradient to arrive frees the block
        (
            [
                ("            reshard()\n", "            pass\n"),
                ("        arrived.append(parameter)\n", "        reshard()\n"),
            ],
            "in backward, a layer computes while its block's storage is empty",
        ),
        ([("            reshard()\n", "            pass\n")], "after backward, blocks still have"),
        ([("        gather(whole)\n", "        pass\n")], "a step runs 0 all-gathers, not 8"),
        # all blocks are freed at the end of forward
        (
            [
                ("def hook_block(", "WAITING = []\n\n\ndef hook_block("),
                (
                    "    def gradient_arrived(",
                    "    def reshard_all(*_):\n        WAITING.append(reshard)\n"
                    "        if len(WAITING) == 4:\n            [WAITING.pop()() for _ in range(4)]\n\n"
                    "    def gradient_arrived(",
                ),
                ("    block.register_forward_hook(reshard)\n", "    block.register_forward_hook(reshard_all)\n"),
            ],
            "while one block computes, 4 blocks are unsharded",
        ),
        # gathered before there is room for it
        (
            [("        storage.resize_(num_bytes)\n        gather(whole)\n", "        gather(whole)\n")],
            "gather can't fill a tensor whose storage is still empty",
        ),
    ]
