"""Checker of the choice of blocks to offload, notebook 05: against arithmetic, with fresh models and memories."""

from collections.abc import Callable
from random import SystemRandom

from fsdp_helpers.teaching.exercises.answers import call_or_none, exercise, expect, expect_whole
from fsdp_helpers.teaching.exercises.own_module import read_module


@exercise("05")
def check_plan(module: str = "my_plan") -> str:
    """Notebook 05: `blocks_to_offload(...)`, the fewest blocks whose state must leave the device; None if none do."""
    plan = read_module(module, "blocks_to_offload")
    for case in _plan_cases():
        given = _plan_of_reader(plan, case)
        fitting = [count for count in range(case["num_blocks"] + 1) if _fits(count, **case)]
        says = f"for {', '.join(f'{name}={value:,}' for name, value in case.items())} your function says {given}; "
        if given is None:
            expect(not fitting, f"{says}a number of blocks does fit both memories")
            continue
        expect(0 <= given <= case["num_blocks"], f"{says}there are only so many blocks")
        expect(given in fitting, f"{says}{_what_is_too_small(given, case)}")
        expect(given == fitting[0], f"{says}it fits with fewer blocks on the host, too")
    return "Right: the fewest blocks wherever some number fits, and None where none does."


def _plan_cases() -> list[dict[str, int]]:
    """Cases with a known outcome at their edges, and fresh ones: all combinations of roomy and tight memories."""
    draw = SystemRandom().randint
    cases = []
    for _ in range(20):
        num_blocks, world_size = draw(1, 48), draw(1, 8)
        block_params = 1_000 * world_size * draw(1, 10**5)
        activation_bytes = draw(0, 64 * block_params)
        state_bytes = 16 * block_params // world_size
        at_work = 8 * block_params + activation_bytes
        some, all_of_them = at_work + draw(0, num_blocks) * state_bytes, at_work + num_blocks * state_bytes
        for on_device in (at_work - 1, at_work, some, all_of_them):
            for on_host in (0, 16 * block_params * draw(0, num_blocks), 16 * block_params * num_blocks):
                sizes = {"num_blocks": num_blocks, "block_params": block_params, "world_size": world_size}
                memory = {"activation_bytes": activation_bytes, "device_bytes": on_device, "host_bytes": on_host}
                cases.append(sizes | memory)
    return cases


def _plan_of_reader(plan: Callable, case: dict[str, int]) -> int | None:
    """The reader's answer; None is one, so a function that returns nothing at all is found by its other cases."""
    given = call_or_none(plan, *case.values())
    if given is not None:
        expect_whole(given)
    return given


def _fits(offloaded: int, **case: int) -> bool:
    return (
        _device_needs(offloaded, **case) <= case["device_bytes"]
        and _host_needs(offloaded, **case) <= case["host_bytes"]
    )


def _device_needs(offloaded: int, *, num_blocks: int, block_params: int, world_size: int, **memory: int) -> float:
    """Slices of the blocks that stay, the block at work whole in parameters and gradients, and activations."""
    staying = 16 * block_params * (num_blocks - offloaded) / world_size
    return staying + 8 * block_params + memory["activation_bytes"]


def _host_needs(offloaded: int, *, block_params: int, **_: int) -> int:
    """All ranks of the machine share its memory, and together they have a whole block."""
    return 16 * block_params * offloaded


def _what_is_too_small(offloaded: int, case: dict[str, int]) -> str:
    if _device_needs(offloaded, **case) > case["device_bytes"]:
        return "the device would be too small for what stays on it, with the block at work and the activations"
    return "the host would be too small; how many ranks share its memory?"
