"""The exercises of notebook 07: right answers pass, plausible wrong ones do not."""

from small_exercises import UNDER_LIMITS, RunTests, attempt

from fsdp_helpers.teaching.exercises import levers

VIT = {"model": "vit-deep", "strategy": "fsdp-auto-wrap", "global_batch_size": 64, "precision": "bf16"}


class TestLevers(RunTests):
    checker = staticmethod(levers.check_levers)
    right = [
        attempt(75_000_000, **VIT),
        attempt(UNDER_LIMITS, **VIT, micro_batches=4, sync_micro_batches=True, api="fsdp1"),
    ]
    missed = [
        (attempt(90_000_000, **VIT), "peaks at 90.0 MB"),
        (attempt(UNDER_LIMITS, **VIT, activation_checkpointing="units"), "leaves activation_checkpointing at 'none'"),
        (attempt(UNDER_LIMITS, **VIT, activation_checkpointing="selective"), "leaves activation_checkpointing"),
        (attempt(UNDER_LIMITS, **{**VIT, "global_batch_size": 32}), "leaves global_batch_size at 64; your run has 32"),
        (attempt(UNDER_LIMITS, **{**VIT, "model": "vit"}), "leaves model at 'vit-deep'; your run has 'vit'"),
        (attempt(UNDER_LIMITS, world_size=4, **VIT), r"about 2 rank\(s\)"),
    ]
    wrong = [attempt(UNDER_LIMITS, **VIT, dropout=False)]  # it changes what the text leaves as it is
