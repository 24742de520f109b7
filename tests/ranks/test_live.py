"""Ranks that stay: what a cell shows, what it keeps, and how it ends."""

import os
import signal
import sys
import textwrap

import pytest
import torch
from programs import has_ended, is_running, running, wait_until
from torch.distributed.tensor import Shard

from fsdp_helpers import Ranks
from fsdp_helpers.ranks import live
from fsdp_helpers.ranks.cells import LocalShard
from fsdp_helpers.ranks.errors import RankError
from fsdp_helpers.ranks.gpus import Gpus

SET_UP = "import torch\nimport torch.distributed as dist"
RESTARTED = "The ranks were restarted, and their variables are gone."
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


def failure(ranks, code, chosen=None):
    with pytest.raises(RankError) as caught:
        ranks.run(textwrap.dedent(code), chosen)
    return str(caught.value)


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
    with pytest.raises(NameError, match=r"'missing' is not defined on ranks 0, 1"):
        ranks["missing"]


def test_an_error_on_both_ranks_keeps_their_variables(ranks):
    ranks.run("kept = 5")
    text = failure(ranks, "def f():\n    return 1 / 0\nf()")
    assert "rank 0 of 2 failed: ZeroDivisionError" in text and ", line 2, in f\n    return 1 / 0\n" in text
    assert "rank 1 failed in the same way" in text and text.endswith(KEPT)
    assert ranks["kept"] == [5, 5]


def test_an_error_on_one_rank_says_where_the_others_wait(ranks, capsys):
    text = failure(ranks, "if rank == 1:\n    1 / 0\ndist.barrier()")
    assert "rank 1 of 2 failed: ZeroDivisionError" in text and text.endswith(RESTARTED)
    assert "rank 0 was waiting in barrier(), called from cell" in text and "line 3" in text
    assert shown(ranks, capsys, "1 + 1") == "2\n"


def test_a_forgotten_collective_ends_after_the_time_out(ranks):
    text = failure(ranks, "if rank == 0:\n    dist.all_reduce(torch.ones(1))")
    assert "rank 0 of 2 failed" in text and "Timed out" in text and ", line 2, in <module>" in text
    assert "rank 1 had finished the cell, and took no part in a collective" in text and text.endswith(RESTARTED)


def test_a_forgotten_asynchronous_collective_is_noticed_after_its_cell(ranks):
    text = failure(ranks, "if rank == 0:\n    work = dist.all_reduce(torch.ones(1), async_op=True)")
    assert "rank 1 of 2 failed: it took no part in a collective" in text and text.endswith(RESTARTED)


def test_a_group_without_this_rank_is_no_reason_to_end(ranks, capsys):
    """Of a mesh of two dimensions a rank is in half of the groups."""
    ranks.run("first, last = dist.new_group([0]), dist.new_group([1])")
    assert shown(ranks, capsys, "dist.get_rank()") == "rank 0: 0\nrank 1: 1\n"


def test_messages_from_rank_to_rank_are_not_collectives(ranks, capsys):
    code = "x = torch.zeros(1)\nfor _ in range(2):\n    dist.send(x + 7, 1) if rank == 0 else dist.recv(x, 0)\nx"
    assert shown(ranks, capsys, code) == "rank 0: tensor([0.])\nrank 1: tensor([7.])\n"


@pytest.mark.parametrize("code, end", [("os._exit(3)", "exit status 3"), ("os.kill(os.getpid(), 9)", "SIGKILL")])
def test_a_rank_that_dies_is_replaced(ranks, capsys, code, end):
    assert end in (text := failure(ranks, f"import os\nif rank == 1:\n    {code}")) and text.endswith(RESTARTED)
    assert "It was at cell " in text and " line 2." in text
    assert shown(ranks, capsys, "rank") == "rank 0: 0\nrank 1: 1\n"


def test_a_syntax_error_runs_on_no_rank(ranks):
    with pytest.raises(SyntaxError):
        ranks.run("print('never')\ndef f(:")


def test_closed_ranks_say_so():
    ranks = Ranks(1, device="cpu")
    ranks.close()
    ranks.close()
    with pytest.raises(RuntimeError, match="closed"):
        ranks.run("rank")


@pytest.mark.parametrize("world_size, settings", [(0, {}), (2.0, {}), (2, {"device": "gpu"}), (2, {"timeout_s": 0})])
def test_bad_arguments_start_nothing(world_size, settings):
    with pytest.raises(ValueError):
        Ranks(world_size, **settings)


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


def test_a_time_out_holds_in_groups_that_a_cell_makes(ranks):
    code = """
        from torch.distributed.device_mesh import init_device_mesh
        mesh = init_device_mesh("cpu", (1, world_size))
        other = dist.new_group()
        if rank == 1:
            dist.all_reduce(torch.ones(1), group=other)
    """
    text = failure(ranks, code)
    assert "rank 1 of 2 failed" in text and "Timed out waiting 3000ms" in text
    assert "rank 0 had finished the cell, and took no part in a collective that others began" in text


def test_a_collective_on_some_ranks_alone_is_noticed(ranks):
    text = failure(ranks, "work = dist.all_reduce(torch.ones(1), async_op=True)", [0])
    assert "rank 1 of 2 failed: it took no part in a collective that others began" in text


def test_different_shapes_end_with_their_line(ranks):
    text = failure(ranks, "dist.all_reduce(torch.ones(1 + rank))")
    assert ", line 1, in <module>" in text and text.endswith(RESTARTED)


def test_an_exit_is_an_error_like_any_other(ranks):
    text = failure(ranks, "import sys\nsys.exit()")
    assert "rank 0 of 2 failed: SystemExit" in text and ", line 2, in <module>" in text and text.endswith(KEPT)


def test_after_an_error_ranks_that_compute_are_interrupted(ranks):
    ranks.run("kept = 7")
    text = failure(ranks, "import time\nif rank == 0:\n    1 / 0\ntime.sleep(600)")
    assert "rank 1 was at cell" in text and "line 4" in text and text.endswith(KEPT)
    assert ranks["kept"] == [7, 7]


def test_ranks_that_were_killed_between_two_cells(ranks, capsys):
    os.kill(ranks.pids[1], signal.SIGKILL)
    assert wait_until(lambda: not ranks._processes.is_alive(1))
    ranks.run("rank")
    output = capsys.readouterr()
    assert output.out == "rank 0: 0\nrank 1: 1\n"
    assert output.err.startswith("Rank 1 had ended: the process was ended by SIGKILL") and RESTARTED in output.err


def test_ranks_left_idle_end_and_say_so(monkeypatch, capsys, two):
    monkeypatch.setattr(live, "IDLE_S", 4.0)  # longer than ranks take to come, on a busy machine
    with Ranks(1, device="cpu") as one:
        one.run("kept = 1")
        (pid,) = one.pids
        assert wait_until(lambda: has_ended(pid))
        one.run("rank")
        output = capsys.readouterr()
    assert output.out == "0\n"
    assert output.err == f"The ranks had ended, after {4.0 / 3600:g} hours without a cell. {RESTARTED}\n"


def test_each_rank_has_a_gpu_of_its_own(monkeypatch):
    """Without a GPU here: the ranks are asked for, on machines that have two, one, or a broken one."""
    started = []
    monkeypatch.setattr(
        live, "Processes", lambda body, world_size, device, *_, **__: started.append((world_size, device))
    )
    monkeypatch.setattr(Ranks, "_await_start", lambda self: None)
    for gpus, device, expected in [
        (Gpus(2), "cuda", (2, "cuda")),
        (Gpus(2), "auto", (2, "cuda")),
        (Gpus(1), "auto", (2, "cpu")),
        (Gpus(2, "broken"), "auto", (2, "cpu")),
        (Gpus(2), "cpu", (2, "cpu")),
    ]:
        monkeypatch.setattr("fsdp_helpers.ranks.group.find_gpus", lambda wanted, gpus=gpus: gpus)
        Ranks(2, device=device).close()
        assert started.pop() == expected
    monkeypatch.setattr("fsdp_helpers.ranks.group.find_gpus", lambda wanted: Gpus(1))
    with pytest.raises(ValueError, match="2 ranks need 2 CUDA devices, this machine has 1"):
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
    assert live.opened_last() is two
