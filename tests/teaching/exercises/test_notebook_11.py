"""The checker of unnamed faults: it accepts what is right, refuses each wrong part, and draws anew."""

import pytest

from fsdp_helpers.teaching.exercises import notebook_11
from fsdp_helpers.teaching.exercises.answers import NotYet
from fsdp_helpers.teaching.exercises.notebook_11 import Case, cause_of, check_diagnosis, draw, symptom_of, unseen_cards
from fsdp_helpers.teaching.run_failure import Outcome


@pytest.fixture
def cases(monkeypatch):
    """Five cases, without their ranks."""
    monkeypatch.setattr(notebook_11, "run", lambda name, code: Outcome((f"an error in {name}.py",), ""))
    return draw(seed=3)


def right_answers(cases):
    letters = {fix: letter for letter, fix in cases.fixes.items()}
    return {
        number: (symptom_of(case.card), cause_of(case.card), letters[case.card.part("The fix")])
        for number, case in enumerate(cases.cases, start=1)
    }


def test_right_answers_are_accepted(cases):
    assert "All 5 faults found" in check_diagnosis(cases, right_answers(cases))


def test_each_wrong_part_is_refused_and_the_right_one_not_given_away(cases):
    answers = right_answers(cases)
    symptom, cause, letter = answers[2]
    wrong = {
        "that isn't this case's symptom": ("slow" if symptom != "slow" else "hang", cause, letter),
        "looks different": (
            symptom,
            cause_of(next(card for card in unseen_cards() if cause_of(card) != cause)),
            letter,
        ),
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
        return [case.card.name for case in cases.cases]

    assert names(draw(seed=3)) == names(cases)
    assert len({tuple(names(draw())) for _ in range(5)}) > 1
    assert len(cases.fixes) == notebook_11.NUM_FIXES and len(set(names(cases))) == 5


def test_the_page_does_not_name_the_fault(cases):
    page = cases._repr_markdown_()
    assert not any(case.card.name in page + repr(cases) + repr(case) for case in cases.cases)
    assert "# broken" not in page and "# fixed" not in page and not any(case.card.title in page for case in cases.cases)
    assert page.count("import torch") >= len(cases.cases), "its code is shown"
    assert all(f"`{cause_of(card)}`" in notebook_11.causes().data for card in unseen_cards())


def test_fixes_are_all_different_and_the_chapter_shows_other_failures():
    fixes = [card.part("The fix") for card in unseen_cards()]
    assert len(set(fixes)) == len(fixes) and not {card.name for card in unseen_cards()} & set(notebook_11.SHOWN)


def test_a_case_says_what_its_script_says_without_the_mark_of_the_quoted_line():
    (case,) = draw(seed=5, num_cases=1).cases
    assert case.outcome.errors and case.outcome.errors[0] in notebook_11.as_markdown(1, case)
    marked = Case(
        case.card, Outcome(("rank 0 in `model = None  # broken: why`\nTypeError: no model",), 'in "/home/me/x.py"')
    )
    assert 'rank 0 in `model = None`\nTypeError: no model\nin "x.py"' in notebook_11.as_markdown(1, marked)
