"""The exercises of notebook 03: right answers pass, plausible wrong ones do not."""

from dataclasses import replace

from small_exercises import UNDER_LIMITS, RunTests, attempt, refused

from fsdp_helpers.teaching.exercises import fsdp

FSDP = {"strategy": "fsdp", "global_batch_size": 96}


class TestLowerPeak(RunTests):
    checker = staticmethod(fsdp.check_lower_peak)
    right = [
        attempt(29_000_000, world_size=4, **FSDP),
        attempt(UNDER_LIMITS, world_size=3, **{**FSDP, "strategy": "fsdp-auto-wrap"}),
    ]
    missed = [
        (attempt(36_000_000, **FSDP), "peaks at 36.0 MB on a rank, the target is below 30.0 MB"),
        (attempt(UNDER_LIMITS, **{**FSDP, "global_batch_size": 48}), "leaves global_batch_size at 96; your run has 48"),
        (attempt(UNDER_LIMITS, **FSDP, precision="bf16"), "leaves precision"),
        (attempt(UNDER_LIMITS, **FSDP, activation_checkpointing="units"), "leaves activation_checkpointing"),
        (attempt(UNDER_LIMITS, **FSDP, micro_batches=2), "leaves micro_batches"),
        (attempt(UNDER_LIMITS, world_size=12, **{**FSDP, "strategy": "ddp"}), "about strategy fsdp or fsdp-auto-wrap"),
    ]
    wrong = [attempt(UNDER_LIMITS, **FSDP, model="simple")]  # it changes what the text leaves as it is

    def test_a_single_rank_above_the_limit_is_found(self):
        record = attempt(UNDER_LIMITS, world_size=3, **FSDP)
        too_high = replace(record.ranks[1], peak_bytes=36_000_000)
        told = refused(self.checker, replace(record, ranks=(record.ranks[0], too_high, record.ranks[2])))
        assert "the run peaks at 36.0 MB on a rank" in told
