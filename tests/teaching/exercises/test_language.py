"""The build exercises of notebook 13."""

from builds import BuildTestsOnRanks

from fsdp_helpers.teaching.exercises import language

BY_TOKENS_ALONE = (  # a mean over each part's own tokens
    "loss = model(numbers, targets) / num_tokens",
    "loss = model(numbers, targets) / (targets != -100).sum() / len(parts) / dist.get_world_size()",
)


class TestTokenLoss(BuildTestsOnRanks):
    name = "my_tokens"
    checker = staticmethod(language.check_token_loss)
    worker = staticmethod(language.tokens_by_reader)
    starter = "on 2 ranks, rank 0: nothing was reduced"
    wrong = [
        ([("    dist.all_reduce(num_tokens)", "    pass")], "the gradient is .* times as long as in one"),
        (
            [(" * dist.get_world_size()", "")],
            "the gradient is 0.500 times as long as in one process .*wrong-summed-loss",
        ),
        ([("index == len(parts) - 1", "True")], "6 reduce-scatters were seen; the model has 3 units"),
        ([("    dist.all_reduce(total)\n", "")], "the loss returned is"),
        ([BY_TOKENS_ALONE], "the gradient is .* one process"),
    ]


KEPT = "loss_of_chunk(part, head, wanted)"


class TestChunks(BuildTestsOnRanks):
    name = "my_chunks"
    checker = staticmethod(language.check_chunks)
    worker = staticmethod(language.chunks_by_reader)
    starter = "my_chunks.py fails: TypeError: chunked_loss returns a NoneType; a tensor is asked for"
    wrong = [
        (
            [("checkpoint(loss_of_chunk, part, head, wanted, use_reentrant=False)", KEPT)],
            "6.14 MB, the target is below 4.84 MB; which",
        ),
        ([(".chunk(4)", ".chunk(1)")], "the target is below 4.84 MB; which logits does backward still have"),
        ([('reduction="sum"', 'reduction="mean"')], "the sum of the losses is"),
    ]


class TestAdapters(BuildTestsOnRanks):
    name = "my_adapters"
    checker = staticmethod(language.check_adapters)
    worker = staticmethod(language.adapters_by_reader)
    file = "adapters-2.safetensors"
    starter = "adapters-2.safetensors cannot be read: FileNotFoundError"
    wrong = [
        ([(" if parameter.requires_grad", "")], "tensors that are not trained, .* among them"),
        ([("detach().full_tensor()", "detach().to_local().clone()")], "are not whole; a rank has its rows"),
        ([("        parameter.copy_(own)\n", "        pass\n")], "after loading, logits are .* off those"),
    ]
