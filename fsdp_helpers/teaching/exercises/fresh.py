"""Fresh cases for answers that are functions, drawn at each call, so that a table of known answers can't pass."""

import random
from collections.abc import Iterator

FRESH_CASES = 5
DRAW = random.SystemRandom()  # not to be foreseen, whatever a notebook seeds


def sizes_and_ranks(*edge_cases: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """Yield a number of bytes or parameters, and a number of ranks that divides it: edge cases, then fresh ones."""
    yield from edge_cases
    for _ in range(FRESH_CASES):
        world_size = DRAW.randint(2, 64)
        yield world_size * DRAW.randint(1_000, 10**8), world_size
