"""Checkers of the build exercises: a module that the reader wrote is run on ranks, against plain training.

The functions of the ranks are in `build_workers`. A checker asks for 2 ranks and then for 3, where sizes do not divide.
"""

import tempfile
from collections.abc import Callable
from random import SystemRandom
from textwrap import shorten

from fsdp_helpers.quantities import format_bytes
from fsdp_helpers.ranks.launch import RankError, RankTimeout, launch
from fsdp_helpers.ranks.progress import ProgressBar, count_ranks
from fsdp_helpers.teaching import build_workers as workers
from fsdp_helpers.teaching.answers import NotYet, call_or_none, exercise, expect, expect_whole
from fsdp_helpers.teaching.build_plan import check_batch as check_batch
from fsdp_helpers.teaching.build_start import UNITS, start_by_reader
from fsdp_helpers.teaching.own_module import last_line_in, read_module

RANKS = (2, 3)
STALL_S, TIMEOUT_S = 15.0, 120.0  # ranks that wait for one another, and ranks that compute for ever
LONGEST = 200  # characters of an error's message; some print a whole model
TOLERANCE = 1e-4  # fp32 sums in another order differ by less
SLACK_BYTES = 4_000  # step counters, a loss, a batch
CUT_PEAK_BYTES = {2: 2_300_000, 3: 1_900_000}  # one unit less needs more, one more is one too many
CUT_COLLECTIVES = 14
START_EXTRA_BYTES = 120_000  # the largest tensor has 36,864, and travels as a whole; the model has 907,000


@exercise("02")
def check_average_gradients(module: str = "my_ddp", ranks: tuple[int, ...] = RANKS) -> str:
    """Notebook 02: `average_gradients(model, bucket_bytes)`; losses as under DDP, in as few all-reduces as buckets."""
    read_module(module, "average_gradients")
    for world_size in ranks:
        answer = _run(workers.average_by_reader, module, world_size)
        for bucket_bytes, (losses, right, seen) in answer.items():
            says = f"on {world_size} ranks, with buckets of {format_bytes(bucket_bytes)}, "
            # Two buckets that follow one another are more than one bucket together, else they would have been one.
            most = 2 * workers.NET_BYTES // bucket_bytes + 1
            expect(len(seen) > 0, f"{says}no collective was seen; gradients that no one sends are not averaged")
            expect(len(seen) <= most, f"{says}{len(seen)} collectives were seen in a step, {most} are enough")
            largest = max(collective.bytes for collective in seen)
            expect(largest <= bucket_bytes, f"{says}{format_bytes(largest)} were sent in one collective")
            _expect_same_losses(losses, right, f"{says}the losses are not those of DDP")
    return f"Right: the losses of DDP, on {_and(ranks)} ranks, and a collective for each bucket."


@exercise("03")
def check_unit(module: str = "my_unit", ranks: tuple[int, ...] = RANKS) -> str:
    """Notebook 03: `Unit`: `shard`, `gather`, `reduce_gradients`, `free`; trains as one process and holds 16 P/N."""
    read_module(module, "Unit")
    for world_size in ranks:
        losses, right, shard_values, held_bytes, counts = _run(workers.train_readers_unit, module, world_size)
        says = f"on {world_size} ranks, "
        expect(
            counts == {"all_gather": 1, "reduce_scatter": 1},
            f"{says}a step has these collectives: {counts or 'none'}; one all-gather and one reduce-scatter are enough",
        )
        expected_values = -(-workers.NET_PARAMS // world_size)
        expect(shard_values == expected_values, f"{says}a slice of {shard_values:,} values; are all equally long?")
        expect(
            held_bytes <= 16 * expected_values + SLACK_BYTES,
            f"{says}{held_bytes:,} bytes are held between steps, more than four slices need; what was not freed?",
        )
        _expect_same_losses(losses, right, f"{says}the losses are not those of one process")
    return f"Right: the losses of one process on {_and(ranks)} ranks, and 16 P / N held on each."


@exercise("04")
def check_cut(module: str = "my_cut", ranks: tuple[int, ...] = RANKS) -> str:
    """Notebook 04: `shard_model(model, mesh)` cuts the checker's transformer, below a peak, with few collectives."""
    read_module(module, "shard_model")
    for world_size in ranks:
        losses, right, whole, peak_bytes, num_collectives = _run(workers.train_readers_cut, module, world_size)
        says = f"on {world_size} ranks, "
        expect(not whole, f"{says}{len(whole)} parameters are in no unit, {whole[0] if whole else ''} among them")
        limit = CUT_PEAK_BYTES[world_size]
        expect(
            peak_bytes < limit, f"{says}the peak is {format_bytes(peak_bytes)}, the target below {format_bytes(limit)}"
        )
        expect(
            num_collectives <= CUT_COLLECTIVES,
            f"{says}{num_collectives} collectives a step, the target is at most {CUT_COLLECTIVES}",
        )
        _expect_same_losses(losses, right, f"{says}the losses are not those of one process")
    return (
        f"Right: on {_and(ranks)} ranks, with {num_collectives} collectives and {format_bytes(peak_bytes)} at the peak."
    )


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


@exercise("06")
def check_loop(module: str = "my_loop", ranks: tuple[int, int] = (3, 2)) -> str:
    """Notebook 06: `train_loop(...)`, killed on the first number of ranks and resumed on the second."""
    read_module(module, "train_loop")
    killed_on, resumed_on = ranks
    with tempfile.TemporaryDirectory(prefix="fsdp_helpers-") as folder:
        _run_until_killed(module, killed_on, folder)
        losses, right = _run(workers.run_readers_loop, module, resumed_on, folder, None)
    says = f"killed in step {workers.KILLED_IN_STEP} on {killed_on} ranks and started again on {resumed_on}, your loop "
    steps = list(losses)
    expect(bool(steps), f"{says}takes no step")
    expect(steps[0] > 0, f"{says}begins with step 0: nothing was loaded")
    expect(
        workers.KILLED_IN_STEP - 2 < steps[0] <= workers.KILLED_IN_STEP,
        f"{says}goes on with step {steps[0]}; it saves after every second step, and the newest checkpoint counts",
    )
    expect(steps == list(range(steps[0], workers.LOOP_STEPS)), f"{says}takes the steps {steps}, not all, each once")
    for step, loss in losses.items():
        expect(
            abs(loss - right[step]) < TOLERANCE,
            f"{says}has a loss of {loss:.5f} in step {step}, an undisturbed run another one; what does a step depend on"
            " besides the parameters?",
        )
    return f"Right: killed on {killed_on} ranks, resumed on {resumed_on}, and the losses of an undisturbed run."


@exercise("07")
def check_accumulation(module: str = "my_accumulation", ranks: tuple[int, ...] = RANKS) -> str:
    """Notebook 07: `add_up_gradients(model, parts, loss_of)`, reduced once; `gradient_norm(model)`, over all slices."""
    read_module(module, "add_up_gradients")
    read_module(module, "gradient_norm")
    for world_size in ranks:
        for step in _run(workers.accumulate_by_reader, module, world_size):
            says = f"on {world_size} ranks, with {workers.PARTS} parts, "
            expect(step["reduced"] > 0, f"{says}nothing was reduced; which backward sends the gradients?")
            expect(
                step["reduced"] <= workers.NET_UNITS,
                f"{says}{step['reduced']} reduce-scatters were seen in a step; the model has {workers.NET_UNITS} units",
            )
            ratio = step["norm"] / step["right_norm"]
            expect(abs(ratio - 1) < TOLERANCE, f"{says}the gradient is {ratio:.2f} times as long as in one process")
            given = step["given_norm"]
            expect(isinstance(given, float), f"{says}gradient_norm returns a {given}; a number is asked for")
            expect(
                abs(given / step["norm"] - 1) < TOLERANCE,
                f"{says}gradient_norm says {given:.5f}, not the norm of the whole gradient; whose slices are in it?",
            )
    return f"Right: one reduction of each unit on {_and(ranks)} ranks, and the norm of the whole gradient."


@exercise("08")
def check_start(module: str = "my_start", ranks: tuple[int, ...] = RANKS) -> str:
    """Notebook 08: `start_sharded(build, weights, mesh)`: on meta, a unit per block, rank 0's weights, never whole."""
    read_module(module, "start_sharded")
    for world_size in ranks:
        found = _run(start_by_reader, module, world_size)
        says = f"on {world_size} ranks, "
        for names, what in ((found.whole, "in no unit"), (found.on_meta, "still on meta")):
            expect(not names, f"{says}{len(names)} tensors are {what}, {names[0] if names else ''} among them")
        expect(
            found.units == UNITS, f"{says}the units are {', '.join(found.units)}; one per block and the root, please"
        )
        expect(
            found.extra_bytes <= START_EXTRA_BYTES,
            f"{says}{format_bytes(found.extra_bytes)} were needed besides what stays, enough for several layers at "
            "once; is the model whole for a moment?",
        )
        expect(found.buffer_right, f"{says}the buffer has not its values; no file and no rank sends them")
        _expect_same_losses(found.losses, found.right, f"{says}the losses are not those of rank 0's weights")
    return f"Right: on {_and(ranks)} ranks, rank 0's weights, and never more than a layer whole."


# ---------------------------------------------------------------- on ranks


def _run(worker: Callable, module: str, world_size: int, *arguments: object) -> object:
    """What `worker` returns on rank 0; NotYet, in one line, where the reader's code fails or never ends."""
    bar = ProgressBar()
    bar.start(f"{module}.py, {count_ranks(world_size)} on cpu")
    settings = {"device": "cpu", "stall_s": STALL_S, "timeout_s": TIMEOUT_S, "progress": bar}
    try:
        return launch(worker, module, *arguments, world_size=world_size, **settings)[0]
    except RankError as error:
        where = last_line_in(module, error.details)
        raise NotYet(f"on {world_size} ranks, {module}.py fails{where}: {shorten(error.summary, LONGEST)}") from None
    except RankTimeout as error:
        raise NotYet(
            f"on {world_size} ranks, {module}.py does not end: {'; '.join(error.places)}. A collective waits until"
            " every rank takes part in it"
        ) from None


def _run_until_killed(module: str, world_size: int, folder: str) -> None:
    """The reader's loop, ended from outside in the middle of a step, as a job is that loses its machine."""
    try:
        _run(workers.run_readers_loop, module, world_size, folder, workers.KILLED_IN_STEP)
    except NotYet as failure:
        if workers.KILLED in str(failure):
            return
        raise
    raise NotYet(f"on {world_size} ranks your loop ends before step {workers.KILLED_IN_STEP}")


def _expect_same_losses(losses: list[float], right: list[float], message: str) -> None:
    differences = [abs(loss - expected) for loss, expected in zip(losses, right, strict=True)]
    same = all(difference < TOLERANCE for difference in differences)
    first = next((step for step, difference in enumerate(differences) if not difference < TOLERANCE), 0)
    expect(same, f"{message}: {losses[first]:.5f} instead of {right[first]:.5f} in step {first}")


def _and(ranks: tuple[int, ...]) -> str:
    return " and ".join(map(str, ranks))


# ---------------------------------------------------------------- 05, by arithmetic


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
