"""Three models in five variants on 1 to 1,024 ranks, beside their plans: the record that chapter 09 reads.

`python tests/evidence/planning_errors.py` measures what `notebooks/reference/planning-errors.json` lacks, and updates
it after each run. DeepNet's runs take by far the most time and memory.
"""

import json
from dataclasses import asdict
from itertools import product
from pathlib import Path

import torch

from fsdp_helpers.measuring.prediction_errors import (
    IMAGES,
    THRESHOLDS,
    VARIANTS,
    ErrorRow,
    Run,
    measure_errors,
    read_errors,
)

RECORD = Path(__file__).parents[2] / "notebooks/reference/planning-errors.json"
RANKS = [(count, True) for count in (1, 2, 4)] + [(count, False) for count in (8, 64, 1024)]
RUNS = [Run(model, variant, *ranks) for model, variant, ranks in product(THRESHOLDS, VARIANTS, RANKS)]


def write_errors(path: Path = RECORD) -> list[ErrorRow]:
    known = {row.run: row for row in read_errors(path)} if path.exists() else {}
    for row in measure_errors([run for run in RUNS if run not in known]):
        known[row.run] = row
        rows = [asdict(known[run]) for run in RUNS if run in known]
        record = {"images_per_rank": IMAGES, "torch": torch.__version__, "rows": rows}
        path.write_text(json.dumps(record, indent=1) + "\n")
    return [known[run] for run in RUNS]


if __name__ == "__main__":
    write_errors()
