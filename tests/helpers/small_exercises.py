"""What is tried with every small exercise; the tests of its chapter say which one, and with which answers."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from runs import tiny_record

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.records import CollectiveCount, RunRecord
from fsdp_helpers.teaching.exercises.answers import NotYet

UNDER_LIMITS = 20_000_000  # bytes, below the target of every exercise with a peak


def table(known: dict) -> Callable:
    """The lazy answer: what was right for some tested points, and nothing for the others."""
    return lambda *point: known.get(point, 0)


def refused(checker: Callable, answer: Any) -> str:
    """The one line in which an answer is refused."""
    with pytest.raises(NotYet) as caught:
        checker(answer)
    (line,) = str(caught.value).splitlines()
    return line


class ExerciseTests:
    """Tests of one exercise; a subclass gives its checker and answers."""

    checker: Callable[[Any], str]
    right: list
    wrong: list  # the lazy answer among them

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        cases = {"right_answer": self.right, "wrong_answer": self.wrong, "missed": getattr(self, "missed", [])}
        for name, answers in cases.items():
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, answers, ids=map(str, range(len(answers))))

    def test_right_answers_are_accepted(self, right_answer):
        assert self.checker(right_answer).startswith("Right: ")

    def test_wrong_and_lazy_answers_are_refused_in_one_line(self, wrong_answer):
        refused(self.checker, wrong_answer)

    @pytest.mark.parametrize(
        "answer, said",
        [(..., "replace the ... with your answer"), (None, "the answer is None; put yours in its place")],
    )
    def test_the_starter_fails_loudly(self, answer, said):
        assert said in refused(self.checker, answer)

    @pytest.mark.parametrize("answer", ["64", [1, 2], {}, True, float("nan"), 10**400])
    def test_an_answer_of_another_kind(self, answer):
        refused(self.checker, answer)


class AnswerTests(ExerciseTests):
    """Tests of an exercise whose answer is a number; `far_off` is a first miss, which is told nothing of `right_says`."""

    far_off: Any
    right_says: str

    def test_a_miss_does_not_give_the_answer(self):
        assert self.right_says not in refused(self.checker, self.far_off)


def fails(*numbers):
    raise KeyError("no\nsuch number")


class FunctionTests(AnswerTests):
    """Tests of an exercise whose answer is a function."""

    @pytest.mark.parametrize("given", [..., None, "many", object(), float("inf"), True, ["2"], 1 + 2j, 10**400])
    def test_a_function_that_returns_another_kind(self, given):
        refused(self.checker, lambda *numbers: given)

    @pytest.mark.parametrize("function, error", [(fails, "KeyError: 'no"), (lambda: 1, "TypeError: .* argument")])
    def test_a_function_that_fails_is_told_its_own_error(self, function, error):
        assert re.search(f"fails: {error}", refused(self.checker, function))


class RunTests(ExerciseTests):
    """Tests of an exercise whose answer is the record of a run; `missed` has records, and what is said of each."""

    missed: list[tuple[RunRecord, str]]

    def test_runs_that_miss_or_cheat_are_told_so(self, missed):
        record, message = missed
        with pytest.raises(NotYet, match=message):
            self.checker(record)


def attempt(peak_bytes=1, *, world_size=2, held_bytes=0, num_collectives=1, **settings) -> RunRecord:
    """The record of a run that never was. Peak and collectives are those of its last rank; the others have fewer."""

    def rank(number):
        counted = num_collectives if number == world_size - 1 else 1
        counts = (CollectiveCount(op="all_gather", count=counted, bytes=4, sent_bytes=2),)
        peak = peak_bytes if number == world_size - 1 else min(peak_bytes, 1)
        return replace(blank.ranks[0], rank=number, peak_bytes=peak, held_bytes=held_bytes, collectives=counts)

    blank = tiny_record()
    ranks = tuple(rank(number) for number in range(world_size))
    return replace(blank, config=TrainConfig(**settings), world_size=world_size, ranks=ranks)
