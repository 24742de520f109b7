"""Checkers for the exercises: each takes a reader's answer and says whether it holds, with the numbers.

A function is tried on edge cases and on cases drawn anew each time, so that no table of known answers passes. A message
says what is wrong with the answer, not what is right. The checkers of whole runs are in `attempts`; those of
builds, which run on ranks, are in `builds`.
"""

import random
from collections.abc import Callable, Iterator

import torch
from torch.distributed.fsdp.wrap import CustomPolicy

from fsdp_helpers.models import build_model
from fsdp_helpers.quantities import format_bytes, format_count
from fsdp_helpers.sharding.wrapping import Policy, choose_units, size_policy
from fsdp_helpers.teaching.exercises.answers import (
    NotYet,
    call,
    error_line,
    exercise,
    expect,
    expect_answered,
    expect_number,
    expect_whole,
    in_short,
)

# Notebooks find these beside the others.
from fsdp_helpers.teaching.exercises.attempts import check_largest_batch as check_largest_batch
from fsdp_helpers.teaching.exercises.attempts import check_levers as check_levers
from fsdp_helpers.teaching.exercises.attempts import check_lower_peak as check_lower_peak
from fsdp_helpers.teaching.exercises.attempts import check_threshold as check_threshold

FRESH_CASES = 5
FLAT = 1e-4  # the time lost barely changes near the best interval: 1 % beside it costs half of this
DRAW = random.SystemRandom()  # not to be foreseen, whatever a notebook seeds


def _sizes_and_ranks(*edge_cases: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """A number of bytes or parameters, and a number of ranks that divides it: edge cases, then fresh ones."""
    yield from edge_cases
    for _ in range(FRESH_CASES):
        world_size = DRAW.randint(2, 64)
        yield world_size * DRAW.randint(1_000, 10**8), world_size


# ---------------------------------------------------------------- 01


@exercise("01")
def check_parameter_count(answer: int | None) -> str:
    """Notebook 01: parameters of a convolution from 64 to 128 channels with 5 x 5 kernels and a bias."""
    expect_whole(answer)
    # 128 kernels of 64 x 5 x 5 weights, and one bias each
    right = 128 * (64 * 5 * 5) + 128
    expect(
        answer == right,
        f"{format_count(answer)} is not it: how many weights has a kernel, how many kernels are there, and what else?",
    )
    return f"Right: {format_count(right)} parameters."


@exercise("01")
def check_largest_model(largest_model: Callable[[int], int] | None) -> str:
    """Notebook 01: how many parameters fit into a budget of bytes, with gradients and Adam, in fp32."""
    for budget_bytes in (0, 15, 16, 31, *(DRAW.randint(32, 80 * 10**9) for _ in range(FRESH_CASES))):
        answer = call(largest_model, budget_bytes)
        expect_whole(answer)
        says = f"for {format_count(budget_bytes)} bytes your function says {format_count(answer)}; "
        expect(16 * answer <= budget_bytes, f"{says}with their gradients and Adam's moments, so many do not fit")
        expect(16 * (answer + 1) > budget_bytes, f"{says}there would be room for more")
    return "Right: 16 bytes a parameter, and only whole parameters."


# ---------------------------------------------------------------- 02


@exercise("02")
def check_smallest_bucket(smallest_bucket: Callable[[int, float, float], float] | None) -> str:
    """Notebook 02: bytes of the smallest bucket in whose ring all-reduce latency takes at most a tenth of the time."""
    # A pass over a link takes its latency, and then the time of a part: fresh links from loopback to another building.
    fresh = [(DRAW.randint(2, 2_048), DRAW.uniform(1, 200) * 1e-6, DRAW.uniform(0.1, 900) * 1e9) for _ in range(5)]
    for world_size, latency_s, bytes_per_s in [(2, 1e-5, 1e10), (8, 1e-5, 1e10), (8, 2e-5, 1e10), *fresh]:
        given = call(smallest_bucket, world_size, latency_s, bytes_per_s)
        expect_number(given)
        says = (
            f"{world_size} ranks, {latency_s * 1e6:.1f} µs and {bytes_per_s / 1e9:.1f} GB/s: your function says"
            f" {given:,.0f} bytes; "
        )
        expect(given > 0, f"{says}an empty bucket sends nothing")
        passes = 2 * (world_size - 1)
        latency, bytes_on_their_way = passes * latency_s, passes * given / world_size / bytes_per_s
        share = latency / (latency + bytes_on_their_way)
        expect(share < 0.1 + 1e-6, f"{says}latency then takes {share:.1%} of the all-reduce")
        expect(share > 0.1 - 1e-6, f"{says}latency takes only {share:.1%} of it, so a smaller one will do")
    return "Right: nine times the latency, in bytes, for each rank. Twice the ranks need buckets of twice the size."


# ---------------------------------------------------------------- 04


@exercise("04")
def check_units(policy: Policy | int | None) -> str:
    """Notebook 04: a policy, or the threshold of `size_policy`, that makes `fc1` and `fc2` of DeepNet units.

    The policy is asked about a DeepNet of the checker's own, without values: torch's "meta" device.
    """
    expect_answered(policy)
    if isinstance(policy, int) and not isinstance(policy, bool) and policy >= 0:
        policy = size_policy(policy)
    is_policy = callable(policy) or isinstance(policy, CustomPolicy)
    expect(is_policy, f"the answer is {in_short(policy)}; a policy is asked for, such as size_policy(...)")
    with torch.device("meta"):
        model = build_model("deep")
    try:
        names = choose_units(model, policy)
    except Exception as error:
        raise NotYet(f"asked about the modules of DeepNet, your policy fails: {error_line(error)}") from None
    expect(
        set(names) == {"fc1", "fc2"},
        f"in a new DeepNet your policy makes {len(names)} unit(s): {', '.join(sorted(names)) or 'none'}",
    )
    return "Right: fc1, fc2, and nothing else."


# ---------------------------------------------------------------- 05


@exercise("05")
def check_offload_split(split: Callable[[int, int], tuple[float, float]] | None) -> str:
    """Notebook 05: (device bytes, host bytes) that a rank holds between steps with everything offloaded."""
    for num_params, world_size in _sizes_and_ranks((1_000_000, 1), (94_104_234, 2)):
        given = call(split, num_params, world_size)
        is_pair = isinstance(given, tuple | list) and len(given) == 2
        expect(is_pair, f"the answer is {in_short(given)}; two numbers are asked for, (device bytes, host bytes)")
        for number in given:
            expect_number(number)
        on_device, on_host = given
        says = f"{format_count(num_params)} parameters over {world_size} rank(s), your function says "
        expect(
            abs(on_device) < 1, f"{says}{on_device:,.0f} bytes on the device; what of a unit is there between steps?"
        )
        expect(
            abs(on_host - 16 * num_params / world_size) < 1,
            f"{says}{on_host:,.0f} bytes on the host; where do parameters, gradients and moments live, and how many of"
            " them are this rank's?",
        )
    return "Right: nothing on the device between steps, 16 P / N on the host."


@exercise("05")
def check_images_to_hide(images_to_hide: Callable[[int, int, int, float, float], int] | None) -> str:
    """Notebook 05: the fewest images per rank whose arithmetic takes at least as long as the copies of a step.

    Called with parameters, those of them in the root, ranks, seconds of arithmetic per image, and bytes per second of
    the link in either direction; both directions at once, and beside the arithmetic.
    """
    for num_params, root_params, world_size, image_s, bytes_per_s in _links():
        given = call(images_to_hide, num_params, root_params, world_size, image_s, bytes_per_s)
        expect_whole(given)
        copies_s = 4 * (2 * num_params - root_params) / world_size / bytes_per_s  # the slower direction
        says = (
            f"{format_count(num_params)} parameters, {format_count(root_params)} of them in the root, {world_size}"
            f" rank(s), {1e3 * image_s:.2f} ms an image, {format_bytes(round(bytes_per_s))}/s: your function says {given}; "
        )
        expect(given >= 1, f"{says}a step has at least one image")
        expect(
            given * image_s >= (1 - 1e-9) * copies_s,
            f"{says}their arithmetic ends before the copies do. Which bytes travel to the device, and how often?",
        )
        expect(
            given == 1 or (given - 1) * image_s < (1 + 1e-9) * copies_s,
            f"{says}fewer images hide the copies, too. Which of a rank's bytes travel, and which direction is slower?",
        )
    return "Right: 4 (2 P - root) / N bytes on their way to the device, hidden behind whole images."


def _links() -> Iterator[tuple[int, int, int, float, float]]:
    """Models, ranks and links: edges, then fresh ones with few and with many images to find."""
    yield 1_000_000, 0, 1, 1e-3, 1e9  # 8 MB at 1 GB/s are 8 ms: 8 images
    yield 1_000_000, 1_000_000, 1, 1e-3, 1e9  # the root alone: 4 ms
    yield 1_000_000, 0, 8, 1e-2, 1e9  # 1 ms, less than an image takes
    for num_params, world_size in _sizes_and_ranks():
        copies_s = DRAW.uniform(1e-4, 10)
        root_params = DRAW.randint(0, num_params // 2)
        bytes_per_s = 4 * (2 * num_params - root_params) / world_size / copies_s
        yield num_params, root_params, world_size, copies_s / (DRAW.randint(1, 500) + 0.5), bytes_per_s


# ---------------------------------------------------------------- 06


@exercise("06")
def check_checkpoint_bytes(checkpoint_bytes: Callable[[int], float] | None) -> str:
    """Notebook 06: bytes of a checkpoint with Adam in fp32, for any strategy and number of ranks."""
    for num_params in (1_199_882, 7 * 10**9, *(DRAW.randint(1, 10**10) for _ in range(FRESH_CASES))):
        given = call(checkpoint_bytes, num_params)
        expect_number(given)
        expect(
            abs(given - 12 * num_params) < 1,
            f"{format_count(num_params)} parameters: your function says {format_bytes(int(given))}, too"
            f" {'many' if given > 12 * num_params else 'few'}; which of a parameter's values does the next step need?",
        )
    return "Right: 12 P, whatever the number of ranks."


@exercise("06")
def check_ranks_to_read(ranks_to_read: Callable[[int, int, int, int], list[int]] | None) -> str:
    """Notebook 06: which old ranks' files a new rank opens, for a tensor cut along its first dimension."""
    draw = DRAW.randint
    fresh = [(draw(1, 200), draw(1, 9), draw(1, 9)) for _ in range(4 * FRESH_CASES)]
    # with as many ranks as before; with rows for three of four ranks only; with ranges that meet and do not overlap
    for num_rows, saved, loading in ((12, 4, 4), (5, 4, 4), (12, 4, 3), (12, 4, 1), (128, 4, 3), (10, 4, 2), *fresh):
        for rank in range(loading):
            given = call(ranks_to_read, num_rows, saved, loading, rank)
            _expect_files(given, num_rows, saved, _rows(num_rows, loading, rank), f"read by {loading}: rank {rank}")
    return "Right: a rank opens the files whose rows overlap its own, and no others."


def _expect_files(given: object, num_rows: int, saved: int, mine: range, reader: str) -> None:
    """Raise NotYet unless `given` are the old ranks whose rows overlap `mine`, each once, in any order."""
    expect(
        isinstance(given, list | tuple | range | set), f"the answer is {in_short(given)}; a list of ranks is asked for"
    )
    for old in given:
        expect_whole(old)
    right = [old for old in range(saved) if set(mine) & set(_rows(num_rows, saved, old))]
    keeps = f"keeps rows {mine[0]} to {mine[-1]}" if mine else "keeps no rows"
    says = f"{num_rows} rows, written by {saved} ranks and {reader} {keeps}, and your function says {list(given)}; "
    expect(set(given) <= set(right), f"{says}not all of these files hold a row of it")
    expect(set(given) >= set(right), f"{says}some of its rows are in other files")
    expect(len(given) == len(right), f"{says}it opens a file twice")


def _rows(num_rows: int, world_size: int, rank: int) -> range:
    """The rows of a tensor that FSDP gives to a rank: as many as `torch.chunk` would, the last ones perhaps none."""
    rows_a_rank = -(-num_rows // world_size)
    return range(min(rank * rows_a_rank, num_rows), min((rank + 1) * rows_a_rank, num_rows))


@exercise("06")
def check_saving_interval(interval_s: Callable[[float, float], float] | None) -> str:
    """Notebook 06: seconds between two checkpoints that lose the least, by Young's formula."""
    draw = DRAW.uniform
    for save_s, between_failures_s in (
        (10.0, 86_400.0),
        *((draw(0.5, 60), draw(3_600, 1e6)) for _ in range(FRESH_CASES)),
    ):
        given = call(interval_s, save_s, between_failures_s)
        expect_number(given)
        expect(given > 0, f"the answer is {given:,.1f} s; an interval is longer than nothing")
        saving, lost_work = save_s / given, given / (2 * between_failures_s)
        least = 2 * (save_s / (2 * between_failures_s)) ** 0.5  # both are equal at the best interval
        expect(
            saving + lost_work <= (1 + FLAT) * least,
            f"a save of {save_s:.1f} s, a failure every {between_failures_s:,.0f} s: your function says {given:,.1f} s,"
            f" where saving costs {saving:.2%} of the time and lost work {lost_work:.2%}; another interval costs less",
        )
    return "Right: the root of 2 x save time x time between failures."
