"""`make test-gpu`: every check on this machine's GPUs, the most telling ones first, in at most eight minutes.

It installs nothing and runs with any Python that has PyTorch. A check that needs a package which isn't here is left
out. The folder gpu-record/ (or the variable GPU_RECORD) gets record.md, record.json and each check's output. Arguments
are titles of checks, to run only these (`make test-gpu` runs all).
"""

import os
import sys
from pathlib import Path

from fsdp_helpers.cli.doctor.gpu import main

MODULES = ("fsdp_helpers.cli.doctor.gpu_checks", *(f"on_gpu.{name}" for name in ("claims", "plans", "live", "scripts")))
LIMIT_S = 480.0

if __name__ == "__main__":
    record = Path(os.environ.get("GPU_RECORD") or "gpu-record").absolute()
    sys.exit(main(MODULES, record, LIMIT_S, only=sys.argv[1:]))
