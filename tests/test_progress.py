"""One bar for all ranks: in a terminal, in a notebook, in a log, and nowhere."""

import io
import re
import time
from contextlib import redirect_stderr

import launch_workers as workers
import pytest

from fsdp_helpers import progress
from fsdp_helpers.progress import ProgressBar, Report
from fsdp_helpers.ranks.launch import launch


@pytest.fixture
def terminal() -> io.StringIO:
    """A standard error that somebody watches, for `redirect_stderr` within a test: pytest sets its own before each."""
    stream = io.StringIO()
    stream.isatty = lambda: True
    return stream


@pytest.fixture
def page(monkeypatch) -> list[tuple[object, str]]:
    """What a notebook shows: each state of each output that is replaced in place."""
    shown = []
    monkeypatch.setattr(progress, "is_notebook", lambda: True)
    monkeypatch.setattr(progress.InPlace, "show", lambda self, text: shown.append((self, text)))
    return shown


@pytest.fixture
def reports(monkeypatch) -> list[Report]:
    """The reports that get through, with the clock of the last one reset."""
    monkeypatch.setattr(progress, "_last_report_s", 0.0)
    seen = []
    progress.send_reports_to(seen.append)
    yield seen
    progress.send_reports_to(None)


def test_nothing_is_drawn_where_nobody_watches(capsys):
    launch(workers.report_progress, 5, world_size=2, device="cpu")
    assert capsys.readouterr() == ("", "")


def test_one_bar_however_many_ranks(terminal):
    with redirect_stderr(terminal):
        launch(workers.report_progress, 30, world_size=3, device="cpu")
    text = terminal.getvalue()
    assert "\n" not in text  # one line, drawn over and over, and wiped at the end
    lines = [line.strip() for line in text.split("\r") if line.strip()]
    assert lines[0] == "report_progress, 3 ranks on cpu: starting"
    assert all(line.startswith(("report_progress, 3 ranks on cpu: ", "counting: ")) for line in lines)
    counts = [int(number) for line in lines for number in re.findall(r"(\d+)/30", line)]
    assert counts and counts == sorted(counts)  # one rank reports; three would go back and forth


def test_no_bar_where_none_is_wanted(terminal):
    with redirect_stderr(terminal):
        launch(workers.report_progress, 5, world_size=1, device="cpu", progress=False)
    assert terminal.getvalue() == ""


def test_a_log_says_now_and_then_how_far_a_run_has_come(monkeypatch, capsys):
    bar = ProgressBar()
    with progress.in_lines():
        monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", float("inf"))
        bar.update(Report(1, 10, "shallow, ddp", "loss 2.4"))  # too early
        monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
        bar.update(Report(3, 10, "shallow, ddp", "loss 2.3"))
        bar.update(Report(4, 10, "shallow, ddp"))
    bar.update(Report(5, 10, "shallow, ddp"))  # a log was asked for within the block only
    assert capsys.readouterr().err == "shallow, ddp: 3 of 10, loss 2.3\nshallow, ddp: 4 of 10\n"


def test_a_print_does_not_cut_through_the_bar(terminal):
    with redirect_stderr(terminal):
        bar = ProgressBar()
        bar.update(Report(1, 10, "title", "loss 1.0"))
        progress.print_above_bar("a line", terminal)
        bar.close()
    assert "\ra line\n" in terminal.getvalue()  # the bar is wiped first, so the line stands alone
    assert "loss 1.0" in terminal.getvalue()


def test_a_notebook_says_what_starts_then_what_runs_then_how_long_it_took(page):
    bar = ProgressBar()
    bar.start("work, 2 ranks on cpu")
    bar.start("something within it")
    bar.running()
    bar.close()
    states = ["starting", "running", r"ended after 0\.\d s"]
    for (output, text), state in zip(page, states, strict=True):
        assert output is page[0][0] and re.fullmatch(f"work, 2 ranks on cpu: {state}", text)


def test_a_bar_replaces_what_was_starting_and_stays(page):
    bar = ProgressBar()
    bar.start("work, 2 ranks on cpu")
    for done in (0, 1, 2, 0, 1, 2):  # two trainings with one title
        bar.update(Report(done, 2, "shallow, fsdp", "loss 1.0"))
        bar.update(Report(done, 2, "shallow, fsdp", "loss 2.0"), rank=1)
    bar.close()
    outputs = list(dict.fromkeys(output for output, _ in page))
    texts = [[text for output, text in page if output is one] for one in outputs]
    assert [own[0] for own in texts] == ["work, 2 ranks on cpu: starting", texts[1][0]]
    for own in texts:
        assert re.fullmatch(r"shallow, fsdp: 100%\|█+\| 2/2 \[00:0\d<00:00, loss 1.0\]", own[-1])


def test_the_time_left_follows_from_what_was_seen(page, monkeypatch):
    bar = ProgressBar()
    bar.update(Report(50, 100, "resumed"))
    bar._bar.start_t -= 20.0
    bar.update(Report(60, 100, "resumed"))
    # 10 steps in 20 s since the first report, which said 50: 40 more take 80 s. Counted from 0, 60 would take 20.
    assert re.search(r"60/100 \[00:2\d<01:2\d\]", page[-1][1]) and "step/s" not in page[-1][1]


def test_reports_are_thinned_out_but_the_last_arrives(reports):
    for step in range(1, 1001):
        progress.report(step, 1000, "title")
    # 1,000 reports within far less than a second: at most ten a second get through, and always the last
    assert len(reports) < 100
    assert reports[-1] == (1000, 1000, "title", "", None, None)


def test_what_this_very_process_does_is_drawn(page):
    assert list(progress.with_progress("abc", "letters")) == ["a", "b", "c"]
    with progress.timed("work"):
        time.sleep(0.01)
    assert "| 0/3 [" in page[0][1] and page[-1][1].startswith("work: ended after ")
    assert any("| 3/3 [" in text for _, text in page) and not progress.wants_report(3, 3)


def test_a_rank_hands_its_reports_on_instead(reports):
    with progress.reports_drawn():
        progress.report(3, 3, "one rank of many")
    assert reports == [(3, 3, "one rank of many", "", None, None)]
