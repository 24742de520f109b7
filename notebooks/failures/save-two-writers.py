"""# Two runs write to the same folder

**Why.** torchrun was killed with SIGKILL (by the system when memory ran out, by a scheduler, or with `kill -9`), which
it can't pass on. Its ranks have become orphans, and they're still writing to the folder that the next run uses.

**How to tell.** In `ps -ef`, an orphaned rank's parent is process 1. `python -m fsdp_helpers doctor` lists orphans.

**The fix.** Ask Linux to kill each rank when its agent dies (`prctl`), and let a run lock its folder.
[Notebook 10](../10_many_machines.ipynb) lists all the ways that a job can end.

**What you see.**

    AssertionError: the old run has written step 7

**Also seen as**

- two runs write to the same folder; old processes keep training after torchrun has been killed
- GPU memory stays in use after Ctrl-C or kill; zombie or orphan processes from the last run
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TRAIN = """
import ctypes, pathlib, time
# fixed: ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
for step in range(8):
    pathlib.Path("checkpoint").write_text(str(step)); time.sleep(0.2)
"""

if os.environ["RANK"] == "0":  # one job is enough
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder, "checkpoint")
        Path(folder, "train.py").write_text(TRAIN)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "train.py"]
        job = subprocess.Popen(command, cwd=folder, env=os.environ | {"TMPDIR": folder})
        while not checkpoint.exists():
            time.sleep(0.1)
        job.kill()
        job.wait()
        checkpoint.write_text("the next run's")
        time.sleep(3)
        assert checkpoint.read_text() == "the next run's", f"the old run has written step {checkpoint.read_text()}"
