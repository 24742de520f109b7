"""# The job dies when the terminal closes, in spite of nohup

**Why.** `nohup` makes a program ignore SIGHUP, but torchrun then installs a handler of its own, which ends all ranks.
When the terminal or the SSH connection closes, the job ends with it. (Signal 15 comes from a scheduler or a `kill`
command.)

**How to tell.** The message names the signal, and the ranks' logs end in the middle of a step without an error.

**The fix.** Start torchrun in `tmux` or as a scheduler job. Or keep it from handling SIGHUP:
`nohup torchrun --signals-to-handle SIGTERM,SIGINT,SIGQUIT ... &`.

**What you see.**

    torch.distributed.elastic.multiprocessing.api.SignalException: Process 4711 got signal: 1

**Also seen as**

- training stops when the SSH session disconnects, when I log out, or when the laptop sleeps, despite nohup and &
- the pod or job is deleted, preempted or canceled
- `torch.distributed.elastic.multiprocessing.api.SignalException`, `got signal: 1`
- `got signal: 15`, `got signal: 2`, `exit code 143`, `exit code -15` (a run on the CPU)
- `Received 1 death signal, shutting down workers`, `Received 15 death signal`,
  `Received Signals.SIGHUP death signal, shutting down workers`, `Received Signals.SIGTERM death signal`,
  `Received Signals.SIGINT death signal` (torch/distributed/elastic/agent/server/api.py)
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STEPS = "import pathlib, time\nfor step in range(5):\n    pathlib.Path('step').write_text(str(step)); time.sleep(0.5)"

if os.environ["RANK"] == "0":  # one job is enough
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(STEPS)
        command = ["nohup", sys.executable, "-m", "torch.distributed.run", "--standalone"]
        # fixed: command += ["--signals-to-handle", "SIGTERM,SIGINT,SIGQUIT"]
        job = subprocess.Popen([*command, "train.py"], cwd=folder, env=os.environ | {"TMPDIR": folder})
        while not Path(folder, "step").exists():
            time.sleep(0.1)
        job.send_signal(signal.SIGHUP)  # the terminal closes
        job.wait()
        assert Path(folder, "step").read_text() == "4", "the job has ended before its last step"
