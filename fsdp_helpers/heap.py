"""Make a rank's heap keep freed memory instead of returning it to the system after every step.

Each step allocates the same large buffers again, and fresh ones would have to be cleared page by page: without these
settings, a step of DeepNet on two CPU ranks takes about 2.4 times as long. The price is that a process's memory stays at
its peak. They are glibc's, so they have no effect on other systems.
"""

import ctypes
import os
import sys

# glibc reads these settings when a process starts, so ranks under torchrun don't have them. All threads share one heap:
# gloo's would otherwise get separate heaps, of at most 64 MB each. There's no per-thread cache of small blocks: a
# scrap that's cut off an aligned buffer would stay there, and leave a gap slightly too small for the same buffer.
TUNABLES = "glibc.malloc.arena_max=1:glibc.malloc.tcache_count=0"


def tunables() -> dict[str, str]:
    """Return the environment variable that a process needs when it starts, on top of what's already set in it."""
    return {"GLIBC_TUNABLES": ":".join(filter(None, [TUNABLES, os.environ.get("GLIBC_TUNABLES")]))}


def keep_freed_memory() -> None:
    """Change the other settings, from inside the process."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        m_mxfast, m_trim_threshold, m_mmap_max = 1, -1, -4  # from malloc.h
        libc.mallopt(m_mxfast, 0)  # merge freed scraps with their neighbors at once, as if there were no tcache
        libc.mallopt(m_mmap_max, 0)
        libc.mallopt(m_trim_threshold, -1)
