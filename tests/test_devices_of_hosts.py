"""Two torchruns that stand for two hosts with different numbers of GPUs: the fine-tuning scripts and our own command."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from faked_hosts import FAKED_HOST
from leftovers import PROJECT
from pretrained import config_of_llama, save_hugging_face
from take_home_workers import FOLDER
from torchrun_jobs import SMALL, agents, torchrun_job

from fsdp_helpers.models.llama import Llama
from fsdp_helpers.models.shapes import LlamaShape
from fsdp_helpers.teaching.lessons.torchruns import free_port

SHAPE = LlamaShape(width=16, depth=1, num_heads=2, num_kv_heads=2, mlp_width=24, vocabulary=256, context=64)


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hosts")
    torch.manual_seed(0)
    save_hugging_face(Llama(SHAPE), folder / "model", config_of_llama(SHAPE))
    (folder / "text.txt").write_text("\n\n".join(f"So it goes, {number} times." for number in range(30)))
    return folder


def command_of(name: str, home: Path, run: Path, device: str) -> list:
    if name == "finetune.py":
        script = run.with_suffix(".py")
        script.write_text((FOLDER / name).read_text().replace('DEVICE = "auto"', f'DEVICE = "{device}"'))
        return [script, home / "model", home / "text.txt", run, 1]
    if name == "finetune_hf.py":
        flags = ["--steps", 1, "--batch", 4, "--device", device]
        return [FOLDER / name, home / "model", home / "text.txt", "--out", run, *flags]
    return ["-m", "fsdp_helpers", "train", *SMALL, "--strategy", "ddp", "--max-steps", 1, "--device", device]


def on_two_hosts(name: str, gpus: tuple[int, int], home: Path, folder: Path, device: str) -> list[str]:
    """What each host printed."""
    port = free_port()
    program = [PROJECT / "tests/helpers/faked_hosts.py"]
    command = command_of(name, home, folder / "run", device)
    jobs = [
        torchrun_job(
            agents("2", port),
            command,
            folder,
            name=host,
            program=program,
            **{FAKED_HOST: f"{host}:{count}", "PYTHONPATH": f"{PROJECT}:{PROJECT / 'tests/helpers'}"},
        )
        for host, count in zip("ab", gpus, strict=True)
    ]
    with jobs[0] as first, jobs[1] as second:
        status = {first.wait(), second.wait()}
        outputs = [first.output, second.output]
    assert status == ({0} if all(count == 0 for count in gpus) and device == "auto" else {1}), outputs
    return outputs


WITHOUT = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed: make test-tools")
PROGRAMS = ["finetune.py", pytest.param("finetune_hf.py", marks=[pytest.mark.tools, WITHOUT]), "fsdp_helpers"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_hosts_that_differ_end_in_one_line_with_status_2(name, home, tmp_path):
    outputs = on_two_hosts(name, (1, 0), home, tmp_path, "auto")
    lines = [line for output in outputs for line in output.splitlines() if line.startswith(f"{name}: ")]
    assert len(set(lines)) == 1, outputs
    assert len(lines) == (2 if name == "fsdp_helpers" else 1)  # our command's first rank on each host says it
    assert re.search(r"fewer GPUs than ranks on b \((usable )?GPUs: 0, ranks: 1\); fix that, or ", lines[0]), lines
    assert "exitcode  : 2 " in "".join(outputs) and 'faked_hosts.py", line' not in "".join(outputs), outputs


@pytest.mark.parametrize("name", PROGRAMS)
def test_hosts_without_gpus_train_on_the_cpu_and_say_so_first(name, home, tmp_path):
    outputs = on_two_hosts(name, (0, 0), home, tmp_path, "auto")
    if name == "fsdp_helpers":
        assert re.search("2 rank.* on cpu", "".join(outputs)), outputs
    else:
        assert any(re.search(r"^2 ranks on (cpu|CPU), ", output, re.MULTILINE) for output in outputs), outputs
