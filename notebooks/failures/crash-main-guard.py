"""# An attempt has been made to start a new process before its bootstrapping phase has finished

**Why.** A spawned process imports the script that started it, so all code at the script's top level runs again,
including `mp.spawn` or a `DataLoader` with workers.

**How to tell.** The traceback shows the script's own lines twice, below `multiprocessing/spawn.py`.

**The fix.** Put everything that starts processes under `if __name__ == "__main__":`.

**What you see.**

    An attempt has been made to start a new process before the
    current process has finished its bootstrapping phase.
    AssertionError: the worker said '' instead of '42'

**Also seen as**

- the script runs again in each spawned process: mp.spawn or a DataLoader starts processes that start more processes
- Windows or macOS: it works with num_workers=0
- `An attempt has been made to start a new process before the current process has finished its bootstrapping phase`
- `freeze_support()`, `if __name__ == '__main__':` (a run on the CPU)
"""

import subprocess
import sys
import tempfile
from pathlib import Path

TRAIN = """
import multiprocessing

def work():
    print(6 * 7)

if True:  # broken: the same as no `if` at all
# fixed: if __name__ == "__main__":
    worker = multiprocessing.get_context("spawn").Process(target=work)
    worker.start()
    worker.join()
"""

with tempfile.TemporaryDirectory() as folder:
    Path(folder, "train.py").write_text(TRAIN)
    done = subprocess.run([sys.executable, "train.py"], cwd=folder, stdout=subprocess.PIPE, text=True)
answer = done.stdout.strip()
assert answer == "42", f"the worker said {answer!r} instead of '42'"
