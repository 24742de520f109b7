"""The exercises of notebook 04: right answers pass, plausible wrong ones do not."""

from dataclasses import replace

from small_exercises import UNDER_LIMITS, RunTests, attempt, refused

from fsdp_helpers.teaching.exercises import auto_wrap

CUT = {"model": "deep", "strategy": "fsdp-auto-wrap", "global_batch_size": 32}


class TestThreshold(RunTests):
    checker = staticmethod(auto_wrap.check_threshold)
    right = [
        attempt(UNDER_LIMITS, num_collectives=8, **CUT),
        attempt(UNDER_LIMITS, num_collectives=9, **CUT, min_num_params=5_000_000),
    ]
    missed = [
        (attempt(1_500_000_000, num_collectives=5, **CUT), "peaks at 1.50 GB"),
        (attempt(UNDER_LIMITS, num_collectives=17, **CUT), "17 collectives a step, the target is at most 9"),
        (attempt(UNDER_LIMITS, **{**CUT, "model": "shallow"}), "leaves model at 'deep'; your run has 'shallow'"),
        (attempt(UNDER_LIMITS, **{**CUT, "strategy": "ddp"}), "about strategy fsdp-auto-wrap; your run has 'ddp'"),
        (attempt(UNDER_LIMITS, world_size=4, **CUT), r"about 2 rank\(s\); your run has 4"),
        (attempt(UNDER_LIMITS, **CUT, api="fsdp1"), "leaves api at 'fsdp2'"),
        (attempt(UNDER_LIMITS, **CUT, reshard_after_forward=False), "leaves reshard_after_forward at True"),
    ]
    wrong = [attempt(UNDER_LIMITS, **{**CUT, "global_batch_size": 2})]  # it changes what the text leaves as it is

    def test_a_single_rank_with_too_many_collectives_is_found(self):
        record = attempt(UNDER_LIMITS, **CUT)
        counted = attempt(UNDER_LIMITS, num_collectives=17, **CUT).ranks[1].collectives
        too_many = replace(record.ranks[0], collectives=counted)
        told = refused(self.checker, replace(record, ranks=(too_many, record.ranks[1])))
        assert "17 collectives a step" in told
