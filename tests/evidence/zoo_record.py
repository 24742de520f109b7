"""The model zoo on real ranks, beside its plans: `python tests/evidence/zoo_record.py` writes the record that 09 reads.

It measures what `notebooks/reference/zoo.json` lacks, and everything if that was measured with a different torch.
"""

import json
import platform
from collections.abc import Iterable
from dataclasses import asdict
from datetime import date
from functools import cache
from pathlib import Path

import torch
from zoo import ZOO
from zoo_ranks import measure_zoo

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.measuring.memory import one_thread
from fsdp_helpers.measuring.prediction_errors import ErrorRow, Run, error_row, read_errors
from fsdp_helpers.measuring.step_profile import measure_step
from fsdp_helpers.planning.profile import StepProfile
from fsdp_helpers.ranks.launch import launch
from fsdp_helpers.sharding.recompute import checkpoint_activations

RECORD = Path(__file__).parents[2] / "notebooks/reference/zoo.json"
COMMAND = "python tests/evidence/zoo_record.py"
VARIANTS = {
    "DDP": {"strategy": "ddp"},
    "auto-wrap": {"strategy": "fsdp-auto-wrap"},
    "checkpointed": {"strategy": "fsdp-auto-wrap", "activation_checkpointing": "units"},
    "bf16": {"strategy": "fsdp-auto-wrap", "precision": "bf16"},
}
REFUSED = {("ResNet", "bf16")}  # statistics in fp32 beside weights in bf16: `test_own_plan`
ALL = [(name, way) for name in ZOO for way in VARIANTS if (name, way) not in REFUSED]
REAL_RANKS = (2, 4)
RUNS = [Run(name, way, ranks, True) for ranks in REAL_RANKS for name, way in ALL]


@cache
def zoo_profile(name: str, checkpointing: str, precision: str) -> StepProfile:
    entry = ZOO[name]
    torch.manual_seed(0)
    model, batch = entry.build(), entry.batch()
    if checkpointing != "none":
        model = checkpoint_activations(model, entry.units, checkpointing)
    with one_thread():  # as the ranks have
        return measure_step(model, lambda: entry.loss(model, batch), entry.units, precision=precision)


def measure_cases(cases: list[tuple[str, str]], ranks: int) -> list[ErrorRow]:
    """Measure each (model, way) on real ranks, all in one launch, and put it beside its plan."""
    found = launch(
        measure_zoo,
        [(name, VARIANTS[way]) for name, way in cases],
        world_size=ranks,
        device="cpu",
        progress=False,
    )[0]
    rows = []
    for (name, way), measured in zip(cases, found, strict=True):
        config = TrainConfig(**VARIANTS[way])
        profile = zoo_profile(name, config.activation_checkpointing, config.precision)
        rows.append(error_row(Run(name, way, ranks, True), config, profile, ZOO[name].units, measured))
        ratio = rows[-1].peak_bytes / rows[-1].predicted_bytes
        print(f"{ranks} ranks, {name}, {way}: {ratio:.4f}, {rows[-1].when}, exact: {rows[-1].is_exact}", flush=True)
    return rows


def write_zoo(path: Path = RECORD) -> None:
    """Measure what the record lacks, one launch for each model; write the file after each."""
    known = {row.run: row for row in read_errors(path)} if _versions_of(path) == _versions() else {}
    for ranks in REAL_RANKS:
        for name in ZOO:
            runs = [run for run in RUNS if (run.model, run.world_size) == (name, ranks) and run not in known]
            missing = [(run.model, run.variant) for run in runs]
            if missing:
                known |= {row.run: row for row in measure_cases(missing, ranks)}
                _write(path, [known[run] for run in RUNS if run in known])


def _versions() -> dict[str, str]:
    return {"torch": torch.__version__, "python": platform.python_version()}


def _versions_of(path: Path) -> dict[str, str] | None:
    return json.loads(path.read_text()).get("versions") if path.exists() else None


def _write(path: Path, rows: Iterable[ErrorRow]) -> None:
    """Write one row in a line, so that a difference can be read."""
    about = {"measured_by": COMMAND, "date": date.today().isoformat(), "versions": _versions(), "ranks": REAL_RANKS}
    head = json.dumps(about, indent=1).removesuffix("\n}")
    lines = ",\n".join(f"  {json.dumps(asdict(row))}" for row in rows)
    path.write_text(f'{head},\n "rows": [\n{lines}\n ]\n}}\n')


if __name__ == "__main__":
    write_zoo()
