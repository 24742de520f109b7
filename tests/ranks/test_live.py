"""Ranks that stay: what a cell shows, what it keeps, and how it ends."""

import textwrap

import pytest
import torch
from torch.distributed.tensor import Shard

from fsdp_helpers import Ranks
from fsdp_helpers.ranks.cells import LocalShard
from fsdp_helpers.ranks.launching.errors import RankError

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
    assert "rank 1 had finished the cell, without taking part in a collective" in text and text.endswith(RESTARTED)


def test_a_forgotten_asynchronous_collective_is_noticed_after_its_cell(ranks):
    text = failure(ranks, "if rank == 0:\n    work = dist.all_reduce(torch.ones(1), async_op=True)")
    assert "rank 1 of 2 failed: it did not take part in a collective" in text and text.endswith(RESTARTED)


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
