"""The exercises of notebook 06: right answers pass, plausible wrong ones do not."""

import math

import pytest
from small_exercises import FunctionTests, refused, table

from fsdp_helpers.teaching.exercises import checkpointing


def rows_a_rank(num_rows, ranks):
    return -(-num_rows // ranks)


def overlapping(num_rows, saved, loading, rank):
    """A rank's rows begin before an old rank's end, and the other way round."""
    old, new = rows_a_rank(num_rows, saved), rows_a_rank(num_rows, loading)
    end = min((rank + 1) * new, num_rows)
    return [r for r in range(saved) if r * old < end and rank * new < min((r + 1) * old, num_rows)]


def owners(num_rows, saved, loading, rank):
    """Row by row: who wrote it?"""
    new = rows_a_rank(num_rows, loading)
    mine = range(min(rank * new, num_rows), min((rank + 1) * new, num_rows))
    return {row // rows_a_rank(num_rows, saved) for row in mine}


def last_rank_too_far(num_rows, saved, loading, rank):
    """Off by one: also the rank whose rows begin where mine end; wrong for 12 rows, 4 -> 4."""
    old, new = rows_a_rank(num_rows, saved), rows_a_rank(num_rows, loading)
    end = min((rank + 1) * new, num_rows)
    return [r for r in range(saved) if r * old <= end and rank * new < min((r + 1) * old, num_rows)]


def ranks_without_rows(num_rows, saved, loading, rank):
    """A rank beyond the last row takes the last file; wrong for 5 rows, 4 -> 4."""
    return overlapping(num_rows, saved, loading, rank) or [rows_a_rank(num_rows, rows_a_rank(num_rows, saved)) - 1]


class TestCheckpointBytes(FunctionTests):
    checker = staticmethod(checkpointing.check_checkpoint_bytes)
    right = [lambda p: 12 * p, lambda p: 3.0 * p * 4]
    wrong = [
        lambda p: 16 * p,
        lambda p: 4 * p,
        lambda p: 8 * p,
        table({(1_199_882,): 14_398_584, (7 * 10**9,): 84 * 10**9}),  # the lazy one
    ]
    far_off = staticmethod(lambda p: 5)
    right_says = "14,398,584"


class TestRanksToRead(FunctionTests):
    checker = staticmethod(checkpointing.check_ranks_to_read)
    right = [overlapping, owners, lambda *case: tuple(overlapping(*case))]
    wrong = [
        lambda num_rows, saved, loading, rank: list(range(saved)),  # all of them: too many
        lambda num_rows, saved, loading, rank: [rank],
        last_rank_too_far,
        ranks_without_rows,
        lambda *case: 2 * overlapping(*case),
        table({(12, 4, 4, 0): [0], (12, 4, 4, 1): [1], (12, 4, 4, 2): [2], (12, 4, 4, 3): [3]}),  # the lazy one
    ]
    far_off = staticmethod(lambda *case: [1])
    right_says = "[0]"

    @pytest.mark.parametrize(
        "answer, message",
        [
            (last_rank_too_far, "12 rows, written by 4 ranks and read by 4: rank 0 keeps rows 0 to 2"),
            (ranks_without_rows, "5 rows, written by 4 ranks and read by 4: rank 3 keeps no rows"),
        ],
    )
    def test_off_by_ones_are_found_where_ranks_stay_the_same(self, answer, message):
        assert message in refused(self.checker, answer)


class TestSavingInterval(FunctionTests):
    checker = staticmethod(checkpointing.check_saving_interval)
    right = [
        lambda save_s, between_s: (2 * save_s * between_s) ** 0.5,
        lambda *times: math.sqrt(math.prod(times) * 2),
        # 1,315.2 s instead of 1,314.5 s for 10 s and a day: as good as the best
        lambda save_s, between_s: 1_315.2 / 1_314.534 * (2 * save_s * between_s) ** 0.5,
        lambda save_s, between_s: math.ceil((2 * save_s * between_s) ** 0.5),
    ]
    wrong = [
        lambda save_s, between_s: (save_s * between_s) ** 0.5,
        lambda save_s, between_s: 1.03 * (2 * save_s * between_s) ** 0.5,
        lambda save_s, between_s: between_s / 2,
        lambda save_s, between_s: 0,
        table({(10.0, 86_400.0): (2 * 10 * 86_400) ** 0.5}),  # the lazy one
    ]
    far_off = staticmethod(lambda *times: 5)
    right_says = "1,314.5"

    def test_an_interval_as_good_as_the_best_is_accepted(self):
        """10 s and a day: 1,314.5 s lose the least, and 1,315.2 s as little."""
        chosen = {(10.0, 86_400.0): 1_315.2}
        assert self.checker(
            lambda save_s, between_s: chosen.get((save_s, between_s), (2 * save_s * between_s) ** 0.5)
        ).startswith("Right")
