import re
import subprocess
import sys
from dataclasses import replace

import pytest
from runs import tiny_record

from fsdp_helpers.records import CollectiveCount
from fsdp_helpers.teaching import checks

RECORD = tiny_record()  # peaks at 40 bytes with one collective
BUSY = replace(
    RECORD,
    ranks=(replace(RECORD.ranks[0], collectives=(CollectiveCount(op="all_gather", count=11, bytes=4, sent_bytes=2),)),),
)


def rows_a_rank(num_rows, ranks):
    return -(-num_rows // ranks)


def overlapping(num_rows, saved, loading, rank):
    """A rank's rows begin before an old rank's end, and the other way round."""
    old, new = rows_a_rank(num_rows, saved), rows_a_rank(num_rows, loading)
    end = min((rank + 1) * new, num_rows)
    return [r for r in range(saved) if r * old < end and rank * new < min((r + 1) * old, num_rows)]


# checker, the arguments beside the answer, right answers, wrong answers
CHECKERS = [
    # 64 x 5 x 5 = 1,600 weights a kernel; 128 kernels and 128 biases: 204,800 + 128
    (checks.check_parameter_count, {}, [204_928], [204_800, 0]),
    (checks.check_largest_model, {}, [lambda size: size // 16], [lambda size: size / 16, lambda size: size // 4]),
    (checks.check_peak_below, {"limit_bytes": 41}, [RECORD], []),
    (checks.check_peak_below, {"limit_bytes": 40}, [], [RECORD]),
    (checks.check_all_reduce_bytes, {}, [lambda size, n: 2 * (n - 1) / n * size], [lambda size, n: (n - 1) * size]),
    (
        checks.check_rank_indices,
        {},
        [lambda images, rank, n: list(range(images))[rank::n]],
        [
            lambda images, rank, n: list(range(images // n)),  # every rank the same ones
            lambda images, rank, n: list(range(images))[:: n or rank],  # some twice, some never
            lambda images, rank, n: list(range(images)) if rank == 0 else [],  # one rank does it all
        ],
    ),
    (checks.check_own_worker, {}, [], []),  # below, since it launches
    (checks.check_held_bytes, {}, [lambda p, n: 16 * p / n], [lambda p, n: 16 * p, lambda p, n: 12 * p / n]),
    (checks.check_padding, {}, [lambda p, n: -p % n], [lambda p, n: p % n, lambda p, n: n - p % n, lambda p, n: 0]),
    (checks.check_units, {"wanted": {"fc1", "fc2"}}, [["fc2", "fc1"]], [["fc1"], ["fc1", "fc2", "fc3"], []]),
    (checks.check_run_within, {"peak_bytes": 41, "num_collectives": 1}, [RECORD], [BUSY]),
    (checks.check_run_within, {"peak_bytes": 40, "num_collectives": 1}, [], [RECORD]),
    (
        checks.check_offload_split,
        {},
        [lambda p, n: (0, 16 * p / n)],
        [lambda p, n: (4 * p / n, 12 * p / n), lambda p, n: (0, 16 * p)],
    ),
    (
        checks.check_transfer_seconds,
        {},
        [lambda p, n, speed: 8 * p / n / speed],
        [lambda p, n, speed: 4 * p / n / speed, lambda p, n, speed: 8 * p / speed],
    ),
    (checks.check_checkpoint_bytes, {}, [lambda p: 12 * p], [lambda p: 16 * p, lambda p: 4 * p]),
    (
        checks.check_ranks_to_read,
        {},
        [overlapping],
        [
            lambda num_rows, saved, loading, rank: list(range(saved)),  # all of them: too many
            lambda num_rows, saved, loading, rank: [rank],
            lambda num_rows, saved, loading, rank: overlapping(num_rows, saved, loading, 0),
        ],
    ),
    (
        checks.check_saving_interval,
        {},
        [lambda save_s, between_s: (2 * save_s * between_s) ** 0.5],
        [lambda save_s, between_s: (save_s * between_s) ** 0.5, lambda save_s, between_s: between_s / 2],
    ),
    (
        checks.check_checkpointed_bytes,
        {},
        [lambda blocks, kept, given: (blocks - 1) * given + kept],
        [lambda blocks, kept, given: blocks * given, lambda blocks, kept, given: blocks * kept],
    ),
    (
        checks.check_whole_norm,
        {},
        [lambda norms: sum(norm**2 for norm in norms) ** 0.5],
        [sum, max, lambda norms: sum(norms) / len(norms)],
    ),
]


def answers(kind: int) -> list:
    return [
        pytest.param(checker, settings, answer, id=f"{checker.__name__}-{number}")
        for checker, settings, *table in CHECKERS
        for number, answer in enumerate(table[kind])
    ]


@pytest.mark.parametrize("checker, settings, answer", answers(0))
def test_right_answers_are_accepted(checker, settings, answer):
    assert checker(answer, **settings).startswith("Right: ")


@pytest.mark.parametrize("checker, settings, answer", answers(1))
def test_wrong_answers_are_rejected_in_one_line(checker, settings, answer):
    with pytest.raises(checks.NotYet) as rejected:
        checker(answer, **settings)
    assert len(str(rejected.value).splitlines()) == 1


@pytest.mark.parametrize("checker, settings", [pytest.param(row[0], row[1]) for row in CHECKERS])
@pytest.mark.parametrize("answer", [..., None])
def test_starters_fail_loudly(checker, settings, answer):
    with pytest.raises(checks.NotYet, match="replace the ... with your answer"):
        checker(answer, **settings)


@pytest.mark.parametrize(
    "checker",
    [
        checks.check_largest_model,
        checks.check_all_reduce_bytes,
        checks.check_rank_indices,
        checks.check_held_bytes,
        checks.check_padding,
        checks.check_offload_split,
        checks.check_transfer_seconds,
        checks.check_checkpoint_bytes,
        checks.check_ranks_to_read,
        checks.check_saving_interval,
        checks.check_checkpointed_bytes,
        checks.check_whole_norm,
    ],
)
def test_a_function_that_still_returns_dots(checker):
    with pytest.raises(checks.NotYet, match="replace the ... with your answer"):
        checker(lambda *numbers: ...)


OWN_WORKER = """
import torch
import torch.distributed as dist


def ranks_squared(rank, world_size):
    {body}
"""


@pytest.fixture
def write_worker(tmp_path, monkeypatch):
    """Writes the body of the reader's worker; returns the name of its module."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(body: str) -> str:
        (tmp_path / "own_worker.py").write_text(OWN_WORKER.format(body=body))
        return "own_worker"

    yield write
    sys.modules.pop("own_worker", None)


def test_own_workers(write_worker):
    """One test for all, since each launch costs seconds; the file changes, its name does not."""
    wrong = {
        "return ...": "replace the ... with your answer",
        "return sum(other**2 for other in range(world_size))": "took part in no all-reduce",
        "dist.all_reduce(torch.ones(1)); return 5": "on 2 ranks, rank 0 returns 5",
        "value = torch.tensor([rank]); dist.all_reduce(value); return int(value)": "on 3 ranks, rank 0 returns 3",
        "return value": "your worker fails.*NameError",
    }
    for body, message in wrong.items():
        with pytest.raises(checks.NotYet, match=f"(?s){re.escape(message) if '*' not in message else message}"):
            checks.check_own_worker(write_worker(body))
    right = "value = torch.tensor([rank**2]); dist.all_reduce(value); return int(value)"
    assert checks.check_own_worker(write_worker(right)).startswith("Right: ")


def test_own_worker_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(checks.NotYet, match="own_nothing.py cannot be imported.*run the cell that writes it"):
        checks.check_own_worker("own_nothing")
    (tmp_path / "own_empty.py").write_text("")
    with pytest.raises(checks.NotYet, match="own_empty.py has no function ranks_squared"):
        checks.check_own_worker("own_empty")


def test_every_checker_is_in_the_table():
    assert {row[0].__name__ for row in CHECKERS} == {name for name in vars(checks) if name.startswith("check_")}


def test_a_notebook_shows_one_line(tmp_path, monkeypatch):
    assert checks.NotYet("no number")._render_traceback_() == ["Not yet: no number"]
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    code = "from fsdp_helpers.teaching.checks import check_padding; check_padding(...)"
    done = subprocess.run(
        [sys.executable, "-m", "IPython", "--HistoryManager.enabled=False", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.stdout + done.stderr).strip() == "Not yet: replace the ... with your answer"
