"""The allocator settings of a CPU rank: keep a step's large buffers for the next step.

Each step allocates the same large buffers again; if they come from the system, it has to zero them page by page first.
glibc reads half of the settings that prevent this when a process starts; the other half can be set later.
"""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# One heap for all threads: gloo's would have heaps of their own, of at most 64 MB each. No cache of small blocks for
# each thread (tcache): an aligned allocation cuts a scrap off either end; a scrap that lies in such a cache is not
# joined with the gap of the freed buffer again, and the gap stays a little too small for the same buffer.
MALLOC_TUNABLES = "glibc.malloc.arena_max=1:glibc.malloc.tcache_count=0"


@contextmanager
def malloc_tunables() -> Iterator[None]:
    """Put MALLOC_TUNABLES into the environment of processes started within the block; the reader's own settings win."""
    before = os.environ.get("GLIBC_TUNABLES")
    os.environ["GLIBC_TUNABLES"] = ":".join(filter(None, [MALLOC_TUNABLES, before]))
    try:
        yield
    finally:
        if before is None:
            del os.environ["GLIBC_TUNABLES"]
        else:
            os.environ["GLIBC_TUNABLES"] = before


def keep_freed_memory() -> None:
    """Make glibc keep freed memory instead of returning it to the system after every step.

    The price is that a process's resident memory stays at its peak. `malloc_tunables`, the other half, takes effect
    at the start of a process: `launch` uses it, torchrun does not.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        m_mxfast, m_trim_threshold, m_mmap_max = 1, -1, -4  # from malloc.h
        libc.mallopt(m_mxfast, 0)  # scraps are joined with their neighbors at once, as without a tcache
        libc.mallopt(m_mmap_max, 0)
        libc.mallopt(m_trim_threshold, -1)
