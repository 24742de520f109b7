"""The checker of unnamed faults: it accepts what is right, refuses each wrong part, and draws anew."""

import pytest

from fsdp_helpers.teaching.exercises import notebook_11
from fsdp_helpers.teaching.exercises.answers import NotYet
from fsdp_helpers.teaching.exercises.notebook_11 import cause_of, check_diagnosis, draw
from fsdp_helpers.teaching.failures import gallery
from fsdp_helpers.teaching.failures.gallery import RUN, Seen


@pytest.fixture
def cases(monkeypatch):
    """Five cases, without their ranks."""
    monkeypatch.setattr(gallery, "run_broken", lambda failure: Seen(error=failure.says or "a number that is wrong"))
    return draw(seed=3)


def right_answers(cases):
    letters = {fix: letter for letter, fix in cases.fixes.items()}
    return {
        number: (case.fault.symptom, cause_of(case.fault), letters[case.fault.fix])
        for number, case in enumerate(cases.cases, start=1)
    }


def test_right_answers_are_accepted(cases):
    assert "All 5 faults found" in check_diagnosis(cases, right_answers(cases))


def test_each_wrong_part_is_refused_and_the_right_one_not_given_away(cases):
    answers = right_answers(cases)
    symptom, cause, letter = answers[2]
    wrong = {
        "that isn't this case's symptom": ("slow" if symptom != "slow" else "hang", cause, letter),
        "looks different": (symptom, cause_of(next(one for one in RUN if cause_of(one) != cause)), letter),
        "doesn't address it": (symptom, cause, next(other for other in cases.fixes if other != letter)),
        "isn't one of the symptoms": ("no idea", cause, letter),
        "isn't one of the causes": (symptom, "no idea", letter),
        "isn't one of the letters": (symptom, cause, "z"),
        "answer with a tuple": "hang",
        "replace the ...": ...,
    }
    for said, answer in wrong.items():
        with pytest.raises(NotYet) as refused:
            check_diagnosis(cases, {**answers, 2: answer})
        assert said in str(refused.value)
        if cause not in str(answer):
            assert cause not in str(refused.value)


def test_each_draw_is_different_and_a_seed_repeats_it(cases):
    def names(cases):
        return [case.fault.name for case in cases.cases]

    assert names(draw(seed=3)) == names(cases)
    assert len({tuple(names(draw())) for _ in range(5)}) > 1
    assert len(cases.fixes) == notebook_11.NUM_FIXES and len(set(names(cases))) == 5


def test_the_page_does_not_name_the_fault(cases):
    page = cases._repr_markdown_()
    assert not any(case.fault.name in page + repr(cases) + repr(case) for case in cases.cases)
    assert not any(case.fault.broken.__name__ in page for case in cases.cases)
    assert page.count("def broken_run(rank: int, world_size: int) -> Numbers:") == len(cases.cases), "its code is shown"
    assert all(f"`{cause_of(failure)}`" in notebook_11.causes().data for failure in RUN)


def test_fixes_are_all_different():
    assert len({failure.fix for failure in RUN}) == len(RUN)
