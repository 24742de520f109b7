"""Memory that tensors on a GPU asked for: the history of CUDA's caching allocator, as a curve.

The allocator rounds each request up to 512 bytes, and hands out a whole block if no more than 1 MiB of it would be
left. It counts those blocks as "allocated": for ShallowNet and Adam, 6.7 % more than the tensors. Its history has the
requests as well, and the formulas are about those: the same bytes as on the CPU.
"""

from collections.abc import Iterable, Mapping

import torch
import torch.nn.functional as F


def start_history(device: torch.device) -> None:
    """Have the allocator record each request and each free from now on."""
    take_work_spaces(device)
    torch.cuda.memory._record_memory_history("all", context=None, clear_history=True)  # without stacks: cheap


def stop_history(device: torch.device) -> list[dict]:
    """Stop recording, and return the history."""
    noted = torch.cuda.memory._snapshot()["device_traces"][device.index or 0]
    torch.cuda.memory._record_memory_history(None)
    return noted


def take_work_spaces(device: torch.device) -> None:
    """Let cuBLAS allocate its work spaces now, before anything is counted.

    torch 2.11 keeps them among the tensors, 8 to 32 MiB for the thread of forward and as much for that of backward,
    unless `CUBLAS_WORKSPACE_CONFIG` says less.
    """
    values = torch.ones(16, 16, device=device, requires_grad=True)
    F.linear(values, values, values[0]).sum().backward()


def requested_points(noted: Iterable[Mapping]) -> list[tuple[float, int]]:
    """Return (time in Unix seconds, bytes requested from then on) for the tensors made within the history.

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
