import math
import re
from dataclasses import replace
from fractions import Fraction
from html import unescape
from inspect import signature
from textwrap import indent

import nbformat
import pytest
from IPython.core.formatters import DisplayFormatter
from IPython.core.interactiveshell import InteractiveShell
from leftovers import PROJECT
from runs import tiny_record
from traitlets.config import Config

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.records import CollectiveCount
from fsdp_helpers.teaching.exercises import (
    answers,
    auto_wrap,
    checkpointing,
    ddp,
    fsdp,
    levers,
    memory,
    offload,
    real_model,
)
from fsdp_helpers.teaching.exercises.answers import NotYet

CHAPTERS = (memory, ddp, fsdp, auto_wrap, offload, checkpointing, levers, real_model)
DOTS = "    return ...\n"
SOLUTION = re.compile(r"<summary>Solution</summary>(?:<code>(return .*?)</code>|.*?```python\n(.*?)```)", re.DOTALL)


def table(known):
    """The lazy answer: what was right for some tested points, and nothing for the others."""
    return lambda *point: known.get(point, 0)


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


# checker, right answers, wrong answers, the lazy one
CHECKERS = [
    # 64 x 5 x 5 = 1,600 weights a kernel; 128 kernels and 128 biases: 204,800 + 128
    (memory.check_parameter_count, [204_928, 204_928.0], [204_800, 64 * 5 * 5 + 128, 128 * 64 * 25 + 64], 0),
    (
        memory.check_largest_model,
        [lambda size: size // 16, lambda size: math.floor(Fraction(size, 16))],
        [lambda size: size / 16, lambda size: size // 4, lambda size: size // 20, lambda size: size // 16 + 1],
        table({(0,): 0, (15,): 0, (16,): 1, (31,): 1, (8 * 10**9,): 5 * 10**8}),
    ),
    (
        ddp.check_smallest_bucket,
        # latency / (latency + part / speed) = 1 / 10, so a part is sent in nine times the latency
        [lambda n, latency, speed: 9 * n * latency * speed, lambda *link: math.ceil(9 * math.prod(link))],
        [
            lambda n, latency, speed: 10 * n * latency * speed,  # a tenth of the sending alone
            lambda n, latency, speed: 9 * latency * speed,  # a part, not the bucket
            lambda n, latency, speed: 9 * 2 * (n - 1) * latency * speed,  # the whole bucket in every pass
            lambda n, latency, speed: 25 * 2**20,  # DDP's default
            lambda n, latency, speed: -9 * n * latency * speed,
        ],
        table({(2, 1e-5, 1e10): 1.8e6, (8, 1e-5, 1e10): 7.2e6, (8, 2e-5, 1e10): 14.4e6}),
    ),
    (
        offload.check_offload_split,
        [lambda p, n: (0, 16 * p / n), lambda p, n: [0.0, 16 * p // n]],
        [lambda p, n: (4 * p / n, 12 * p / n), lambda p, n: (0, 16 * p), lambda p, n: (16 * p / n, 0)],
        table({(1_000_000, 1): (0, 16_000_000), (94_104_234, 2): (0, 752_833_872)}),
    ),
    (
        offload.check_images_to_hide,
        [
            lambda p, root, n, image_s, speed: math.ceil(4 * (2 * p - root) / n / speed / image_s),
            lambda p, root, n, image_s, speed: next(
                images for images in range(1, 10**4) if images * image_s >= 4 * ((p - root) * 2 + root) / (n * speed)
            ),
        ],
        [
            lambda p, root, n, image_s, speed: math.ceil(4 * p / n / speed / image_s),  # gathered once
            lambda p, root, n, image_s, speed: math.ceil(8 * p / n / speed / image_s),  # the root twice as well
            lambda p, root, n, image_s, speed: math.ceil(4 * (3 * p - root) / n / speed / image_s),  # one way at a time
            lambda p, root, n, image_s, speed: math.ceil(4 * (2 * p - root) / speed / image_s),  # whole tensors
            lambda p, root, n, image_s, speed: int(4 * (2 * p - root) / n / speed / image_s),  # rounded down
            lambda p, root, n, image_s, speed: 4 * (2 * p - root) / n / speed / image_s,  # a part of an image
        ],
        table({(1_000_000, 0, 1, 1e-3, 1e9): 8, (1_000_000, 1_000_000, 1, 1e-3, 1e9): 4}),
    ),
    (
        checkpointing.check_checkpoint_bytes,
        [lambda p: 12 * p, lambda p: 3.0 * p * 4],
        [lambda p: 16 * p, lambda p: 4 * p, lambda p: 8 * p],
        table({(1_199_882,): 14_398_584, (7 * 10**9,): 84 * 10**9}),
    ),
    (
        checkpointing.check_ranks_to_read,
        [overlapping, owners, lambda *case: tuple(overlapping(*case))],
        [
            lambda num_rows, saved, loading, rank: list(range(saved)),  # all of them: too many
            lambda num_rows, saved, loading, rank: [rank],
            last_rank_too_far,
            ranks_without_rows,
            lambda *case: 2 * overlapping(*case),
        ],
        table({(12, 4, 4, 0): [0], (12, 4, 4, 1): [1], (12, 4, 4, 2): [2], (12, 4, 4, 3): [3]}),
    ),
    (
        checkpointing.check_saving_interval,
        [
            lambda save_s, between_s: (2 * save_s * between_s) ** 0.5,
            lambda *times: math.sqrt(math.prod(times) * 2),
            # 1,315.2 s instead of 1,314.5 s for 10 s and a day: as good as the best
            lambda save_s, between_s: 1_315.2 / 1_314.534 * (2 * save_s * between_s) ** 0.5,
            lambda save_s, between_s: math.ceil((2 * save_s * between_s) ** 0.5),
        ],
        [
            lambda save_s, between_s: (save_s * between_s) ** 0.5,
            lambda save_s, between_s: 1.03 * (2 * save_s * between_s) ** 0.5,
            lambda save_s, between_s: between_s / 2,
            lambda save_s, between_s: 0,
        ],
        table({(10.0, 86_400.0): (2 * 10 * 86_400) ** 0.5}),
    ),
]
FUNCTIONS = [row[0] for row in CHECKERS if row[0] is not memory.check_parameter_count]


# ---------------------------------------------------------------- runs


def attempt(peak_bytes=1, *, world_size=2, held_bytes=0, num_collectives=1, **settings):
    """The record of a run that never was. Peak and collectives are those of its last rank; the others have fewer."""

    def rank(number):
        counted = num_collectives if number == world_size - 1 else 1
        counts = (CollectiveCount(op="all_gather", count=counted, bytes=4, sent_bytes=2),)
        peak = peak_bytes if number == world_size - 1 else min(peak_bytes, 1)
        return replace(blank.ranks[0], rank=number, peak_bytes=peak, held_bytes=held_bytes, collectives=counts)

    blank = tiny_record()
    ranks = tuple(rank(number) for number in range(world_size))
    return replace(blank, config=TrainConfig(**settings), world_size=world_size, ranks=ranks)


def local(batch, peak_bytes, **settings):
    return attempt(peak_bytes, world_size=1, held_bytes=19_200_000, global_batch_size=batch, **settings)


FSDP = {"strategy": "fsdp", "global_batch_size": 96}
CUT = {"model": "deep", "strategy": "fsdp-auto-wrap", "global_batch_size": 32}
VIT = {"model": "vit-deep", "strategy": "fsdp-auto-wrap", "global_batch_size": 64, "precision": "bf16"}
HIGH = 20_000_000

# As above, with records; the lazy one changes what its text leaves as it is.
RUNS = [
    (
        memory.check_largest_batch,
        # 19.2 MB are held and 0.55 MB an image comes on top: 54.4 MB with 64 images, 89.6 MB with 128
        [local(64, 54_400_000), local(64, 54_400_000, seed=1, max_steps=5)],
        [
            (local(128, 89_600_000), "target is below 60.0 MB"),
            (local(1, 19_750_000), "next power of two would still fit"),
            (local(32, 36_800_000), "next power of two would still fit"),
            (local(72, 58_800_000), "no power of two"),
            (local(64, None), "run of one step"),
            (local(128, 50_000_000, dropout=False), "leaves dropout at True; your run has False"),
            (attempt(HIGH, strategy="ddp"), "about strategy local; your run has 'ddp'"),
        ],
        local(64, 54_400_000, model="simple"),
    ),
    (
        fsdp.check_lower_peak,
        [
            attempt(29_000_000, world_size=4, **FSDP),
            attempt(HIGH, world_size=3, **{**FSDP, "strategy": "fsdp-auto-wrap"}),
        ],
        [
            (attempt(36_000_000, **FSDP), "peaks at 36.0 MB on a rank, the target is below 30.0 MB"),
            (attempt(HIGH, **{**FSDP, "global_batch_size": 48}), "leaves global_batch_size at 96; your run has 48"),
            (attempt(HIGH, **FSDP, precision="bf16"), "leaves precision"),
            (attempt(HIGH, **FSDP, activation_checkpointing="units"), "leaves activation_checkpointing"),
            (attempt(HIGH, **FSDP, micro_batches=2), "leaves micro_batches"),
            (attempt(HIGH, world_size=12, **{**FSDP, "strategy": "ddp"}), "about strategy fsdp or fsdp-auto-wrap"),
        ],
        attempt(HIGH, **FSDP, model="simple"),
    ),
    (
        auto_wrap.check_threshold,
        [attempt(HIGH, num_collectives=8, **CUT), attempt(HIGH, num_collectives=9, **CUT, min_num_params=5_000_000)],
        [
            (attempt(1_500_000_000, num_collectives=5, **CUT), "peaks at 1.50 GB"),
            (attempt(HIGH, num_collectives=17, **CUT), "17 collectives a step, the target is at most 9"),
            (attempt(HIGH, **{**CUT, "model": "shallow"}), "leaves model at 'deep'; your run has 'shallow'"),
            (attempt(HIGH, **{**CUT, "strategy": "ddp"}), "about strategy fsdp-auto-wrap; your run has 'ddp'"),
            (attempt(HIGH, world_size=4, **CUT), r"about 2 rank\(s\); your run has 4"),
            (attempt(HIGH, **CUT, api="fsdp1"), "leaves api at 'fsdp2'"),
            (attempt(HIGH, **CUT, reshard_after_forward=False), "leaves reshard_after_forward at True"),
        ],
        attempt(HIGH, **{**CUT, "global_batch_size": 2}),
    ),
    (
        levers.check_levers,
        [attempt(75_000_000, **VIT), attempt(HIGH, **VIT, micro_batches=4, sync_micro_batches=True, api="fsdp1")],
        [
            (attempt(90_000_000, **VIT), "peaks at 90.0 MB"),
            (attempt(HIGH, **VIT, activation_checkpointing="units"), "leaves activation_checkpointing at 'none'"),
            (attempt(HIGH, **VIT, activation_checkpointing="selective"), "leaves activation_checkpointing"),
            (attempt(HIGH, **{**VIT, "global_batch_size": 32}), "leaves global_batch_size at 64; your run has 32"),
            (attempt(HIGH, **{**VIT, "model": "vit"}), "leaves model at 'vit-deep'; your run has 'vit'"),
            (attempt(HIGH, world_size=4, **VIT), r"about 2 rank\(s\)"),
        ],
        attempt(HIGH, **VIT, dropout=False),
    ),
]


# ---------------------------------------------------------------- every checker


def cases(rows: list, column: int) -> list:
    return [
        pytest.param(row[0], answer, id=f"{row[0].__name__}-{number}")
        for row in rows
        for number, answer in enumerate(row[column] if isinstance(row[column], list) else [row[column]])
    ]


@pytest.mark.parametrize("checker, answer", cases(CHECKERS + RUNS, 1))
def test_right_answers_are_accepted(checker, answer):
    assert checker(answer).startswith("Right: ")


@pytest.mark.parametrize("checker, answer", cases(CHECKERS, 2) + cases(CHECKERS + RUNS, 3))
def test_wrong_and_lazy_answers_are_rejected_in_one_line(checker, answer):
    with pytest.raises(NotYet) as rejected:
        checker(answer)
    assert len(str(rejected.value).splitlines()) == 1


def test_a_single_rank_above_the_limit_is_found():
    """Rank 1 of 3 has the highest peak, and the most collectives."""
    record = attempt(HIGH, world_size=3, **FSDP)
    too_high = replace(record.ranks[1], peak_bytes=36_000_000)
    with pytest.raises(NotYet, match="the run peaks at 36.0 MB on a rank"):
        fsdp.check_lower_peak(replace(record, ranks=(record.ranks[0], too_high, record.ranks[2])))
    cut = attempt(HIGH, **CUT)
    too_many = replace(cut.ranks[0], collectives=attempt(HIGH, num_collectives=17, **CUT).ranks[1].collectives)
    with pytest.raises(NotYet, match="17 collectives a step"):
        auto_wrap.check_threshold(replace(cut, ranks=(too_many, cut.ranks[1])))


@pytest.mark.parametrize("checker, refused", cases(RUNS, 2))
def test_runs_that_miss_or_cheat_are_told_so(checker, refused):
    record, message = refused
    with pytest.raises(NotYet, match=message):
        checker(record)


@pytest.mark.parametrize("checker", [row[0] for row in CHECKERS + RUNS])
@pytest.mark.parametrize("answer", [..., None])
def test_starters_fail_loudly(checker, answer):
    with pytest.raises(NotYet, match="replace the ... with your answer"):
        checker(answer)


@pytest.mark.parametrize("checker", [row[0] for row in CHECKERS + RUNS])
@pytest.mark.parametrize("answer", ["64", [1, 2], {}, True, float("nan"), 10**400])
def test_an_answer_of_another_kind(checker, answer):
    with pytest.raises(NotYet) as rejected:
        checker(answer)
    assert len(str(rejected.value).splitlines()) == 1


def test_an_interval_as_good_as_the_best_is_accepted():
    """10 s and a day: 1,314.5 s lose the least, and 1,315.2 s as little."""
    chosen = {(10.0, 86_400.0): 1_315.2}
    assert checkpointing.check_saving_interval(
        lambda save_s, between_s: chosen.get((save_s, between_s), (2 * save_s * between_s) ** 0.5)
    ).startswith("Right")


@pytest.mark.parametrize("checker", FUNCTIONS)
@pytest.mark.parametrize("given", [..., None, "many", object(), float("inf"), True, ["2"], 1 + 2j, 10**400])
def test_a_function_that_returns_another_kind(checker, given):
    with pytest.raises(NotYet) as rejected:
        checker(lambda *numbers: given)
    assert len(str(rejected.value).splitlines()) == 1


def fails(*numbers):
    raise KeyError("no\nsuch number")


@pytest.mark.parametrize("checker", FUNCTIONS)
@pytest.mark.parametrize("function, error", [(fails, "KeyError: 'no"), (lambda: 1, "TypeError: .* argument")])
def test_a_function_that_fails_is_told_its_own_error(checker, function, error):
    with pytest.raises(NotYet, match=f"fails: {error}") as rejected:
        checker(function)
    assert len(str(rejected.value).splitlines()) == 1


def test_messages_do_not_give_the_answer():
    """The first miss, with the edge cases: the numbers that would be right are not in it."""
    for checker, answer, right in (
        (memory.check_parameter_count, 1, "204,928"),
        (memory.check_largest_model, lambda size: size // 4, "16 "),
        (ddp.check_smallest_bucket, lambda n, latency, speed: 5, "1,800,000"),
        (offload.check_images_to_hide, lambda *link: 5, "8 images"),
        (offload.check_offload_split, lambda p, n: (0, 5), "16,000,000"),
        (checkpointing.check_checkpoint_bytes, lambda p: 5, "14,398,584"),
        (checkpointing.check_ranks_to_read, lambda *case: [1], "[0]"),
        (checkpointing.check_saving_interval, lambda *times: 5, "1,314.5"),
    ):
        with pytest.raises(NotYet) as rejected:
            checker(answer)
        assert right not in str(rejected.value)


@pytest.mark.parametrize(
    "answer, message",
    [
        (last_rank_too_far, "12 rows, written by 4 ranks and read by 4: rank 0 keeps rows 0 to 2"),
        (ranks_without_rows, "5 rows, written by 4 ranks and read by 4: rank 3 keeps no rows"),
    ],
)
def test_off_by_ones_are_found_where_ranks_stay_the_same(answer, message):
    with pytest.raises(NotYet, match=message):
        checkpointing.check_ranks_to_read(answer)


# ---------------------------------------------------------------- what is folded in the notebooks


def folded() -> list:
    """Each starter that ends in `return ...`, with the folded solution above it in that line's place."""
    found = []
    for path in sorted((PROJECT / "notebooks").glob("*.ipynb")):
        cells = nbformat.read(path, as_version=4).cells
        for text, starter in zip(cells, cells[1:], strict=False):
            if starter.cell_type == "code" and starter.source.startswith(("def ", "import")) and DOTS in starter.source:
                solution = SOLUTION.search(text.source)
                lines = indent(unescape(solution[1] or solution[2]), "    ")
                name = re.search(r"check_\w+", starter.source)[0]
                found.append(pytest.param(starter.source.replace(DOTS, lines), id=name))
    return found


@pytest.mark.parametrize("code", folded())
def test_the_folded_solution_is_accepted(code):
    """Run as the reader's cell; it raises NotYet if the checker refuses it."""
    checker = re.search(r"exercises\.(check_\w+)", code)[1]
    (chapter,) = [chapter for chapter in CHAPTERS if hasattr(chapter, checker)]
    exec(compile(code, "solution", "exec"), {"exercises": chapter})


def test_the_notebooks_have_these_small_exercises():
    assert len(folded()) == 9


def test_every_checker_is_in_a_table():
    """Here; `test_builds` tries those that take a module, `test_real_model` those of 08."""
    tested = {row[0].__name__ for row in CHECKERS + RUNS}
    found = [pair for chapter in CHAPTERS if chapter is not real_model for pair in vars(chapter).items()]
    small = {name for name, one in found if name.startswith("check_") and "module" not in signature(one).parameters}
    assert tested == small


def test_a_notebook_shows_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    shell = InteractiveShell(config=Config({"HistoryManager": {"enabled": False}}))
    shell.run_cell("from fsdp_helpers.teaching.exercises.memory import check_parameter_count as check; check(...)")
    said = capsys.readouterr()
    assert re.sub(r"\x1b\[[\d;]*m", "", said.out + said.err).strip() == "Not yet: replace the ... with your answer"


# ---------------------------------------------------------------- verdicts


@pytest.fixture
def nothing_solved(monkeypatch):
    monkeypatch.setattr("fsdp_helpers.teaching.exercises.answers._solved", set())


def test_what_is_solved_is_counted_once_for_each_notebook(nothing_solved):
    right = memory.check_parameter_count(204_928)
    assert (right.count, memory.check_parameter_count(204_928).count) == ("1 of 3 solved", "1 of 3 solved")
    assert memory.check_largest_model(lambda size: size // 16).count == "2 of 3 solved"
    assert checkpointing.check_checkpoint_bytes(lambda num_params: 12 * num_params).count.startswith("1 of ")  # of 06
    with pytest.raises(NotYet):
        memory.check_largest_batch(...)


def test_success_is_green_and_says_so_in_words(nothing_solved):
    formats, _ = DisplayFormatter().format(memory.check_parameter_count(204_928))
    assert formats["text/plain"] == "✓ Right: 204,928 parameters. (1 of 3 solved)"
    assert "✓ Right: 204,928 parameters. (1 of 3 solved)" in formats["text/html"]
    assert "color:#15803d" in formats["text/html"]


class Awkward(float):
    """A number that cannot be written with thousands separated."""

    def __format__(self, how):
        raise TypeError("no")


def test_an_answer_that_the_checker_did_not_expect_does_not_show_it():
    with pytest.raises(NotYet, match="this answer cannot be checked: TypeError: no") as refused:
        memory.check_parameter_count(Awkward(7))
    assert refused.value.__suppress_context__


def test_not_yet_is_amber_and_a_crash_is_red():
    def fails():
        raise KeyError("no such name")

    with pytest.raises(answers.NotYet) as missing:
        answers.expect_answered(...)
    with pytest.raises(answers.Crash) as crashed:
        answers.call(fails)
    told = [caught.value._render_traceback_()[0] for caught in (missing, crashed)]
    assert [line.partition("Not yet:\x1b[0m ")[0] for line in told] == ["\x1b[30;43m", "\x1b[97;41m"]
    assert "KeyError" in told[1] and len(told) == 2
