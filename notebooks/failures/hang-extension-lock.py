"""# Stuck at Using ~/.cache/torch_extensions as PyTorch extensions root

**Why.** A CUDA extension is compiled the first time it's used, and a lock file keeps other processes out. A killed
build leaves the lock file behind, and every later process waits for the file to go away. On a network disk, ranks on
several nodes wait for one another.

**How to tell.** `py-spy dump` shows `wait` in `file_baton.py`. In the extension's folder is a file called `lock` that's
older than the job.

**The fix.** Run `rm -rf ~/.cache/torch_extensions` (or remove only the `lock`), and then build the extension on a
single rank first. Or install a prebuilt version. Set `TORCH_EXTENSIONS_DIR` to a folder on a local disk.

**What you see.** If you end it with Ctrl-C, which the script does for you after two seconds:

    rank 0 in `baton.wait()  # for the process that builds it`
    KeyboardInterrupt

**Also seen as**

- hangs while loading or compiling an extension: fused_adam, cpu_adam, deformable attention, ninja; after a killed or
  interrupted build
- `as PyTorch extensions root`, `Loading extension module`, `Detected CUDA files, patching ldflags`,
  `Emitting ninja build file` (torch/utils/cpp_extension.py)
"""

import signal
import tempfile
from pathlib import Path

from torch.utils.file_baton import FileBaton

signal.signal(signal.SIGALRM, signal.default_int_handler)  # as Ctrl-C
signal.alarm(2)  # the lock itself has no time limit

with tempfile.TemporaryDirectory() as folder:
    lock, extension = Path(folder, "lock"), Path(folder, "extension.so")
    lock.touch()  # a build was killed here

    # fixed: lock.unlink()
    baton = FileBaton(lock)  # as in torch.utils.cpp_extension.load
    if baton.try_acquire():
        extension.touch()  # stands for the compiler
        baton.release()
    else:
        baton.wait()  # for the process that builds it
    assert extension.exists()
signal.alarm(0)
