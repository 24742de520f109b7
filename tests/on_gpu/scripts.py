"""Every take-home script under torchrun with one rank on a GPU; runs that are killed, and go on; and `pytest -m gpu`."""

import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from pretrained import config_of_llama, save_hugging_face

from fsdp_helpers.cli.doctor.gpu import TAIL, Check, Finding, Numbers, judged
from fsdp_helpers.models.llama import Llama
from fsdp_helpers.models.shapes import LlamaShape

PROJECT = Path(__file__).resolve().parents[2]
FOLDER = PROJECT / "notebooks" / "take_home"
TINY = LlamaShape(width=64, depth=3, num_heads=4, num_kv_heads=2, mlp_width=96, vocabulary=256, context=64)
STEP = re.compile(r"^step (\d+)  loss (\S+)", re.MULTILINE)
SCRIPT_STEPS = 6
# From the losses of one CPU process: Adam's first steps magnify what rounding changes. Convolutions may use TF32.
APART = {"levers.py": 0.05, "vit.py": 0.01}
SAME = 1e-3
SAME_AGAIN = 0.01  # the same steps in bf16, taken again after a kill; some sums on a GPU have no fixed order


def run_torchrun(script: str, *arguments: Any, kill_at: int | None = None, timeout_s: float = 60.0) -> dict:
    """Run a script on one rank; with `kill_at`, kill torchrun once that step's line is there."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "PET_LOG_DIR": os.devnull}
    with subprocess.Popen(
        [*command, str(FOLDER / script), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    ) as child:
        lines = []
        try:
            for line in child.stdout:  # until the rank has ended, too
                lines.append(line)
                if kill_at is not None and (seen := STEP.match(line)) and int(seen[1]) >= kill_at:
                    child.send_signal(signal.SIGKILL)
                    kill_at = None
            status = child.wait(timeout_s)
        finally:
            child.kill()
    output = "".join(lines)
    losses = {int(step): float(loss) for step, loss in STEP.findall(output)}
    return {"status": status, "losses": losses, "output": output[-TAIL:]}


# ---------------------------------------------------------------- the short scripts


def measure_short(name: str) -> Iterator[tuple[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "ddp.pt"
        yield "expected", losses_of_one_process(name, file)
        yield "run", run_torchrun(name, *([file] if name == "from_ddp.py" else []))


def losses_of_one_process(name: str, file: Path) -> list[float]:
    """The script's model and batches, in this process on the CPU; after 3 steps, FILE is what a DDP job would save."""
    script = runpy.run_path(str(FOLDER / name))
    torch.manual_seed(0)
    model = script["ViT"]() if name == "vit.py" else script["build_model"]()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, fused=True)
    losses = []
    for step in range(SCRIPT_STEPS):
        inputs, labels = script["load_batch"](step)
        outputs = model(inputs)
        loss = F.cross_entropy(outputs.flatten(0, -2), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        if name == "levers.py":
            torch.nn.utils.clip_grad_norm_(model.parameters(), script["MAX_NORM"])
        optimizer.step()
        if step == 2:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}, file)
    return losses


def judge_short(name: str, numbers: Numbers) -> Iterator[Finding]:
    run, expected = numbers["run"], numbers["expected"]
    first = 4 if name == "from_ddp.py" else 1
    losses = {int(step): loss for step, loss in run["losses"].items()}
    steps = list(range(first, SCRIPT_STEPS + 1))
    complete = run["status"] == 0 and sorted(losses) == steps
    said = f"status {run['status']}, steps {sorted(losses)}"
    yield judged(f"{name} under torchrun", complete, f"status 0, steps {steps}", said)
    apart = max((abs(losses[step] - expected[step - 1]) for step in losses), default=float("inf"))
    most = APART.get(name, SAME)
    yield judged(f"{name}: losses of one CPU process", apart <= most, f"within {most:g}", f"{apart:.1e}")


# ---------------------------------------------------------------- killed, and continued


def measure_checkpoint() -> Iterator[tuple[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        yield from killed_and_continued("checkpoint.py", lambda steps: (folder, steps), Path(folder), "[0-9]*", 12, 15)


def measure_finetune() -> Iterator[tuple[str, Any]]:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        torch.manual_seed(0)
        save_hugging_face(Llama(TINY), folder / "model", config_of_llama(TINY))
        text = folder / "text.txt"
        text.write_text("\n\n".join(f"Line {number}: " + "so it goes. " * (number % 5) for number in range(40)))
        run = folder / "run"
        yield from killed_and_continued(
            "finetune.py", lambda steps: (folder / "model", text, run, steps), run, "step-*", 6, 10, long=10
        )
        yield "files", sorted(path.name for path in (run / "model").iterdir())


def killed_and_continued(
    name: str, arguments: Callable, run: Path, pattern: str, kill_at: int, steps: int, long: int = 10_000
) -> Iterator[tuple[str, Any]]:
    """Yield a run that's killed, its newest checkpoint, and the run that continues from it to the end."""
    yield "killed", run_torchrun(name, *arguments(long), kill_at=kill_at)
    found = max((path.name for path in run.glob(pattern)), default="0")
    saved = int(found.removeprefix("step-"))
    yield "saved", saved
    yield "steps", max(steps, saved + 5) if long > steps else steps
    yield "continued", run_torchrun(name, *arguments(max(steps, saved + 5) if long > steps else steps))


def judge_killed(name: str, numbers: Numbers) -> Iterator[Finding]:
    """Judge a killed run and the one that continues it."""
    run, saved, steps = numbers["continued"], numbers["saved"], numbers["steps"]
    before = {int(step): loss for step, loss in numbers["killed"]["losses"].items()}
    after = {int(step): loss for step, loss in run["losses"].items()}
    expected = list(range(saved + 1, steps + 1))
    complete = run["status"] == 0 and saved > 0 and sorted(after) == expected
    said = f"status {run['status']}, step {min(after, default='none')} to {max(after, default='none')}"
    wanted = f"status 0, step {saved + 1} to {steps}"
    yield judged(f"{name}: killed and continued", complete, f"{wanted}, from a checkpoint", said)
    again = before.keys() & after.keys()
    apart = max((abs(before[step] - after[step]) for step in again), default=float("inf"))
    said = f"{apart:.1e} in {len(again)} steps"
    yield judged(f"{name}: steps taken again", apart <= SAME_AGAIN, f"within {SAME_AGAIN:g}", said)


# ---------------------------------------------------------------- finetune_hf.py

HF_SETTINGS = ("--steps", "10", "--batch", "8", "--save-every", "4", "--warmup", "2", "--test-every", "5")
HF_STEPS, HF_KILL_AT = 10, 7
HF_RUNS = {
    "adapters": ("--lora-rank", "4"),
    "compiled": ("--compile",),
    "offload": ("--offload", "--micro-batch", "2"),
}


def measure_hf() -> Iterator[tuple[str, Any]]:
    with tempfile.TemporaryDirectory() as place:
        model, text = hugging_face_folder(Path(place))
        run = Path(place) / "run"
        yield "killed", run_torchrun("finetune_hf.py", model, text, "--out", run, *HF_SETTINGS, kill_at=HF_KILL_AT)
        saved = max((path.name for path in run.glob("step-*")), default="0")
        yield "saved", int(saved.removeprefix("step-"))
        yield "steps", HF_STEPS
        yield "continued", run_torchrun("finetune_hf.py", model, text, "--out", run, *HF_SETTINGS)


def hugging_face_folder(folder: Path) -> tuple[Path, Path]:
    from hf_models import make_model, write_text

    return make_model("llama", folder / "model"), write_text(folder / "text.txt")


def measure_hf_way(way: str) -> Iterator[tuple[str, Any]]:
    with tempfile.TemporaryDirectory() as place:
        model, text = hugging_face_folder(Path(place))
        settings = (*HF_SETTINGS, *HF_RUNS[way])
        yield "run", run_torchrun("finetune_hf.py", model, text, "--out", Path(place) / "run", *settings)


def judge_hf_way(way: str, numbers: Numbers) -> Iterator[Finding]:
    run = numbers["run"]
    losses = {int(step): loss for step, loss in run["losses"].items()}
    complete = run["status"] == 0 and sorted(losses) == list(range(1, HF_STEPS + 1))
    said = f"status {run['status']}, {len(losses)} steps"
    yield judged(f"finetune_hf.py, {way}", complete, f"status 0, {HF_STEPS} steps", said)
    values = [losses[step] for step in sorted(losses)]
    lower = len(values) > 1 and values[-1] < values[0]
    said = f"{values[0]:.3f} to {values[-1]:.3f}" if values else "none"
    yield judged(f"finetune_hf.py, {way}: loss", lower, "it falls", said)


# ---------------------------------------------------------------- pytest -m gpu


def measure_pytest() -> Iterator[tuple[str, Any]]:
    """Yield how many tests passed, and the errors of those that failed; the output is in this check's log."""
    files = ["tests/test_gpu.py", "tests/measuring/test_memory_on_cuda.py"]
    several = ["-n", "6", "--dist", "load"] if find_spec("xdist") else []
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", "-p", "no:cacheprovider", *several]
        # Without the plugins that pyproject.toml has settings for
        settings = ["addopts=--import-mode=importlib", "filterwarnings="]
        overridden = [word for setting in settings for word in ("-o", setting)]
        subprocess.run([*command, *overridden, f"--junitxml={report}", *files], cwd=PROJECT, check=False)
        cases = list(ElementTree.parse(report).iter("testcase"))
    broken = {
        f"{case.get('classname')}::{case.get('name')}": (one.get("message") or one.text or "")[:500]
        for case in cases
        for kind in ("failure", "error")
        for one in case.findall(kind)
    }
    skipped = sum(case.find("skipped") is not None for case in cases)
    yield "tests", {"passed": len(cases) - len(broken) - skipped, "skipped": skipped, "failed": broken}


def judge_pytest(numbers: Numbers) -> Iterator[Finding]:
    tests = numbers["tests"]
    passed = tests["passed"] > 0 and not tests["failed"]
    said = f"{tests['passed']} passed, {tests['skipped']} skipped, {len(tests['failed'])} failed"
    yield judged("pytest -m gpu", passed, "none fails", " ".join([said, *tests["failed"]]))


def check(title: str, measure: Callable, judge: Callable, needs: Sequence[str] = (), limit_s: float = 90.0) -> Check:
    return Check(title=title, measure=measure, judge=judge, needs=needs, limit_s=limit_s)


SHORT = ("fsdp2.py", "ddp.py", "fsdp1.py", "offload.py", "levers.py", "vit.py", "from_ddp.py")
HF = ("transformers", "tokenizers", "safetensors")
CHECKS = (
    check("checkpoint.py", measure_checkpoint, partial(judge_killed, "checkpoint.py"), ("filelock",)),
    check("finetune.py", measure_finetune, partial(judge_killed, "finetune.py"), ("safetensors",)),
    check("finetune_hf.py", measure_hf, partial(judge_killed, "finetune_hf.py"), HF),
    *(check(name, partial(measure_short, name), partial(judge_short, name)) for name in SHORT),
    *(check(f"finetune_hf.py, {way}", partial(measure_hf_way, way), partial(judge_hf_way, way), HF) for way in HF_RUNS),
    check("pytest -m gpu", measure_pytest, judge_pytest, ("pytest", "torchvision", "sklearn", "psutil", "tqdm"), 240.0),
)
