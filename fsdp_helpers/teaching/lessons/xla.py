"""Run PyTorch/XLA scripts in their own environment, or show their saved output if torch_xla isn't installed.

torch_xla needs one particular version of torch, so we don't import it here. A script in notebooks/xla gets a folder
with its settings, images and initial parameters, runs in its own environment, and writes its result as JSON.
"""

import ast
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryFile

import torch
from IPython.display import Markdown
from safetensors.torch import save_file

PROJECT = Path(__file__).resolve().parents[3]
SCRIPTS = PROJECT / "notebooks" / "xla"
RECORDS = PROJECT / "notebooks" / "reference" / "xla"
VARIABLE, BUILT_BY_MAKE = "FSDP_XLA_PYTHON", PROJECT / ".venv-xla" / "bin" / "python"
TIMEOUT_S, TERM_S = 600.0, 5.0  # limit for a script, and the time from SIGTERM to SIGKILL
STUCK = re.compile(r"only (\d+) of them arrived")


class XlaMissing(RuntimeError):
    """Raised when no environment with torch_xla is found; the message explains how to get one."""


class XlaError(RuntimeError):
    """Raised when a script fails; the message explains a known failure or quotes the script's last lines of output."""


class XlaTimeout(TimeoutError):
    """Raised when a script is stopped because it's still running after its time limit."""


# ---------------------------------------------------------------- scripts in the other environment


def find_python() -> Path:
    """Return the interpreter that has torch_xla: FSDP_XLA_PYTHON if set, otherwise the one that `make xla` built.

    Raises XlaMissing if neither exists, and ValueError if the variable names a file that doesn't exist.
    """
    chosen = os.environ.get(VARIABLE)
    python = Path(chosen) if chosen else BUILT_BY_MAKE
    if python.exists():
        return python
    if chosen:
        raise ValueError(f"{VARIABLE} names {chosen}, but there is no such file; `make xla` adds a Python to .venv-xla")
    raise XlaMissing(f"PyTorch/XLA isn't installed here; run `make xla`, or set {VARIABLE} to a Python that has it")


def run_script(
    name: str,
    folder: Path,
    settings: Mapping[str, object],
    *,
    starter: Sequence[str] = (),
    timeout_s: float = TIMEOUT_S,
) -> object:
    """Run notebooks/xla/NAME.py in `folder` and return its result, or None if it didn't write one.

    `starter`, such as `-m torch.distributed.run`, precedes the script. Raises XlaMissing, XlaTimeout after
    `timeout_s` seconds, and XlaError if the script fails. No process outlives the call.
    """
    python = find_python()
    (folder / "settings.json").write_text(json.dumps(settings))
    (folder / "result.json").unlink(missing_ok=True)
    _run([str(python), *starter, str(SCRIPTS / f"{name}.py"), str(folder)], f"{name}.py", folder, timeout_s)
    result = folder / "result.json"
    return json.loads(result.read_text()) if result.exists() else None


def consolidate_shards(folder: Path, prefix: str, *, timeout_s: float = TIMEOUT_S) -> Path:
    """Merge all replica files into one safetensors file of full tensors, using torch_xla's command; return its path.

    The tensors have the plain model's names, as in the files that `fsdp_helpers.consolidate` writes. Raises the same
    errors as `run_script`.
    """
    module = "torch_xla.distributed.fsdp.consolidate_sharded_ckpts"
    files = ["--ckpt_prefix", str(folder / prefix), "--ckpt_suffix", "_rank-*-of-*.pth"]
    _run([str(find_python()), "-m", module, *files], module, folder, timeout_s)
    whole = torch.load(folder / f"{prefix}_consolidated.pth", weights_only=True)["model"]
    path = folder / f"{prefix}.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in whole.items()}, path)
    return path


def settings_of_run(
    name: str,
    *,
    model: str = "simple",
    cut: str | None = None,
    flatten: bool = False,
    reshard: bool = True,
    checkpoint: bool = False,
    **more: object,
) -> dict:
    """Return the settings for a run of train.py.

    `cut` is "nested", "size", "transformer" or None; `steps` selects which steps to run (default: all).
    """
    given = {"name": name, "model": model, "cut": cut, "flatten": flatten, "reshard": reshard, "checkpoint": checkpoint}
    return {**given, "steps": (0, None), **more}


def _run(command: list[str], name: str, folder: Path, timeout_s: float) -> None:
    temporary = folder / "tmp"  # a script that XLA kills doesn't clean up; this is deleted with its folder
    temporary.mkdir(exist_ok=True)
    ours = {"PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1", "FSDP_XLA_HELD": "1", "TMPDIR": str(temporary)}
    environment = {**os.environ, **ours}
    with TemporaryFile("w+") as said:
        streams = {"stdin": subprocess.PIPE, "stdout": said, "stderr": said}  # its input closes when this process ends
        process = subprocess.Popen(command, env=environment, **streams, start_new_session=True)
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise XlaTimeout(
                f"{name} was still running after {timeout_s:.0f} s and was stopped; is the machine busy?"
            ) from None
        finally:
            _end(process)
        said.seek(0)
        if process.returncode:
            raise XlaError(f"{name} ended with status {process.returncode}: {explain(said.read())}")


def _end(process: subprocess.Popen) -> None:
    """Stop the script and everything it started: SIGTERM first, since torchrun then stops its workers, then SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(TERM_S)
    process.stdin.close()


def explain(output: str) -> str:
    """Return the cause in words if the failure is known; otherwise, return the last lines that the script printed."""
    if arrived := STUCK.search(output):
        return (
            f"a collective was stuck: {arrived.group(1)} replica(s) reached it within 10 s, and XLA aborted the "
            "process. On a CPU, replicas meet only if all three measures are taken (a lock around each step, "
            "XLA_ENABLE_PARAM_ALIASING=0, pin_layout_in_collective_ops=False); if they are, the machine is too busy, "
            "so run the script again"
        )
    if "No module named 'torch_xla'" in output:
        return f"this Python lacks torch_xla; run `make xla` to get one that has it, or set {VARIABLE} to another"
    lines = [line for line in output.splitlines() if line.strip()]
    return "\n".join(lines[-12:]) or "it printed nothing"


# ---------------------------------------------------------------- run here, or saved


def run_or_show_saved(key: str, work: Callable[[], object], *, save: bool = False) -> object:
    """Return `work()`, converted to JSON and back; if PyTorch/XLA is missing, print that and return the saved output.

    If `save` is true, the new output is saved.
    """
    try:
        result = work()
    except XlaMissing as missing:
        return saved_output(key, str(missing))
    if save:
        record = {"finished": datetime.now(UTC).date().isoformat(), "result": result}
        (RECORDS / f"{key}.json").write_text(json.dumps(record, indent=1) + "\n")
    return json.loads(json.dumps(result))


def saved_output(key: str, why: str) -> object:
    """Return a saved output; print when it was saved and `why` the code isn't run here."""
    record = json.loads((RECORDS / f"{key}.json").read_text())
    print(f"{why}. Below is the output saved on {record['finished']}.")
    return record["result"]


def listing(name: str, *functions: str) -> Markdown:
    """Return the code of functions in notebooks/xla/NAME.py as highlighted Markdown."""
    code = (SCRIPTS / f"{name}.py").read_text()
    found = {node.name: ast.get_source_segment(code, node) for node in ast.parse(code).body if hasattr(node, "name")}
    return Markdown("```python\n" + "\n\n\n".join(found[function] for function in functions) + "\n```")
