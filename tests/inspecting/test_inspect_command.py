"""`inspect` under torchrun: its report, its statuses, bugs put into scripts that work, and losses that stay as they are."""

import os
import re
import subprocess
import sys

import pytest
from inspected import FOLDER, take_home, watch
from leftovers import PROJECT
from runs import mostly_long

END_S = 300.0
LOSS = "outputs.flatten(0, 1), labels.flatten())"
BUGS = [  # one line of a take-home script each, and the card that names it
    ("fsdp2.py", "    fully_shard(model, mesh=mesh)", "    pass", "wrong-forgotten-root"),
    ("levers.py", "is_last)  # the last", "False)  # the last", "memory-accumulation"),
    ("fsdp2.py", "torch.manual_seed(0)", "torch.manual_seed(rank)", "wrong-different-seeds"),
    ("fsdp2.py", "inputs.chunk(world_size)[rank]", "inputs.chunk(world_size)[0]", "wrong-same-data"),
    ("fsdp2.py", LOSS, LOSS.replace("())", "(), reduction='sum')"), "wrong-summed-loss"),
    (
        "fsdp2.py",
        LOSS,
        LOSS.replace("())", "().where(torch.rand(24 * 16 // world_size) > rank / 2, -100))"),
        "wrong-mean-of-means",
    ),
    ("fsdp2.py", "    for layer in model[:-1]:", "    for layer in ():", "memory-root-only"),
    ("levers.py", "reduce_dtype=torch.float32", "reduce_dtype=torch.bfloat16", "wrong-bf16-reduction"),
    ("levers.py", "dropout=0.0", "dropout=0.1", "wrong-same-random-numbers"),
    ("ddp.py", "outputs = model(inputs)", "outputs = model.module(inputs)", "wrong-unwrapped-module"),
]


def inspect(*arguments, **environment) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "fsdp_helpers", "inspect", *map(str, arguments)]
    return subprocess.run(
        command, cwd=PROJECT, env=os.environ | environment, capture_output=True, text=True, timeout=END_S
    )


def test_a_report_names_the_failure_its_evidence_and_its_file(tmp_path):
    done = inspect("--steps", 2, FOLDER.parent / "failures" / "wrong-forgotten-root.py")
    assert done.returncode == 1
    assert "A layer that's in no unit is trained on each rank alone: rank 0: 4.weight" in done.stdout
    assert "wrong-forgotten-root.py line" in done.stdout and "didn't get to see:" in done.stdout


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["missing.py"], "there's no script missing.py"),
        (["README.md"], "isn't Python"),
        (["--steps", "0", "tests/helpers/inspected.py"], "--steps is 0, below 1"),
        (["--world-size", "0", "tests/helpers/inspected.py"], "--world-size is 0, below 1"),
        ([], "SCRIPT"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments, said):
    done = inspect(*arguments)
    assert (done.returncode, done.stdout) == (2, "") and said in done.stderr and done.stderr.count("\n") == 1


def test_a_script_that_hangs_is_stopped_with_where_each_rank_was(tmp_path):
    script = tmp_path / "hangs.py"
    script.write_text(
        "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "if dist.get_rank() == 0:\n    dist.all_reduce(torch.ones(1))\nelse:\n    import time\n    time.sleep(600)\n"
    )
    done = inspect("--limit", "40", script)
    assert done.returncode == 1
    assert "rank 0 was waiting in all_reduce(), called from hangs.py line 4" in done.stdout
    assert "rank 1 was at hangs.py line 7" in done.stdout


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_losses_are_bitwise_those_of_a_plain_run(num_ranks, tmp_path):
    script = FOLDER / "fsdp2.py"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    plain = subprocess.run([*torchrun, script], capture_output=True, text=True, timeout=END_S)
    lines = re.findall(r"step \d.*", plain.stdout)
    assert len(lines) == 6
    done = inspect("--world-size", num_ranks, "--steps", 6, script)
    assert done.returncode == 0 and re.findall(r"step \d.*", done.stdout) == lines


@pytest.mark.parametrize("name, right, wrong, card", mostly_long(BUGS, telling=(0, 1)))
def test_a_bug_of_one_line_is_named_by_its_card(name, right, wrong, card, tmp_path):
    code, arguments = take_home(name, tmp_path)
    assert code.count(right) >= 1
    assert card in watch(name, code.replace(right, wrong, 1), arguments)[0]
