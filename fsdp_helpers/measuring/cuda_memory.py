"""Memory requested by tensors on a GPU: the history of CUDA's caching allocator, as a curve.

The allocator rounds each request up to 512 bytes, and hands out a whole block if no more than 1 MiB of it would be
left. It counts those blocks as "allocated": for ShallowNet and Adam, 6.7% more than the tensors. Its history also has
the requests, which are what the formulas predict: the same bytes as on the CPU.
"""

from collections.abc import Iterable, Mapping

import torch
import torch.nn.functional as F


def start_history(device: torch.device) -> None:
    """Make the allocator record each request and each free from now on."""
    take_work_spaces(device)
    torch.cuda.memory._record_memory_history("all", context=None, clear_history=True)  # without stacks: cheap


def stop_history(device: torch.device) -> list[dict]:
    """Stop recording, and return the history."""
    noted = torch.cuda.memory._snapshot()["device_traces"][device.index or 0]
    torch.cuda.memory._record_memory_history(None)
    return noted


def take_work_spaces(device: torch.device) -> None:
    """Make cuBLAS allocate its workspaces now, before anything is counted.

    torch 2.11 allocates them like tensors, 8 to 32 MiB for forward's thread and as much for backward's, unless
    `CUBLAS_WORKSPACE_CONFIG` sets less.
    """
    values = torch.ones(16, 16, device=device, requires_grad=True)
    F.linear(values, values, values[0]).sum().backward()


def requested_points(noted: Iterable[Mapping]) -> list[tuple[float, int]]:
    """Return (time in Unix seconds, bytes requested from then on) for the tensors created within the history.

    A tensor counts until it's freed. If a stream is still reading its block (`record_stream`), the block is reused
    later; that affects reserved memory, not these numbers.
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
