"""The build exercise of notebook 14."""

from builds import BuildTestsOnRanks

from fsdp_helpers.teaching.exercises import moving

LEFT_ALONE = "the ranks' collectives do not match.*crash-skipped-step|does not end.*hang-order"


class TestMove(BuildTestsOnRanks):
    name = "my_move"
    checker = staticmethod(moving.check_move)
    worker = staticmethod(moving.move_by_reader)
    alone = (LEFT_ALONE,)
    file = "."
    starter = "on 2 ranks, rank 0: 10 parameters are whole, module.embed.weight among them"
    wrong = [
        # 1: the optimizer has the parameters that sharding replaced
        (
            [
                ("    for block", "    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)\n    for block"),
                ("    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # 1: after sharding\n", ""),
            ],
            "my_move.py fails in line .*: KeyError",
        ),
        # 2
        ([('name.removeprefix("module.")', "name")], "my_move.py fails in line .*Missing key.*save-module-prefix"),
        # 3
        (
            [
                (
                    "set_optimizer_state_dict(model, optimizer, adam, options=options)",
                    'optimizer.load_state_dict(saved["optimizer"])',
                )
            ],
            "my_move.py fails in line .* got mixed torch.Tensor and DTensor.*crash-mixed-tensor-dtensor",
        ),
        (
            [("    set_optimizer_state_dict(model, optimizer, adam, options=options)\n", "")],
            "the losses leave those of the run that stayed.* in step 2 .*save-plain-optimizer-state",
        ),
        ([("    set_model_state_dict(model, weights, options=options)\n", "")], "not that of the file's weights"),
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
        ([("        model.set_requires_gradient_sync(True)\n", "")], "the losses leave those of the run that stayed"),
        # 5
        (
            [("            loss_of(model, held_out)", "            mesh.get_rank() or loss_of(model, held_out)")],
            LEFT_ALONE,
        ),
        # 6
        ([("get_model_state_dict(model, options=options)", "model.state_dict()")], "in the file is a shard"),
        ([("        fully_shard(block, mesh=mesh)\n", "        pass\n")], "the units are root; one per block"),
    ]
