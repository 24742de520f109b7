"""Ranks that stay: what a cell shows, what it keeps, and how it ends."""

import os
import signal
import sys
import tempfile
import textwrap
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from programs import has_ended, is_running, running, wait_until
from torch.distributed.tensor import Shard

from fsdp_helpers import Ranks
from fsdp_helpers.gpus import Gpus
from fsdp_helpers.ranks import cells, live
from fsdp_helpers.ranks.cells import LocalShard
from fsdp_helpers.ranks.errors import RankError

SET_UP = "import torch\nimport torch.distributed as dist"
RESTARTED = live.GONE
KEPT = "The ranks keep their variables."


@pytest.fixture(scope="module")
def two():
    """Two ranks that all tests share: what one defines, another may find."""
    with Ranks(2, device="cpu", timeout_s=3) as ranks:
        yield ranks


@pytest.fixture
def ranks(two):
    two.run(SET_UP)
    return two


def shown(ranks, capsys, code, chosen=None):
    ranks.run(textwrap.dedent(code), chosen)
    return capsys.readouterr().out


def test_a_rank_has_three_names(ranks, capsys):
    with Ranks(1, device="cpu") as one:
        code = "sorted(name for name in globals() if not name.startswith('__')), rank, world_size, device"
        assert shown(one, capsys, code) == "(['device', 'rank', 'world_size'], 0, 1, device(type='cpu'))\n"


def test_variables_stay_from_cell_to_cell(ranks, capsys):
    ranks.run("total = torch.tensor([rank + 1.0]); dist.all_reduce(total)")
    assert shown(ranks, capsys, "total") == "tensor([3.])\n"


def test_outputs_are_merged_where_ranks_agree(ranks, capsys):
    assert shown(ranks, capsys, "print('same')\nrank") == "same\nrank 0: 0\nrank 1: 1\n"
    assert (
        shown(ranks, capsys, "print(f'first\\n{rank}')\n'same'")
        == "rank 0: first\n        0\nrank 1: first\n        1\n'same'\n"
    )


def test_a_cell_may_run_on_some_ranks(ranks, capsys):
    assert shown(ranks, capsys, "rank", [1]) == "1\n"
    with pytest.raises(ValueError, match=r"there is no rank 2; these ranks are 0 to 1"):
        ranks.run("rank", [0, 2])


def test_no_memory_address_is_shown(ranks, capsys):
    code = "def f(): ...\nprint(f)\nobject(), f"
    assert shown(ranks, capsys, code) == "<function f>\n(<object>, <function f>)\n"


def test_a_program_and_a_c_library_are_heard(ranks, capsys):
    code = "import ctypes, os\nos.system('echo a program')\nctypes.CDLL(None).puts(b'a library');"
    assert shown(ranks, capsys, code, [0]) == "a program\na library\n"


def test_classes_and_functions_have_their_source(ranks, capsys):
    code = """
        import inspect
        class Dataset:
            def __len__(self): return 4
            def __getitem__(self, index): return index
        def double(value): return 2 * value
    """
    ranks.run(textwrap.dedent(code))
    ranks.run("class Other: 'first'")
    ranks.run("class Other: 'second'")
    code = "print(inspect.getsource(Dataset) + inspect.getsource(double) + inspect.getsource(Other))"
    source = shown(ranks, capsys, code)
    assert source.count("\n") == 5 and source.endswith("class Other: 'second'\n")
    code = "list(torch.utils.data.DataLoader(Dataset(), num_workers=1))"
    assert shown(ranks, capsys, code) == "[tensor([0]), tensor([1]), tensor([2]), tensor([3])]\n"


def test_a_class_is_found_where_python_3_13_looks_for_it(ranks, capsys):
    """Since then a class has its line, as this one says itself; later cells come before it."""
    ranks.run("class First:\n    __firstlineno__ = 1")
    ranks.run("class Second: ...\nx = 1")
    code = "import linecache\nlinecache.getline('<cells>', First.__firstlineno__)"
    assert shown(ranks, capsys, code) == "'class First:\\n'\n"


def test_values_come_back_rank_by_rank(ranks):
    code = """
        from torch import nn
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        layer = nn.Linear(4, 3)
        fully_shard(layer, mesh=init_device_mesh("cpu", (world_size,)))
        weight, mixed = layer.weight, {"layer": nn.Identity(), "loss": 0.5, "own": [nn.Parameter(torch.ones(rank + 1))]}
        class Own: ...
        own = Own()
    """
    ranks.run(textwrap.dedent(code))
    assert ranks["rank"] == [0, 1]
    weights = ranks["weight"]
    assert [weight.local.shape for weight in weights] == [(2, 4), (1, 4)]
    assert weights[0].placements == (Shard(0),) and weights[0].shape == (3, 4)
    assert not weights[0].local.requires_grad and isinstance(weights[0], LocalShard)
    mixed = ranks["mixed"][1]
    assert mixed["loss"] == 0.5 and torch.equal(mixed["own"][0], torch.ones(2))
    assert ranks["own"] == ["<__main__.Own>"] * 2
    assert ranks["rank"] == [0, 1]
    with pytest.raises(NameError, match=r"'missing' is not defined on ranks 0, 1"):
        ranks["missing"]


def test_a_group_without_this_rank_is_no_reason_to_end(ranks, capsys):
    """Of a mesh of two dimensions a rank is in half of the groups."""
    ranks.run("first, last = dist.new_group([0]), dist.new_group([1])")
    assert shown(ranks, capsys, "dist.get_rank()") == "rank 0: 0\nrank 1: 1\n"


def test_messages_from_rank_to_rank_are_not_collectives(ranks, capsys):
    code = "x = torch.zeros(1)\nfor _ in range(2):\n    dist.send(x + 7, 1) if rank == 0 else dist.recv(x, 0)\nx"
    assert shown(ranks, capsys, code) == "rank 0: tensor([0.])\nrank 1: tensor([7.])\n"


@pytest.mark.parametrize("takes_a_number", [True, False], ids=["gloo", "nccl"])
def test_only_the_numbers_that_messages_take_are_left_out(monkeypatch, takes_a_number):
    group = SimpleNamespace(group_name="0", number=5)
    group._get_sequence_number_for_group = lambda: group.number

    def send(group):
        group.number += takes_a_number

    for name in ("send", "recv", "recv_anysource"):
        monkeypatch.setattr(dist.ProcessGroup, name, send)
    counts = cells._count_point_to_point()
    dist.ProcessGroup.send(group)
    assert counts["0"] == takes_a_number


def test_an_answer_to_what_was_interrupted_is_not_taken_for_another_cells(ranks, capsys):
    ranks._processes.tell([0, 1], "get", "rank")  # as where Stop came before the answers
    assert shown(ranks, capsys, "'its own'") == "'its own'\n"
    assert ranks["rank"] == [0, 1]


def test_a_syntax_error_runs_on_no_rank(ranks, capsys):
    with pytest.raises(SyntaxError):
        ranks.run("print('never')\ndef f(:")
    assert shown(ranks, capsys, "'next'") == "'next'\n"


def test_closed_ranks_say_so():
    ranks = Ranks(1, device="cpu")
    assert repr(ranks) == "Ranks(1, on cpu)"
    ranks.close()
    ranks.close()
    assert repr(ranks) == "Ranks(1, closed)"
    with pytest.raises(RuntimeError, match="closed"):
        ranks.run("rank")


@pytest.mark.parametrize("world_size, settings", [(0, {}), (2.0, {}), (2, {"device": "gpu"}), (2, {"timeout_s": 0})])
def test_bad_arguments_start_nothing(world_size, settings):
    with pytest.raises(ValueError):
        Ranks(world_size, **settings)


def test_ranks_that_cannot_join_are_an_error_at_once(monkeypatch):
    """They have ended even while somebody keeps the error, as a notebook does."""
    folders = set(Path(tempfile.gettempdir()).iterdir())
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    with pytest.raises(RankError) as caught:
        Ranks(1, device="cpu")
    assert set(Path(tempfile.gettempdir()).iterdir()) == folders
    assert "rank 0 of 1 failed: " in str(caught.value) and "no-such-interface" in str(caught.value)


def test_a_script_that_forgets_its_ranks(tmp_path):
    """It ends, with all that its ranks have started; under nobody's eyes, and with a main guard, as scripts do."""
    script = tmp_path / "forgetful.py"
    script.write_text(FORGETFUL)
    with running([sys.executable, str(script)]) as process:
        output, errors = process.communicate(timeout=240)
    assert (process.returncode, errors) == (0, "")
    pids = list(map(int, output.split()))
    assert len(pids) == 4 and not any(is_running(pid) for pid in pids)


FORGETFUL = """
from fsdp_helpers import Ranks

if __name__ == "__main__":
    ranks = Ranks(2, device="cpu")
    ranks.run("import subprocess; pid = subprocess.Popen(['sleep', '600'], start_new_session=True).pid")
    print(*ranks.pids, *ranks["pid"])
"""


def test_ranks_have_the_environment_of_the_moment_when_they_are_opened(two, monkeypatch):
    monkeypatch.setenv("SET_SINCE_THE_SERVER_STARTED", "yes")
    with Ranks(1, device="cpu") as one:
        one.run("import os; found = os.environ.get('SET_SINCE_THE_SERVER_STARTED'), os.environ['WORLD_SIZE']")
        assert one["found"] == [("yes", "1")]


def test_ranks_that_were_killed_between_two_cells(ranks, capsys):
    os.kill(ranks.pids[1], signal.SIGKILL)
    assert wait_until(lambda: not ranks._processes._processes[1].is_alive())  # the server has told this process
    with pytest.raises(RankError, match="rank 1 of 2 failed: the process was ended by SIGKILL") as caught:
        ranks.run("rank")
    assert str(caught.value).endswith(RESTARTED)
    capsys.readouterr()
    assert shown(ranks, capsys, "rank") == "rank 0: 0\nrank 1: 1\n"


def test_a_variable_of_a_rank_that_has_ended(ranks):
    os.kill(ranks.pids[0], signal.SIGKILL)
    with pytest.raises(RankError, match="rank 0 of 2 failed: the process was ended by SIGKILL"):
        ranks["rank"]
    assert ranks["rank"] == [0, 1]


def test_each_rank_has_a_gpu_of_its_own(monkeypatch):
    """Without a GPU here: the ranks are asked for, on machines that have two, one, or a broken one."""
    started = []

    def start(body, world_size, device, on_output):
        started.append((world_size, device))
        return MagicMock()

    monkeypatch.setattr(live, "Processes", start)
    for gpus, device, expected in [
        (Gpus(2), "cuda", (2, "cuda")),
        (Gpus(2), "auto", (2, "cuda")),
        (Gpus(1), "auto", (2, "cpu")),
        (Gpus(2, "broken"), "auto", (2, "cpu")),
        (Gpus(2), "cpu", (2, "cpu")),
    ]:
        monkeypatch.setattr("fsdp_helpers.gpus.find_gpus", lambda wanted, gpus=gpus: gpus)
        Ranks(2, device=device).close()
        assert started.pop() == expected
    monkeypatch.setattr("fsdp_helpers.gpus.find_gpus", lambda wanted: Gpus(1))
    with pytest.raises(ValueError, match="2 ranks need 2 CUDA devices, but this machine has 1"):
        Ranks(2, device="cuda")
    assert started == []


def test_a_collective_may_take_longer_where_a_cell_compiles(ranks):
    code = "import time\n# compile\nif rank:\n    time.sleep(4)\ntotal = torch.ones(1)\ndist.all_reduce(total)"
    ranks.run(code)
    assert [total.item() for total in ranks["total"]] == [2.0, 2.0]


def test_ranks_that_nobody_has_any_more_end(two):
    """As where the cell that opens them runs again."""
    ranks = Ranks(1, device="cpu")
    ranks.run("rank")
    (pid,) = ranks.pids
    ranks = None
    assert wait_until(lambda: has_ended(pid))
    assert live.open_ranks()[-1] is two


# ---------------------------------------------------------------- cells that fail

MISSED = "it didn't take part in a collective that others began"
FINISHED = "had finished the cell"
FAILURES = {  # the cell, the ranks that it runs on, what its error says, and the last line of that
    "on both ranks": (
        "def f():\n    return 1 / 0\nf()",
        None,
        [
            "rank 0 of 2 failed: ZeroDivisionError",
            ", line 2, in f\n    return 1 / 0\n",
            "rank 1 failed in the same way",
        ],
        KEPT,
    ),
    "on one rank, while the other waits": (
        "if rank == 1:\n    1 / 0\ndist.barrier()",
        None,
        ["rank 1 of 2 failed: ZeroDivisionError", "rank 0 was waiting in barrier(), called from cell", "line 3"],
        RESTARTED,
    ),
    "on one rank, while the other computes": (
        "import time\nif rank == 0:\n    1 / 0\ntime.sleep(600)",
        None,
        ["rank 0 of 2 failed: ZeroDivisionError", "rank 1 was at cell", "line 4"],
        KEPT,
    ),
    "on one rank, while the other does not let itself be interrupted": (
        "import time\nif rank == 0:\n    1 / 0\nwhile True:\n    try:\n        time.sleep(600)\n"
        "    except KeyboardInterrupt:\n        pass",
        None,
        ["rank 0 of 2 failed: ZeroDivisionError", "rank 1 was at cell", "line 6"],
        RESTARTED,
    ),
    "a forgotten collective": (
        "if rank == 0:\n    dist.all_reduce(torch.ones(1))",
        None,
        [
            "rank 0 of 2 failed",
            "Timed out",
            ", line 2, in <module>",
            f"rank 1 {FINISHED}, and{MISSED.removeprefix('it')}",
        ],
        RESTARTED,
    ),
    "a forgotten collective in a group that the cell makes": (
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "mesh, other = init_device_mesh('cpu', (1, world_size)), dist.new_group()\n"
        "if rank == 1:\n    dist.all_reduce(torch.ones(1), group=other)",
        None,
        ["rank 1 of 2 failed", "Timed out waiting 3000ms", f"rank 0 {FINISHED}, and{MISSED.removeprefix('it')}"],
        RESTARTED,
    ),
    "a forgotten asynchronous collective": (
        "if rank == 0:\n    work = dist.all_reduce(torch.ones(1), async_op=True)",
        None,
        [f"rank 1 of 2 failed: {MISSED}"],
        RESTARTED,
    ),
    "a collective on one rank alone": (
        "work = dist.all_reduce(torch.ones(1), async_op=True)",
        [0],
        [f"rank 1 of 2 failed: {MISSED}"],
        RESTARTED,
    ),
    "different shapes": ("dist.all_reduce(torch.ones(1 + rank))", None, [", line 1, in <module>"], RESTARTED),
    "sys.exit": ("import sys\nsys.exit()", None, ["rank 0 of 2 failed: SystemExit", ", line 2, in <module>"], KEPT),
    "os._exit": (
        "import os\nif rank == 1:\n    os._exit(3)",
        None,
        ["exit status 3", "It was at cell ", " line 2."],
        RESTARTED,
    ),
    "a kill": (
        "import os\nif rank == 1:\n    os.kill(os.getpid(), 9)",
        None,
        ["rank 1 of 2 failed: the process was ended by SIGKILL", f"rank 0 {FINISHED}"],
        RESTARTED,
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failed_cell_says_what_happened_and_where_and_the_next_one_works(name, ranks, capsys):
    code, chosen, said, end = FAILURES[name]
    ranks.run("kept = 5")
    with pytest.raises(RankError) as caught:
        ranks.run(code, chosen)
    text = str(caught.value)
    assert [phrase for phrase in said if phrase not in text] == [] and text.endswith(end)
    if end == KEPT:
        assert ranks["kept"] == [5, 5]
    assert shown(ranks, capsys, "1 + rank") == "rank 0: 1\nrank 1: 2\n"
