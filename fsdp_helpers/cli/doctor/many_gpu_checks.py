"""Checks for two or more GPUs: bytes sent, predicted peak, the rank named in a hang, the take-home scripts."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import fsdp_helpers
from fsdp_helpers.cli.doctor.device_checks import who_is_blamed
from fsdp_helpers.cli.doctor.rows import Outcome, Unfit
from fsdp_helpers.cli.doctor.training_checks import ranks_of, runs, settings
from fsdp_helpers.config import TrainConfig
from fsdp_helpers.measuring.step_profile import measure_run, units_of
from fsdp_helpers.planning.peak import walk_step
from fsdp_helpers.quantities import format_bytes

TAKE_HOME = Path(fsdp_helpers.__file__).resolve().parent.parent / "notebooks" / "take_home"
ALONE = ("ddp.py", "fsdp1.py", "fsdp2.py", "offload.py", "checkpoint.py", "levers.py", "vit.py")
LANGUAGE, TEXT = TAKE_HOME.parent / "reference" / "language", TAKE_HOME.parent / "GLOSSARY.md"
# Each script with its runs, one after another; FOLDER is a temporary one.
SCRIPTS = {name: [[name]] for name in ALONE} | {
    "from_ddp.py": [["ddp.py", "FOLDER/ddp.pt", "3"], ["from_ddp.py", "FOLDER/ddp.pt"]],
    "finetune.py": [["finetune.py", str(LANGUAGE), str(TEXT), "FOLDER/run", "2"]],
}
NEAR = 0.1  # a predicted peak; work spaces of CUDA's libraries are not predicted


def a_run(api: str) -> TrainConfig:
    """Return a run whose memory is mostly that of tensors: a transformer, which needs no convolutions' work spaces."""
    return settings(model="vit", min_num_params=20_000, api=api)


def sent_bytes(api: str, num_gpus: int) -> Outcome:
    """Check that a rank sends what the formula says, to the byte."""
    config, ranks = a_run(api), ranks_of(num_gpus)
    (run,) = runs([config], num_gpus)
    step = walk_step(measure_run(config, ranks, "cuda"), config, ranks, units_of(config), backend="nccl")
    sent = sum(seen.sent_bytes for seen in run.ranks[0].collectives)
    predicted = sum(seen.sent_bytes for seen in step.collectives)
    measured = f"{format_bytes(sent)} in a step, predicted {format_bytes(predicted)}"
    return Outcome(sent == predicted, measured, {"sent_bytes": sent, "predicted_bytes": predicted})


def predicted_peak(api: str, num_gpus: int) -> Outcome:
    config, ranks = a_run(api), ranks_of(num_gpus)
    (run,) = runs([config], num_gpus)
    step = walk_step(measure_run(config, ranks, "cuda"), config, ranks, units_of(config), backend="nccl")
    measured, predicted = max(rank.peak_bytes for rank in run.ranks), step.peak.bytes
    text = f"{format_bytes(measured)}, predicted {format_bytes(predicted)}: {measured / predicted - 1:+.1%}"
    values = {"peak_bytes": measured, "predicted_bytes": predicted}
    return Outcome(abs(measured / predicted - 1) <= NEAR, text, values)


def blame(way: str, num_gpus: int) -> Outcome:
    return who_is_blamed(way, 2, "cuda")


def take_home(script: str) -> Callable[[int], Outcome]:
    """Return a check that runs the script under torchrun, on two GPUs."""

    def check(num_gpus: int) -> Outcome:
        if not (TAKE_HOME / script).exists():
            raise Unfit("the scripts lie beside the notebooks, which are not here")
        with tempfile.TemporaryDirectory(prefix="fsdp_helpers-") as folder:
            for name, *arguments in SCRIPTS[script]:
                done = run_script(name, [argument.replace("FOLDER", folder) for argument in arguments])
                if done.returncode:
                    print(done.stderr)
                    errors = [line for line in done.stderr.splitlines() if "Error: " in line] or [
                        "no error was printed"
                    ]
                    return Outcome(False, f"{name}: exit status {done.returncode}; {errors[0]}")
        return Outcome(True, f"exit status 0; {(done.stdout.splitlines() or ['no output'])[-1]}")

    return check


def run_script(name: str, arguments: list[str]) -> subprocess.CompletedProcess:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    variables = {**os.environ, "PET_LOG_DIR": os.devnull}
    return subprocess.run(
        [*torchrun, str(TAKE_HOME / name), *arguments], env=variables, capture_output=True, text=True, check=False
    )
