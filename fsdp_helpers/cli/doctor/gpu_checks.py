"""What `doctor --gpu` checks: the machine's GPUs, arithmetic, collectives, FSDP2 and bf16."""

from collections.abc import Iterator
from typing import Any

from fsdp_helpers.cli.doctor.gpu import Check, Finding, Numbers, count, judged
from fsdp_helpers.cli.doctor.rows import NOTE, PASS
from fsdp_helpers.quantities import format_bytes

SAME, SAME_IN_BF16 = 1e-5, 0.05  # the largest relative difference between losses
SAME_PRODUCT = 1e-2  # of the largest value; TF32, if it's on, rounds inputs to three digits
LITTLE_FREE = 0.5  # of a GPU's memory


def measure_machine() -> Iterator[tuple[str, Any]]:
    """Yield the versions, each GPU's name and memory, a product's difference from the CPU's, and connected pairs."""
    import torch

    yield (
        "versions",
        {
            "torch": torch.__version__,
            "CUDA": torch.version.cuda,
            "cuDNN": torch.backends.cudnn.version(),
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
        },
    )
    gpus = range(torch.cuda.device_count())
    yield "gpus", [(torch.cuda.get_device_name(gpu), *torch.cuda.mem_get_info(gpu)) for gpu in gpus]
    values = torch.randn(256, 256)
    product = (values.cuda() @ values.cuda()).cpu()
    yield "difference", float((product - values @ values).abs().max() / product.abs().max())
    pairs = [(one, other) for one in gpus for other in gpus if one != other]
    yield "links", [torch.cuda.can_device_access_peer(*pair) for pair in pairs]


def judge_machine(numbers: Numbers) -> Iterator[Finding]:
    yield Finding("versions", "", ", ".join(f"{name} {text}" for name, text in numbers["versions"].items()), PASS)
    free = [f"{name}: {format_bytes(now)} of {format_bytes(size)}" for name, now, size in numbers["gpus"]]
    is_used = any(now < LITTLE_FREE * size for _, now, size in numbers["gpus"])
    hint = "; something is using them: see nvidia-smi" if is_used else ""
    yield Finding("free memory", "at least half", f"{', '.join(free)}{hint}", NOTE if is_used else PASS)
    difference = numbers["difference"]
    yield judged("product on GPU and CPU", difference <= SAME_PRODUCT, f"within {SAME_PRODUCT:g}", f"{difference:.1e}")
    if links := numbers["links"]:
        said = f"{sum(links)} of {len(links)} pairs; the others go through the host, which is slower"
        yield Finding("GPUs that access each other's memory", "all pairs", said, PASS if all(links) else NOTE)


def measure_collectives() -> Iterator[tuple[str, Any]]:
    from fsdp_helpers.cli.doctor.workers import collectives_on_device
    from fsdp_helpers.ranks.launch import launch

    yield "found", launch(collectives_on_device, world_size=count(), device="cuda", progress=False)


def judge_collectives(numbers: Numbers) -> Iterator[Finding]:
    from fsdp_helpers.cli.doctor.workers import expected_of_collectives

    found = [list(rank) for rank in numbers["found"]]
    expected = [list(rank) for rank in expected_of_collectives("cuda", len(found))]
    yield judged("all-reduce, all-gather, reduce-scatter", found == expected, str(expected), str(found))


def measure_losses() -> Iterator[tuple[str, Any]]:
    from fsdp_helpers.cli.doctor.workers import train_in_three_ways
    from fsdp_helpers.ranks.launch import launch

    yield from launch(train_in_three_ways, world_size=count(), device="cuda", progress=False)[0].items()


def judge_losses(numbers: Numbers) -> Iterator[Finding]:
    apart = largest_difference(numbers["fsdp2"], numbers["ddp"])
    yield judged("FSDP2's losses are DDP's", apart <= SAME, f"within {SAME:g}", f"{apart:.1e}")
    apart = largest_difference(numbers["bf16"], numbers["fsdp2"])
    said = f"above 0, at most {SAME_IN_BF16:g}"
    yield judged("bf16's losses differ from fp32's", 0 < apart <= SAME_IN_BF16, said, f"{apart:.1e}")


def largest_difference(first: list[float], second: list[float]) -> float:
    """Return the largest relative difference between two runs' losses."""
    return max(abs(a / b - 1) for a, b in zip(first, second, strict=True))


RANKS = ("psutil", "tqdm", "filelock")  # what starting ranks imports
CHECKS = (
    Check(title="machine", measure=measure_machine, judge=judge_machine),
    Check(title="collectives", measure=measure_collectives, judge=judge_collectives, needs=RANKS),
    Check(title="losses", measure=measure_losses, judge=judge_losses, needs=RANKS),
)
