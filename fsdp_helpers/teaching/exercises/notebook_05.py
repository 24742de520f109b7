"""Exercises for notebook 05: where offloaded bytes live, how to hide the copies, and which blocks to offload."""

from collections.abc import Callable, Iterator

from fsdp_helpers.quantities import format_bytes, format_count
from fsdp_helpers.teaching.exercises.answers import (
    DRAW,
    call,
    call_or_none,
    exercise,
    expect,
    expect_number,
    expect_whole_number,
    in_short,
    sizes_and_ranks,
)
from fsdp_helpers.teaching.exercises.on_ranks import read_module


@exercise("05")
def check_offload_split(split: Callable[[int, int], tuple[float, float]] | None) -> str:
    """Notebook 05: check the device and host bytes that a rank holds between steps with everything offloaded."""
    for num_params, world_size in sizes_and_ranks((1_000_000, 1), (94_104_234, 2)):
        given = call(split, num_params, world_size)
        is_pair = isinstance(given, tuple | list) and len(given) == 2
        expect(is_pair, f"the answer is {in_short(given)}; it should be two numbers, (device bytes, host bytes)")
        for number in given:
            expect_number(number)
        on_device, on_host = given
        says = f"for {format_count(num_params)} parameters and a world size of {world_size}, your function returns "
        expect(
            abs(on_device) < 1,
            f"{says}{on_device:,.0f} bytes on the device; which of a unit's bytes stay there between steps?",
        )
        expect(
            abs(on_host - 16 * num_params / world_size) < 1,
            f"{says}{on_host:,.0f} bytes on the host; where do parameters, gradients and moments live, and how many of"
            " them are this rank's?",
        )
    return "Right: between steps, nothing on the device, and 16 P / N bytes on the host."


@exercise("05")
def check_images_to_hide(images_to_hide: Callable[[int, int, int, float, float], int] | None) -> str:
    """Notebook 05: check the fewest images per rank whose arithmetic takes at least as long as a step's copies.

    The arguments are the number of parameters, the number of root parameters, the number of ranks, the seconds of
    arithmetic per image, and the link's bytes per second in each direction; both directions run in parallel with
    each other and with the arithmetic.
    """
    for num_params, root_params, world_size, image_s, bytes_per_s in _links():
        given = call(images_to_hide, num_params, root_params, world_size, image_s, bytes_per_s)
        expect_whole_number(given)
        copies_s = 4 * (2 * num_params - root_params) / world_size / bytes_per_s  # the slower direction
        says = (
            f"for {format_count(num_params)} parameters, {format_count(root_params)} of them in the root, a world "
            f"size of {world_size}, {1e3 * image_s:.2f} ms per image, {format_bytes(round(bytes_per_s))}/s, your function returns {given}; "
        )
        expect(given >= 1, f"{says}a step has at least one image")
        expect(
            given * image_s >= (1 - 1e-9) * copies_s,
            f"{says}the arithmetic ends before the copies do. Which bytes are copied to the device, and how often?",
        )
        expect(
            given == 1 or (given - 1) * image_s < (1 + 1e-9) * copies_s,
            f"{says}fewer images would also hide the copies. Which of a rank's bytes are copied, and which direction "
            f"is slower?",
        )
    return "Right: with enough images, the arithmetic hides the copies of 4 (2 P - root) / N bytes to the device."


def _links() -> Iterator[tuple[int, int, int, float, float]]:
    """Yield combinations of model, ranks and link: edge cases, then random cases that need few or many images."""
    yield 1_000_000, 0, 1, 1e-3, 1e9  # 8 MB at 1 GB/s take 8 ms: 8 images
    yield 1_000_000, 1_000_000, 1, 1e-3, 1e9  # the root alone: 4 ms
    yield 1_000_000, 0, 8, 1e-2, 1e9  # 1 ms, less than an image takes
    for num_params, world_size in sizes_and_ranks():
        copies_s = DRAW.uniform(1e-4, 10)
        root_params = DRAW.randint(0, num_params // 2)
        bytes_per_s = 4 * (2 * num_params - root_params) / world_size / copies_s
        yield num_params, root_params, world_size, copies_s / (DRAW.randint(1, 500) + 0.5), bytes_per_s


@exercise("05")
def check_plan(module: str = "my_plan") -> str:
    """Notebook 05: check that `blocks_to_offload(...)` returns the fewest blocks that make the model fit, or None."""
    plan = read_module(module, "blocks_to_offload")
    for case in _plan_cases():
        given = _plan_of_reader(plan, case)
        fitting = [count for count in range(case["num_blocks"] + 1) if _fits(count, **case)]
        says = f"for {', '.join(f'{name}={value:,}' for name, value in case.items())}, your function returns {given}; "
        if given is None:
            expect(not fitting, f"{says}with the right number of offloaded blocks, the model fits")
            continue
        expect(0 <= given <= case["num_blocks"], f"{says}the model has only {case['num_blocks']} blocks")
        expect(given in fitting, f"{says}{_what_is_too_small(given, case)}")
        expect(given == fitting[0], f"{says}the model also fits with fewer blocks on the host")
    return "Right: the fewest blocks that make the model fit, or None if it can't fit."


def _plan_cases() -> list[dict[str, int]]:
    """Return random models for devices and hosts with ample, too little, or exactly enough memory."""
    draw = DRAW.randint
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
    """Return the reader's answer, which may be None; a function that always returns None fails on other cases."""
    given = call_or_none(plan, *case.values())
    if given is not None:
        expect_whole_number(given)
    return given


def _fits(offloaded: int, **case: int) -> bool:
    return (
        _device_needs(offloaded, **case) <= case["device_bytes"]
        and _host_needs(offloaded, **case) <= case["host_bytes"]
    )


def _device_needs(offloaded: int, *, num_blocks: int, block_params: int, world_size: int, **memory: int) -> float:
    """Return the device bytes of resident blocks, the active block's full parameters and gradients, and activations."""
    staying = 16 * block_params * (num_blocks - offloaded) / world_size
    return staying + 8 * block_params + memory["activation_bytes"]


def _host_needs(offloaded: int, *, block_params: int, **_: int) -> int:
    """Return the host bytes; the ranks share the machine's memory and together hold the offloaded blocks in full."""
    return 16 * block_params * offloaded


def _what_is_too_small(offloaded: int, case: dict[str, int]) -> str:
    if _device_needs(offloaded, **case) > case["device_bytes"]:
        return "the device would be too small for the blocks that stay on it, the active block and the activations"
    return "the host would be too small; how many ranks share its memory?"
