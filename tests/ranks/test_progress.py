import io
import re
import time

import launch_workers as workers
import pytest
from programs import wait_until

from fsdp_helpers.ranks import progress
from fsdp_helpers.ranks.launch import launch


class Terminal(io.StringIO):
    """A standard error that somebody watches."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def reports(monkeypatch):
    """The reports that get through, with the clock of the last one reset."""
    monkeypatch.setattr(progress, "_last_report_s", 0.0)
    seen = []
    progress.send_reports_to(lambda *report: seen.append(report))
    yield seen
    progress.send_reports_to(None)


def test_nothing_is_drawn_where_nobody_watches(capsys):
    launch(workers.report_progress, 5, world_size=2, device="cpu")
    output = capsys.readouterr()
    assert (output.out, output.err) == ("", "")


def test_one_bar_however_many_ranks(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    launch(workers.report_progress, 30, world_size=3, device="cpu")
    text = terminal.getvalue()
    assert "\n" not in text  # one line, drawn over and over, and wiped at the end
    lines = [line for line in text.split("\r") if line.strip()]
    assert lines[0].strip() == "report_progress, 3 ranks on cpu: starting"
    waiting = ("report_progress, 3 ranks on cpu: ", "counting: ")  # the first for seconds, on a busy machine
    assert all(line.strip().startswith(waiting) for line in lines[1:])
    counts = [int(number) for line in lines for number in re.findall(r"(\d+)/30", line)]
    assert counts == sorted(counts)  # one rank reports; three would go back and forth


def test_a_log_says_now_and_then_how_far_a_run_has_come(monkeypatch, capsys):
    bar = progress.ProgressBar()
    with progress.in_lines():
        monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", float("inf"))
        bar.update(1, 10, "shallow, ddp", "loss 2.4")  # too early
        monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
        bar.update(3, 10, "shallow, ddp", "loss 2.3")
        bar.update(4, 10, "shallow, ddp")
    bar.update(5, 10, "shallow, ddp")  # a log was asked for within the block only
    assert capsys.readouterr().err == "shallow, ddp: 3 of 10, loss 2.3\nshallow, ddp: 4 of 10\n"


def test_no_bar_where_none_is_wanted(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    launch(workers.report_progress, 5, world_size=1, device="cpu", progress=False)
    assert terminal.getvalue() == ""


def test_a_print_does_not_cut_through_the_bar(monkeypatch, capsys):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    bar = progress.ProgressBar()
    bar.update(1, 10, "title", "loss 1.0")
    bar.print("a line", terminal)
    bar.close()
    assert "\ra line\n" in terminal.getvalue()  # the bar is wiped first, so the line stands alone
    assert "loss 1.0" in terminal.getvalue()


def test_two_trainings_with_the_same_title_have_a_bar_each(monkeypatch):
    """As those of `train_each`, which train one after the other."""
    shown = []
    monkeypatch.setattr(progress, "is_notebook", lambda: True)
    monkeypatch.setattr(progress._NotebookLine, "show", lambda self, text: shown.append((self, text)))
    bar = progress.ProgressBar()
    for done in (0, 1, 2, 0, 1, 2):
        bar.update(done, 2, "shallow, fsdp")
    lines = [line for line, _ in shown]
    assert [line is lines[0] for line in lines] == [True] * 3 + [False] * 3


def test_reports_are_thinned_out_but_the_last_arrives(reports):
    for step in range(1, 1001):
        progress.report(step, 1000, "title")
    # 1,000 reports within far less than a second: at most ten a second get through, and always the last
    assert len(reports) < 100
    assert reports[-1] == (1000, 1000, "title", "", None, None)


def test_without_a_listener_reports_are_dropped():
    assert not progress.wants_report(1, 1)
    progress.report(1, 1, "title")


def test_the_time_left_follows_from_what_was_seen():
    # 10 steps in 20 s since the first report, which said 50: 40 more take 80 s. Counted from 0, 60 steps would take 20.
    text = progress.bar_text(60, 100, 20.0, "title", "loss 1.0", first_done=50)
    assert text.startswith("title:  60%|") and text.endswith("| 60/100 [00:20<01:20, loss 1.0]")
    assert "?" in progress.bar_text(0, 100, 0.0, "title") and "step/s" not in text


def test_a_terminal_says_what_starts_until_the_first_report(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    bar = progress.ProgressBar()
    bar.start("shallow, ddp, 2 ranks on cpu")
    assert terminal.getvalue().strip() == "shallow, ddp, 2 ranks on cpu: starting"
    bar.update(0, 10, "shallow, ddp, 2 ranks on cpu")
    bar.start("something within it")  # said once
    bar.close()
    assert terminal.getvalue().count("starting") == 1 and re.search(r"0/10 \[\d\d:\d\d<\?\]", terminal.getvalue())


def test_waiting_counts_seconds_and_says_why(monkeypatch):
    shown = []
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_COUNTS", 0.01)
    monkeypatch.setattr(progress, "is_notebook", lambda: True)
    monkeypatch.setattr(progress._NotebookLine, "show", lambda self, text: shown.append(text))
    bar = progress.ProgressBar()
    bar.start("work, 2 ranks on cpu")
    bar.start("something within it", "loading PyTorch once")  # the reason is heard, the name is not
    with_reason = re.compile(r"work, 2 ranks on cpu: starting, \d+ s \(loading PyTorch once\)")
    assert wait_until(lambda: with_reason.fullmatch(shown[-1]))
    assert shown[0] == "work, 2 ranks on cpu: starting"
    bar.running()
    assert wait_until(lambda: re.fullmatch(r"work, 2 ranks on cpu: running, \d+ s", shown[-1]))
    bar.update(0, 5, "steps")
    before = len(shown)
    time.sleep(0.1)
    assert len(shown) == before and shown[-1].startswith("steps: ")  # the first report ends it
    bar.close()


def test_reports_of_this_very_process_are_drawn(monkeypatch):
    shown = []
    monkeypatch.setattr(progress, "is_notebook", lambda: True)
    monkeypatch.setattr(progress._NotebookLine, "show", lambda self, text: shown.append(text))
    with progress.reports_drawn():
        progress.report(0, 3, "one rank of many")
        progress.report(3, 3, "one rank of many")
    assert ["| 0/3 [" in shown[0], "| 3/3 [" in shown[1]] == [True, True]
    assert not progress.wants_report(3, 3)


def test_a_rank_hands_its_reports_on_instead(reports):
    with progress.reports_drawn():
        progress.report(3, 3, "one rank of many")
    assert reports == [(3, 3, "one rank of many", "", None, None)]


def test_items_of_this_very_process_are_drawn(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_REPORTS", -1.0)
    assert list(progress.drawn("abc", 3, "letters")) == ["a", "b", "c"]
    assert re.findall(r"(\d)/3", terminal.getvalue())[0] == "0"


def test_a_notebook_names_an_item_before_it_is_begun(monkeypatch):
    shown = []
    monkeypatch.setattr(progress, "is_notebook", lambda: True)
    monkeypatch.setattr(progress._NotebookLine, "show", lambda self, text: shown.append(text))
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_REPORTS", -1.0)
    for letter in progress.drawn("abc", 3, "letters", "now {}".format):
        assert shown[-1].endswith(f", now {letter}]")
    assert "| 3/3 [" in shown[-1]
