"""# ChildFailedError without a traceback

**Why.** torchrun's report always contains the rank's exit code, but it contains the traceback only if the rank saved
one for torchrun. Your own error is further up in the output, among the lines of the rank that failed first, or in
that rank's log file.

**How to tell.** The report says `error_file: <N/A>`. Search upward in the output for the first `Traceback`. Look at
the rank under *Root Cause (first observed failure)* and at its exit code: 1 means an exception, -6 an abort, -9 a
kill (often because memory ran out), -11 a crash in C++, and -15 torchrun's own SIGTERM after a different rank failed.

**The fix.** Put `@record` (from `torch.distributed.elastic.multiprocessing.errors`) above `main()`. To keep each
rank's output as well, use `torchrun --log-dir logs --tee 3`. (This series' `launch` and `%%ranks` show the traceback
themselves, in a `RankError`.)

**What you see.** torchrun's report, and what it lacks:

    error_file: <N/A>
    traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
    AssertionError: torchrun's report doesn't contain the line that failed

**Also seen as**

- torchrun reports an exit code, but no traceback; only the summary is shown: where is the real error?
- it fails at once and says nothing useful: main.py FAILED, train.py FAILED
- `torch.distributed.elastic.multiprocessing.errors.ChildFailedError`, `error_file: <N/A>`, `To enable traceback see:
  https://pytorch.org/docs/stable/elastic/errors.html`
- `closing signal SIGTERM`, `ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: 1) local_rank: 0`,
  `failed (exitcode: 1) local_rank: 0 (pid: 4242) of binary`, `Root Cause (first observed failure)`,
  `Sending process 4242 closing signal SIGTERM`, `Signal 15 (SIGTERM) received by PID`,
  `returned non-zero exit status 1`, `exitcode : -15`, `exitcode : 1 (pid`, `<NO_OTHER_FAILURES>`,
  `Signal 15 (SIGTERM)`, `failed (exitcode: -15)`, `terminated with the following error`, `ProcessExitedException`,
  `terminated with signal`, `subprocess.CalledProcessError: Command` (a run on the CPU)
- `no error file defined for parent` (torch/distributed/elastic/multiprocessing/errors/error_handler.py)
- `raise ChildFailedError` (torch/distributed/launcher/api.py)
- `raise subprocess.CalledProcessError` (accelerate)
- `RankError: rank` (this series)
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

TRAIN = """
import torch
from torch.distributed.elastic.multiprocessing.errors import record

def main():  # broken
# fixed: @record
# fixed: def main():
    torch.ones(2) @ torch.ones(3)

main()
"""

if os.environ.get("RANK", "0") == "0":  # one job is enough
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(TRAIN)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--log-dir", folder]
        done = subprocess.run([*torchrun, "train.py"], cwd=folder, stderr=subprocess.PIPE, text=True)
    print(done.stderr, file=sys.stderr)
    report = done.stderr.partition("Root Cause")[2]
    assert "torch.ones(2) @ torch.ones(3)" in report, "torchrun's report doesn't contain the line that failed"
