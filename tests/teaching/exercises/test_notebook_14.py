"""The build exercise of notebook 14."""

from builds import BuildTestsOnRanks

from fsdp_helpers.teaching.exercises import notebook_14

LEFT_ALONE = "the ranks' collectives don't match.*crash-skipped-step|doesn't finish.*hang-order"


UNDER_DDP = """
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

def go_on(build, mesh, parts_of, loss_of, held_out, saved, last_step, path):
    plain = build()
    model = DistributedDataParallel(plain)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    for step in range(saved["step"], last_step):
        optimizer.zero_grad()
        sum(loss_of(model, part) for part in parts_of(step)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        with torch.no_grad():
            loss_of(plain, held_out)
    if mesh.get_rank() == 0:
        torch.save(plain.state_dict(), path)
    for unit in (*plain.blocks, plain):
        fully_shard(unit, mesh=mesh)
    return plain
"""
OTHER_WAY = """
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_state_dict, set_model_state_dict, set_optimizer_state_dict
)
from torch.distributed.fsdp import fully_shard

def go_on(build, mesh, parts_of, loss_of, held_out, saved, last_step, path):
    model = build()
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    weights, adam = {}, {}
    if mesh.get_rank() == 0:
        plain = build()
        plain.load_state_dict({name[len("module."):]: value for name, value in saved["model"].items()})
        plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=3e-3)
        plain_optimizer.load_state_dict(saved["optimizer"])
        weights, adam = get_state_dict(plain, plain_optimizer)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, weights, options=options)
    set_optimizer_state_dict(model, optimizer, adam, options=options)
    for step in range(saved["step"], last_step):
        parts = parts_of(step)
        for number, part in enumerate(parts, 1):
            model.set_requires_gradient_sync(number == len(parts))
            loss_of(model, part).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            loss_of(model, held_out)
        model.train()
    model.reshard()
    whole = {name: own.full_tensor().detach() for name, own in model.state_dict().items()}
    if mesh.get_rank() == 0:
        torch.save(whole, path)
    return model
"""


class TestMove(BuildTestsOnRanks):
    name = "my_move"
    checker = staticmethod(notebook_14.check_move)
    starter = "on 2 ranks, rank 0: 10 parameters aren't sharded, including module.embed.weight"
    wrong = [
        # 1: the optimizer has the parameters that sharding replaced
        (
            [
                ("    for block", "    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)\n    for block"),
                ("    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # 1: after sharding\n", ""),
            ],
            "my_move.py fails on line .*: KeyError: the optimizer has parameters that the model no longer has, since"
            " `fully_shard` replaced them; build the optimizer after `fully_shard`.*wrong-optimizer-first",
        ),
        # 2
        ([('name.removeprefix("module.")', "name")], "my_move.py fails on line .*Missing key.*save-module-prefix"),
        # 3
        (
            [
                (
                    "set_optimizer_state_dict(model, optimizer, adam, options=options)",
                    'optimizer.load_state_dict(saved["optimizer"])',
                )
            ],
            "my_move.py fails on line .* got mixed torch.Tensor and DTensor.*crash-mixed-tensor-dtensor",
        ),
        (
            [("    set_optimizer_state_dict(model, optimizer, adam, options=options)\n", "")],
            "the losses diverge from the baseline's.* in step 2 .*save-plain-optimizer-state",
        ),
        (
            [("    set_model_state_dict(model, weights, options=options)\n", "")],
            "n't match the file's weights.*save-not-set",
        ),
        # 4
        (
            [
                (
                    "        model.set_requires_gradient_sync(False)  # 4: instead of no_sync\n",
                    "        model.no_sync()\n",
                )
            ],
            "has no attribute 'no_sync'",
        ),
        # the right losses, with twice the traffic
        (
            [("        model.set_requires_gradient_sync(False)  # 4: instead of no_sync\n", "")],
            "6 steps ran 48 reductions; .* 4 units is right, even with 2 micro-batches. What replaces no_sync.$",
        ),
        ([("        model.set_requires_gradient_sync(True)\n", "")], "6 steps ran 0 reductions"),
        # 5
        (
            [("            loss_of(model, held_out)", "            mesh.get_rank() or loss_of(model, held_out)")],
            LEFT_ALONE,
        ),
        # 6
        ([("get_model_state_dict(model, options=options)", "model.state_dict()")], "in the file is a shard"),
        (
            [("        fully_shard(block, mesh=mesh)\n", "        pass\n")],
            "the units are root; make one unit per block.*memory-root-only",
        ),
    ]

    def test_a_job_that_stays_under_ddp_to_its_last_lines_is_refused(self, write):
        write(UNDER_DDP)
        self.refuse("12 micro-batches ran through a model that wasn't sharded yet")

    def test_another_way_is_accepted(self, write):
        """Adam's state as rank 0 hands it out, one reduction for the sum of both losses, the file from `full_tensor`."""
        write(OTHER_WAY)
        self.accept(**self.settings)
