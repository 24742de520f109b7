"""The description of a machine with GPUs: versions, devices, drivers, and flags that change numbers."""

import subprocess
from collections.abc import Mapping

DESCRIBE = "describe"  # instead of a check's title
ASK_S = 20.0


def describe_gpus() -> dict:
    """Return versions and flags, and each GPU's name, size and free bytes; this takes a context on every GPU."""
    import torch

    from fsdp_helpers.training.worker import versions

    facts = versions() | {"cuda": torch.version.cuda, "driver": driver_version()}
    # As torch sets them at first; ranks of `launch` have settings of their own.
    facts["tf32 in products"] = torch.backends.cuda.matmul.allow_tf32
    facts["tf32 in convolutions"] = torch.backends.cudnn.allow_tf32
    facts["cudnn"] = torch.backends.cudnn.version()
    if torch.distributed.is_nccl_available():
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    facts["gpus"] = [describe_gpu(index) for index in range(torch.cuda.device_count())]
    return facts


def describe_gpu(index: int) -> dict:
    import torch

    properties = torch.cuda.get_device_properties(index)
    free_bytes, total_bytes = torch.cuda.mem_get_info(index)
    capability = f"{properties.major}.{properties.minor}"
    return {"name": properties.name, "capability": capability, "total_bytes": total_bytes, "free_bytes": free_bytes}


def driver_version() -> str:
    """Return the version of NVIDIA's driver, from nvidia-smi; "unknown" if there is none."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip().partition("\n")[0]


def fact_lines(facts: Mapping) -> list[str]:
    """Return one line for all versions and flags, and one for each GPU."""
    from fsdp_helpers.quantities import format_bytes

    lines = [", ".join(f"{name} {value}" for name, value in facts.items() if name != "gpus")]
    for index, gpu in enumerate(facts.get("gpus", ())):
        lines.append(
            f"GPU {index}: {gpu['name']}, capability {gpu['capability']}, {format_bytes(gpu['total_bytes'])}, "
            f"{format_bytes(gpu['free_bytes'])} free before the checks"
        )
    return lines
