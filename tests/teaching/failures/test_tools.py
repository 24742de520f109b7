"""The tools of 11 find two ranks that part: each names both sides."""

import importlib.util
import io
import os
import shutil
import sys
from http.client import IncompleteRead, RemoteDisconnected

import nbformat
import pytest
from leftovers import PROJECT

from fsdp_helpers.ranks.errors import RankError, RankTimeout
from fsdp_helpers.ranks.launch import launch
from fsdp_helpers.teaching.failures import crashes_at_the_ends, tools
from fsdp_helpers.teaching.failures.entry import CHAPTER
from fsdp_helpers.teaching.page.cards import stacks_of_page

TWO_RANKS = {"world_size": 2, "device": "cpu", "progress": False}


def test_faulthandler_writes_where_each_rank_waits(tmp_path):
    with pytest.raises(RankTimeout):
        launch(tools.write_stacks, str(tmp_path), stall_s=3, **TWO_RANKS)
    first, second = [(tmp_path / f"rank-{rank}.txt").read_text() for rank in range(2)]
    assert "in all_reduce" in first and "in all_gather" in second and "in part_ways" in first


def test_detail_names_both_sides():
    with pytest.raises(RankError, match="Detected mismatch") as error:
        launch(tools.check_each_collective, **TWO_RANKS)
    assert "ALLREDUCE" in error.value.summary and "ALLGATHER" in error.value.summary  # whichever rank says it first


def test_the_flight_recorder_has_the_last_collective_of_each_rank():
    assert launch(tools.read_flight_recorder, **TWO_RANKS) == [("gloo:all_reduce", [[3]]), ("gloo:all_gather", [[2]])]


def test_torchs_counter_sees_units():
    assert launch(tools.count_gathers_of_a_forward, **TWO_RANKS) == [(1, 3)] * 2


# ---------------------------------------------------------------- tools of their own packages


@pytest.mark.skipif(shutil.which("py-spy") is None, reason="py-spy is a package of its own")
def test_py_spy_says_from_outside_where_a_rank_waits():
    try:
        dump = launch(tools.dump_with_py_spy, timeout_s=240, **TWO_RANKS)[1]
    except RankError as error:
        if "ermission" in error.summary:
            pytest.skip(error.summary)
        raise
    assert "dump_with_py_spy" in dump


def test_py_spy_without_the_right_to_trace(tmp_path, monkeypatch):
    """Its own words, and no waiting for a dump that never comes."""
    refusing = tmp_path / "py-spy"
    refusing.write_text("#!/bin/sh\necho 'Permission Denied: Try running again' >&2\nexit 1\n")
    refusing.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(RuntimeError, match="py-spy can't read process 4242: Permission Denied: Try running again"):
        tools.dump_process(4242)


def test_a_page_is_read_once_it_is_whole(monkeypatch):
    answers = [ConnectionRefusedError(), RemoteDisconnected(), IncompleteRead(b"all_"), b"starting", b"in all_reduce"]

    def answer(address, timeout):
        assert timeout > 0, "a server that never answers must not hold the rank"
        given = answers.pop(0)
        if isinstance(given, Exception):
            raise given
        return io.BytesIO(given)

    monkeypatch.setattr(tools, "urlopen", answer)
    monkeypatch.setattr(tools, "POLL_S", 0.0)
    assert tools.read_until("http://localhost:1/stacks", "all_reduce") == "in all_reduce" and not answers


def test_a_program_without_an_answer_says_how_it_ended():
    with pytest.raises(RuntimeError, match="no answer, and exit status 3: gone"):
        crashes_at_the_ends.answer_of([sys.executable, "-c", "import sys; sys.stderr.write('gone'); sys.exit(3)"])


@pytest.mark.skipif(importlib.util.find_spec("tabulate") is None, reason="the debug server needs tabulate")
def test_the_debug_servers_page_has_the_stacks_of_all_ranks():
    stacks = stacks_of_page(launch(tools.read_debug_server, timeout_s=240, **TWO_RANKS)[1])
    assert stacks["rank 0"].startswith("all_reduce (") and "read_debug_server" in stacks["rank 0"]
    assert "urlopen" in stacks["rank 1"] or "socket.py" in stacks["rank 1"]


def test_the_saved_outputs_show_the_rank_that_waits():
    notebook = nbformat.read(PROJECT / "notebooks" / CHAPTER, as_version=4)
    shown = {cell.id: cell.source.partition("```text\n")[2].splitlines() for cell in notebook.cells}
    assert "MainThread" in shown["py-spy"][0] and any("all_reduce" in line for line in shown["py-spy"])
    assert shown["debug-server"][0].startswith("rank 0: all_reduce (") and "rank 1: " in shown["debug-server"][1]
