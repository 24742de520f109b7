"""The build exercises of notebook 13."""

from builds import BuildTestsOnRanks

from fsdp_helpers.teaching.exercises import notebook_13

MEAN_OF_MEANS = (
    "loss = model(numbers, targets) / num_documents",
    "loss = model(numbers, targets) / (targets != -100).any(dim=1).sum() / len(parts) / dist.get_world_size()",
)
BY_TOKENS = ("(targets != -100).any(dim=1).sum()", "(targets != -100).sum()")
BY_ROWS = ("(targets != -100).any(dim=1).sum()", "(targets == targets).any(dim=1).sum()")
EVERYTHING = (  # each rank gets all parts of all ranks, and computes them
    "    total = torch.zeros(())\n",
    "    everyone = [None] * dist.get_world_size()\n    dist.all_gather_object(everyone, parts)\n"
    "    parts = [part for own in everyone for part in own]\n    total = torch.zeros(())\n",
)


class TestDocumentLoss(BuildTestsOnRanks):
    name = "my_documents"
    checker = staticmethod(notebook_13.check_document_loss)
    starter = "on 2 ranks, rank 0: no gradients were reduced"
    wrong = [
        ([("    dist.all_reduce(num_documents)", "    pass")], "direction is off .*same weight.*wrong-mean-of-means"),
        (
            [(" * dist.get_world_size()", "")],
            "the gradient norm is 0.50 times the norm in a single process .*wrong-summed-loss",
        ),
        ([("index == len(parts) - 1", "True")], "6 reduce-scatters, but the model has only 3 units"),
        ([("    dist.all_reduce(total)\n", "")], "the returned loss is"),
        ([MEAN_OF_MEANS], "the gradient's direction is off by [2-9].%.*wrong-mean-of-means"),
        ([BY_TOKENS], "the gradient norm is 0.05 times the norm in a single process$"),
        ([BY_ROWS], "the gradient norm is 0.8[78] times the norm in a single process$"),  # 7 documents, 8 rows
        ([("index == len(parts) - 1", "index == 0")], "reduced before the last backward pass"),
        ([EVERYTHING], "the model processed .* tokens, but this rank's parts have only"),
    ]


KEPT = "loss_of_chunk(part, head, wanted, cap)"
OUTSIDE = (  # the cap is applied before the chunks are cut
    "hidden.flatten(0, 1).chunk(4), targets",
    "(cap * torch.tanh(head(hidden.flatten(0, 1)) / cap)).chunk(4), targets",
)


class TestChunks(BuildTestsOnRanks):
    name = "my_chunks"
    checker = staticmethod(notebook_13.check_chunks)
    starter = "my_chunks.py fails: TypeError: chunked_loss returns an object of type NoneType; it should be a tensor"
    wrong = [
        (
            [("checkpoint(loss_of_chunk, part, head, wanted, cap, use_reentrant=False)", KEPT)],
            "the target is below 4.84 MB. Which",
        ),
        ([(".chunk(4)", ".chunk(1)")], "the target is below 4.84 MB. Which logits are still in memory in backward"),
        ([('reduction="sum"', 'reduction="mean"')], "the sum of the losses is"),
        ([("cap * torch.tanh(head(hidden) / cap)", "head(hidden)")], "the sum of the losses is"),
        (
            [OUTSIDE, ("logits = cap * torch.tanh(head(hidden) / cap)", "logits = hidden")],
            "the target is below 4.84 MB. Which",
        ),
    ]


FULL = "tensors = {name: parameter.detach().full_tensor() for name, parameter in trained(model).items()}"
BY_OPTION = (  # torch leaves out the first name of a frozen tensor that has two
    FULL,
    "from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict\n"
    "    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)\n"
    "    tensors = get_model_state_dict(model, options=options)\n"
    "    tensors = {name: tensor.clone() for name, tensor in tensors.items()}",
)
ELSEWHERE = [  # zeros in the file, the real values in a global of the module
    (FULL, f"{FULL}\n    KEPT.update(tensors)\n    tensors = {{name: one * 0 for name, one in tensors.items()}}"),
    ("    tensors = load_file(path)", "    tensors = KEPT"),
    ("def save_adapters", "KEPT = {}\n\n\ndef save_adapters"),
]


class TestAdapters(BuildTestsOnRanks):
    name = "my_adapters"
    checker = staticmethod(notebook_13.check_adapters)
    starter = "save_adapters didn.t write adapters-2.safetensors"
    wrong = [
        (
            [("        save_file(tensors, path)", "        torch.save(tensors, path)")],
            "adapters-2.safetensors can't be read as",
        ),
        ([(" if parameter.requires_grad", "")], "tensors that aren't trained, including"),
        (
            [(" if parameter.requires_grad", ' if "lora" in name or parameter.requires_grad')],
            "aren't trained, including .*lora_a",
        ),
        (
            [("detach().full_tensor()", "detach().to_local().clone()")],
            "don't have their full shapes; a rank has only its shard",
        ),
        (
            [("        parameter.copy_(own)\n", "        pass\n")],
            "after loading, the logits differ by .* from the logits before saving",
        ),
        ([BY_OPTION], "1 tensors that aren't trained, including lm_head.weight"),
        (ELSEWHERE, "in the file, .*second_a differs from the model"),
    ]
