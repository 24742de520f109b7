"""Live ranks on a GPU: a cell that runs out of memory, the next one, and what's left once they're closed."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from fsdp_helpers.cli.doctor.gpu import Check, Finding, Numbers, judged
from fsdp_helpers.cli.doctor.gpu_checks import RANKS
from fsdp_helpers.quantities import MB, format_bytes
from fsdp_helpers.ranks.errors import RankError
from fsdp_helpers.ranks.live import Ranks

DEVICE = "cuda"
FREE = "import torch; print(torch.cuda.mem_get_info()[0])"
FILL = """
import torch
blocks = []
while True:
    blocks.append(torch.empty(2**30, dtype=torch.uint8, device=device))
"""
NEXT = """
num_blocks = len(blocks)
blocks.clear()
torch.cuda.empty_cache()
layer = torch.nn.Linear(1024, 1024).to(device)
layer(torch.ones(8, 1024, device=device)).sum().backward()
total = torch.ones(1, device=device)
torch.distributed.all_reduce(total)
total = total.item()
"""
LEFT = 64 * MB  # the driver may keep a little for a while
PATIENCE_S = 10.0


def free_bytes() -> int:
    """What the GPU has free, as a process sees that's alone on it."""
    done = subprocess.run([sys.executable, "-c", FREE], check=True, capture_output=True, text=True, timeout=60)
    return int(done.stdout)


def measure_live() -> Iterator[tuple[str, Any]]:
    before = free_bytes()
    yield "free_before", before
    began_s = time.monotonic()
    with Ranks(1, device=DEVICE) as ranks:
        yield "start_s", time.monotonic() - began_s
        pids = ranks.pids
        try:
            ranks.run(FILL)
            yield "error", "none"
        except RankError as error:
            yield "message", str(error)
        ranks.run(NEXT)
        yield "is_the_same", ranks.pids == pids
        yield "total", ranks["total"]
        yield "num_blocks", ranks["num_blocks"]
        yield "device", [str(device) for device in ranks["device"]]
        yield "free_within", free_bytes()
    yield "alive", [pid for pid in pids if is_alive(pid)]
    until_s = time.monotonic() + PATIENCE_S
    while (free := free_bytes()) < before - LEFT and time.monotonic() < until_s:
        time.sleep(0.5)
    yield "free_after", free


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def judge_live(numbers: Numbers) -> Iterator[Finding]:
    message = numbers.get("message", "no error")
    first = message.splitlines()[0][:120]
    yield judged("a cell that fills the GPU", "out of memory" in message, "rank 0: out of memory", first)
    total, device = numbers["total"], numbers["device"]
    said = f"{total} on {device}, {'the same process' if numbers['is_the_same'] else 'a new process'}"
    passed = total == [1.0] and device == ["cuda:0"] and numbers["is_the_same"]
    yield judged("the next cell, in the same rank", passed, "[1.0] on ['cuda:0'], the same process", said)
    yield judged("closed: processes", not numbers["alive"], "none", str(numbers["alive"] or "none"))
    before, after = numbers["free_before"], numbers["free_after"]
    expected = f"at least {format_bytes(before - LEFT)}"
    yield judged("closed: free memory", after >= before - LEFT, expected, format_bytes(after))


CHECKS = (Check(title="live ranks", measure=measure_live, judge=judge_live, needs=RANKS, alone=True, limit_s=90.0),)
