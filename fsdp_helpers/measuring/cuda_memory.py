"""Memory that tensors on a GPU asked for: the history of CUDA's caching allocator, as a curve.

The allocator rounds each request up to 512 bytes, and hands out a whole block where no more than 1 MiB would be left
of it. What it counts as "allocated" are those blocks: for ShallowNet and Adam, 6.7 % more than the tensors. Its
history knows the requests as well, and they are what formulas speak of: the same bytes as on the CPU.
"""

from collections.abc import Iterable, Mapping

import torch
import torch.nn.functional as F


def start_history(device: torch.device) -> None:
    """Have the allocator note each request and each free from now on; earlier ones are ignored."""
    take_work_spaces(device)
    torch.cuda.memory._record_memory_history("all", context=None, clear_history=True)  # without stacks: cheap


def stop_history(device: torch.device) -> list[dict]:
    """Return what was noted, and stop."""
    noted = torch.cuda.memory._snapshot()["device_traces"][device.index or 0]
    torch.cuda.memory._record_memory_history(None)
    return noted


def take_work_spaces(device: torch.device) -> None:
    """Let cuBLAS take its work spaces now, before anything is counted.

    torch 2.11 keeps them among the tensors, 8 to 32 MiB for the thread of forward and as much for that of backward,
    unless `CUBLAS_WORKSPACE_CONFIG` says less.
    """
    values = torch.ones(16, 16, device=device, requires_grad=True)
    F.linear(values, values, values[0]).sum().backward()


def requested_points(noted: Iterable[Mapping]) -> list[tuple[float, int]]:
    """(time in Unix seconds, bytes requested from then on), of the tensors that were made within the history.

    A tensor counts until it is freed. A stream that still reads its block (`record_stream`) delays the reuse of the
    block; that shows in what is reserved, not here.
    """
    points, sizes, total = [], {}, 0
    for entry in noted:
        if entry["action"] == "alloc":
            sizes[entry["addr"]] = entry["size"]
            total += entry["size"]
        elif entry["action"] == "free_requested" and entry["addr"] in sizes:
            total -= sizes.pop(entry["addr"])
        else:
            continue
        points.append((entry["time_us"] / 1e6, total))
    return points
