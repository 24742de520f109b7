"""# Can't get attribute 'worker' on module '__main__'

**Why.** A spawned process imports the module that defines its function. A function from a notebook cell belongs to
`__main__`, and in the new process, `__main__` is a different program.

**How to tell.** The error comes from the child process, in `multiprocessing.spawn`, before any of your code runs.

**The fix.** Put the function in a module: a `%%writefile workers.py` cell and `from workers import worker` are
enough.

**What you see.** The child process says:

    AttributeError: Can't get attribute 'worker' on <module '__main__' (built-in)>
    AssertionError: the worker said '' instead of '42'

**Also seen as**

- a function from a notebook can't be spawned: notebook_launcher or mp.spawn in Jupyter, Colab or Kaggle
- a lambda, a local function, a generator or a lock in the data set or collate_fn can't be pickled with spawn
- `Can't get attribute 'worker' on <module '__main__'`, `on <module '__main__'`
- `cannot pickle`, `EOFError: Ran out of input`, `can't pickle`, `PicklingError`, `TypeError: cannot pickle`,
  `_pickle.PicklingError: Can't pickle`, `cannot pickle 'generator' object`, `cannot pickle '_thread.lock' object` (a
  run on the CPU)
- `Can't pickle local object`, `AttributeError: Can't pickle local object` (Python 3.11)
- `Can't get local object` (Python 3.12)
- `is not compatible with an interactive environment` (accelerate, Lightning)
"""

import subprocess
import sys
import tempfile
from pathlib import Path

FUNCTION = """
def worker():
    print(6 * 7)
"""
START = """
import multiprocessing
process = multiprocessing.get_context("spawn").Process(target=worker)
process.start()
process.join()
"""

with tempfile.TemporaryDirectory() as folder:
    Path(folder, "workers.py").write_text(FUNCTION)
    cells = FUNCTION + START  # broken
    # fixed: cells = "from workers import worker" + START
    notebook = [sys.executable, "-c", cells]  # which has no file that the new process could import, like a notebook
    done = subprocess.run(notebook, cwd=folder, stdout=subprocess.PIPE, text=True)
answer = done.stdout.strip()
assert answer == "42", f"the worker said {answer!r} instead of '42'"
