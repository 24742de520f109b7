"""Check this machine's GPUs: `python -m fsdp_helpers doctor --gpu` prints a table to paste into an issue.

Developers can also run `pytest -m gpu` in a clone.
"""

import subprocess
from collections.abc import Sequence
from functools import cache

from fsdp_helpers.cli.doctor.rows import FAIL, SKIP, Look, Outcome, Row, Unfit, note
from fsdp_helpers.gpus import VISIBLE, are_hidden, find_gpus
from fsdp_helpers.quantities import format_bytes

LIMIT_S = 120.0
SAME, SAME_IN_BF16 = 1e-5, 0.05  # the largest relative difference between losses
LITTLE_FREE = 0.5  # of a GPU's memory
# These run in a child process, because a call to CUDA creates a context of hundreds of MB that stays.
ASK = {
    "versions": "print(torch.__version__, torch.version.cuda, torch.backends.cudnn.version(), "
    "'.'.join(map(str, torch.cuda.nccl.version())))",
    "memory": "[print(torch.cuda.get_device_name(i), *torch.cuda.mem_get_info(i), sep='|') for i in range(COUNT)]",
    "product": "a = torch.randn(256, 256); b = (a.cuda() @ a.cuda()).cpu(); print(float((b - a @ a).abs().max() / b.abs().max()))",
    "links": "print(sum(torch.cuda.can_device_access_peer(i, j) for i in range(COUNT) for j in range(COUNT) if i != j))",
}


def ask(question: str) -> list[str]:
    """Return the lines that a child process prints. If the child fails, raise RuntimeError with its last error line."""
    import sys

    code = f"import torch; COUNT = torch.cuda.device_count(); {ASK[question]}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1])
    return done.stdout.splitlines()


def count() -> int:
    """Return the number of GPUs. Raises Unfit if there are none, they're hidden, or torch is built without CUDA."""
    import torch

    if are_hidden():
        raise Unfit(f"no GPU: {VISIBLE} hides them")
    if not torch.backends.cuda.is_built():
        raise Unfit("no GPU: this version of torch is built for the CPU only")
    if not (gpus := find_gpus(1)).count:
        raise Unfit("no GPU here")
    return gpus.count


def usable() -> Outcome:
    found, problem = count(), find_gpus(1).problem
    return Outcome(
        not problem, f"torch can't use them: {problem}" if problem else f"{found}, and torch can compute on the first"
    )


def versions() -> Outcome:
    count()
    return Outcome(True, "torch {}, CUDA {}, cuDNN {}, NCCL {}".format(*ask("versions")[0].split()))


def memory() -> Outcome:
    count()
    gpus = [line.split("|") for line in ask("memory")]
    said = ", ".join(
        f"{name}: {format_bytes(int(free))} of {format_bytes(int(size))} free" for name, free, size in gpus
    )
    if any(int(free) < LITTLE_FREE * int(size) for _, free, size in gpus):
        return note(f"{said}; something is using them: see nvidia-smi")
    return Outcome(True, said)


def product() -> Outcome:
    count()
    difference = float(ask("product")[0])
    return Outcome(
        difference < 1e-2, f"a matrix product differs from the CPU's by {difference:.1e} of its largest value"
    )


def links() -> Outcome:
    if (found := count()) < 2:
        raise Unfit("needs 2 GPUs, but this machine has 1")
    pairs, all_pairs = int(ask("links")[0]), found * (found - 1)
    said = f"{pairs} of {all_pairs} pairs of GPUs can access each other's memory"
    return (
        Outcome(True, said) if pairs == all_pairs else note(f"{said}; the others go through the host, which is slower")
    )


def collectives() -> Outcome:
    from fsdp_helpers.cli.doctor.workers import collectives_on_device, expected_of_collectives
    from fsdp_helpers.ranks.launch import launch

    found = launch(collectives_on_device, world_size=count(), device="cuda", timeout_s=LIMIT_S, progress=False)
    right = found == expected_of_collectives("cuda", count())
    return Outcome(
        right,
        "all-reduce, all-gather and reduce-scatter return the right values" if right else f"wrong results: {found}",
    )


@cache
def losses() -> dict[str, list[float]]:
    from fsdp_helpers.cli.doctor.workers import train_in_three_ways
    from fsdp_helpers.ranks.launch import launch

    return launch(train_in_three_ways, world_size=count(), device="cuda", timeout_s=LIMIT_S, progress=False)[0]


def difference_of(one: str, other: str) -> float:
    return max(abs(a / b - 1) for a, b in zip(losses()[one], losses()[other], strict=True))


def fsdp2() -> Outcome:
    difference = difference_of("fsdp2", "ddp")
    return Outcome(difference <= SAME, f"losses differ from DDP's by {difference:.1e}; at most {SAME:g} is fine")


def bf16() -> Outcome:
    difference = difference_of("bf16", "fsdp2")
    said = f"losses differ from fp32's by {difference:.1e}; above 0 and at most {SAME_IN_BF16:g} is fine"
    return Outcome(0 < difference <= SAME_IN_BF16, said)


LOOKS = (
    Look("GPUs", usable),
    Look("versions", versions),
    Look("memory", memory),
    Look("arithmetic", product),
    Look("links", links),
    Look("collectives", collectives),
    Look("FSDP2", fsdp2),
    Look("bf16", bf16),
)


def table(rows: Sequence[Row]) -> list[str]:
    """Return the rows as a Markdown table to paste into an issue; any | in a cell is escaped."""
    cells = [("check", "result", "found"), ("---",) * 3, *((row.check, row.result, row.measured) for row in rows)]
    return [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in cells]


def verdict(rows: Sequence[Row]) -> str:
    wrong, skipped = ([row.check for row in rows if row.result == result] for result in (FAIL, SKIP))
    if wrong:
        return f"{len(wrong)} of {len(rows)} wrong: {', '.join(wrong)}. Paste this table into an issue."
    return f"{len(rows) - len(skipped)} of {len(rows)} checks passed, {len(skipped)} skipped."
