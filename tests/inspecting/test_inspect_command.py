"""`inspect` under torchrun: its report, its statuses, bugs put into scripts that work, and losses that stay as they are."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from inspected import FOLDER, take_home, watch
from leftovers import PROJECT
from runs import mostly_long

END_S = 300.0
LOSS = "outputs.flatten(0, 1), labels.flatten())"
BUGS = [  # one line of a take-home script each, and the card that names it
    ("fsdp2.py", "    fully_shard(model, mesh=mesh)", "    pass", "wrong-forgotten-root"),
    ("levers.py", "is_last)  # the last", "not is_last)  # the last", "crash-accumulation-flag"),
    ("fsdp2.py", "torch.manual_seed(0)", "torch.manual_seed(rank)", "wrong-different-seeds"),
    ("fsdp2.py", "inputs.chunk(world_size)[rank]", "inputs.chunk(world_size)[0]", "wrong-same-data"),
    (
        "fsdp2.py",
        LOSS,
        LOSS.replace("())", "().where(torch.rand(24 * 16 // world_size) > rank / 2, -100))"),
        "wrong-mean-of-means",
    ),
    ("fsdp2.py", "    for layer in model[:-1]:", "    for layer in ():", "memory-root-only"),
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
    for said in ("wrong-forgotten-root.py line", "s: 1 finding", "didn't get to see in 2 optimizer steps:"):
        assert said in done.stdout


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["missing.py"], "there's no script missing.py"),
        (["README.md"], "isn't Python"),
        (["--steps", "0", "tests/helpers/inspected.py"], "--steps is 0; it must be from 1 to 1,000,000"),
        (["--limit", "inf", "tests/helpers/inspected.py"], "--limit is inf; it must be"),
        ([], "SCRIPT"),
        (["RANK=0", "tests/helpers/inspected.py"], "call it without torchrun"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments, said):
    variables = dict(argument.split("=") for argument in arguments if argument.startswith("RANK"))
    done = inspect(*arguments[len(variables) :], **variables)
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


KEEP_BITS = """
import atexit, os, torch
kept, back = [], torch.Tensor.backward
torch.Tensor.backward = lambda self, *args, **options: (kept.append(self.item().hex()), back(self, *args, **options))[1]
leave = os._exit
os._exit = lambda status: (open(f"{FILE}{os.environ['RANK']}", "w").write(" ".join(kept)), leave(status))
"""


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_losses_are_bitwise_those_of_a_plain_run(num_ranks, tmp_path):
    code = (FOLDER / "fsdp2.py").read_text()
    script, (first, second) = tmp_path / "fsdp2.py", (f"{tmp_path}/plain", f"{tmp_path}/watched")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--log-dir", tmp_path]
    torchrun += ["--nproc-per-node", str(num_ranks)]
    script.write_text(f"FILE = {first!r}\n{KEEP_BITS}\n{code}")
    subprocess.run([*torchrun, script], capture_output=True, timeout=END_S, check=True)
    script.write_text(f"FILE = {second!r}\n{KEEP_BITS}\n{code}")
    done = inspect("--world-size", num_ranks, "--steps", 6, script)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(num_ranks):
        losses = Path(f"{first}{rank}").read_text()
        assert losses.count("0x") == 6 and Path(f"{second}{rank}").read_text() == losses


def test_names_of_gpus_are_redirected_to_the_cpu(tmp_path):
    script = tmp_path / "gpus.py"
    script.write_text(
        "import torch, torch.distributed as dist\nfrom torch.nn.parallel import DistributedDataParallel\n"
        "dist.init_process_group('nccl')\nrank = dist.get_rank()\ntorch.cuda.set_device(rank)\n"
        "model = DistributedDataParallel(torch.nn.Linear(8, 2).to(rank), device_ids=[rank], output_device=rank)\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        "images = torch.randn(6, 8, generator=torch.Generator().manual_seed(rank)).to(torch.device('cuda', rank))\n"
        "model(images.cuda(non_blocking=True)).square().mean().backward()\noptimizer.step()\n"
        "print(torch.ones(1, device=f'cuda:{rank}').device, dist.get_backend())\ntorch.cuda.Stream()\n"
    )
    done = inspect(script)
    assert "cpu gloo" in done.stdout and "1 optimizer step: no findings" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 1 and "rank 0 failed, gpus.py line 12: " in done.stdout


@pytest.mark.parametrize("name, right, wrong, card", mostly_long(BUGS, telling=(0, 1)))
def test_a_bug_of_one_line_is_named_by_its_card(name, right, wrong, card, tmp_path):
    code, arguments = take_home(name, tmp_path)
    assert code.count(right) >= 1
    assert card in watch(name, code.replace(right, wrong, 1), arguments)[0]
