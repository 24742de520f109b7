"""Each rank's random state, which dropout draws from: saved with the tensors, and restored."""

import zlib
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

NAME = "extra.random-state-{}"  # of a rank


def random_state(rank: int) -> dict[str, Tensor]:
    """Return the state of this rank's CPU and CUDA generators, under names that are unique to the rank."""
    state = {NAME.format(rank): torch.get_rng_state()}
    if torch.cuda.is_initialized():
        state[NAME.format(f"cuda-{rank}")] = torch.cuda.get_rng_state()
    return state


def restore_random_state(saved: Mapping[str, Tensor], rank: int, world_size: int) -> None:
    """Set this rank's generators to its states in `saved`.

    If a state is missing, because there were fewer ranks or no GPU, it's replaced by a stream that no rank has drawn
    from yet. The stream is derived from rank 0's state, so resuming twice draws the same numbers twice.
    """
    first = saved.get(NAME.format(0))
    if first is not None:
        stream = [zlib.crc32(first.numpy()), world_size, rank]
        torch.manual_seed(int(np.random.default_rng(stream).integers(2**63)))
    for name in random_state(rank).keys() & saved.keys():
        if "cuda" in name:
            torch.cuda.set_rng_state(saved[name])
        else:
            torch.set_rng_state(saved[name])
