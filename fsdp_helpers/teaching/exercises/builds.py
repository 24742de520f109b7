"""Checkers of the build exercises: a module that the reader wrote is run on ranks, against plain training.

The functions of the ranks are in `build_workers`. A checker asks for 2 ranks and then for 3, where sizes do not divide.
"""

import tempfile
from collections.abc import Callable
from textwrap import shorten

from fsdp_helpers.quantities import format_bytes
from fsdp_helpers.ranks.launching.launch import RankError, RankTimeout, launch
from fsdp_helpers.ranks.progress import ProgressBar, count_ranks
from fsdp_helpers.teaching.exercises import build_accumulation, build_loop
from fsdp_helpers.teaching.exercises import build_workers as workers
from fsdp_helpers.teaching.exercises.answers import NotYet, exercise, expect
from fsdp_helpers.teaching.exercises.build_offload import check_plan as check_plan
from fsdp_helpers.teaching.exercises.build_plan import check_batch as check_batch
from fsdp_helpers.teaching.exercises.build_start import (
    LACKING,
    TIED,
    UNITS,
    StartedByReader,
    start_by_reader,
    start_from_short_file,
)
from fsdp_helpers.teaching.exercises.own_module import last_line_in, read_module

RANKS = (2, 3)
STALL_S, TIMEOUT_S = 15.0, 120.0  # ranks that wait for one another, and ranks that compute for ever
LONGEST = 200  # characters of an error's message; some print a whole model
TOLERANCE = 1e-4  # fp32 sums in another order differ by less
SLACK_BYTES = 4_000  # step counters, a loss, a batch
CUT_PEAK_BYTES = {2: 2_300_000, 3: 1_900_000}  # one unit less needs more, one more is one too many
CUT_COLLECTIVES = 14
START_EXTRA_BYTES = 120_000  # the largest tensor has 36,864, and travels as a whole; the model has 907,000
# What torch says when a module is sharded after the unit that it lies in.
TORCHS_WORDS = "Invariant encountered: value was None"
IN_OUR_WORDS = "a part of a unit was made a unit after it; inner ones first, the root last"


@exercise("02")
def check_average_gradients(module: str = "my_ddp", ranks: tuple[int, ...] = RANKS) -> str:
    """Notebook 02: `average_gradients(model, bucket_bytes)`; losses as under DDP, in as few all-reduces as buckets."""
    read_module(module, "average_gradients")
    for world_size in ranks:
        answer = _run(workers.average_by_reader, module, world_size)[0]
        for bucket_bytes, (losses, right, seen) in answer.items():
            says = f"on {world_size} ranks, with buckets of {format_bytes(bucket_bytes)}, "
            # Two buckets that follow one another are more than one bucket together, else they would have been one.
            most = 2 * workers.NET_BYTES // bucket_bytes + 1
            expect(len(seen) > 0, f"{says}no collective was seen; gradients that no one sends are not averaged")
            _expect_same_losses(losses, right, f"{says}the losses are not those of DDP")
            expect(len(seen) <= most, f"{says}{len(seen)} collectives were seen in a step, {most} are enough")
            largest = max(collective.bytes for collective in seen)
            expect(largest <= bucket_bytes, f"{says}{format_bytes(largest)} were sent in one collective")
    return f"Right: the losses of DDP, on {_and(ranks)} ranks, and a collective for each bucket."


@exercise("03")
def check_unit(module: str = "my_unit", ranks: tuple[int, ...] = RANKS) -> str:
    """Notebook 03: `Unit`: `shard`, `gather`, `reduce_gradients`, `free`; trains as one process and holds 16 P/N."""
    read_module(module, "Unit")
    for world_size in ranks:
        for rank, found in enumerate(_run(workers.train_readers_unit, module, world_size)):
            _expect_unit(found, -(-workers.NET_PARAMS // world_size), f"on {world_size} ranks, rank {rank}: ")
    return f"Right: the losses of one process on {_and(ranks)} ranks, and 16 P / N held on each."


def _expect_unit(found: workers.TrainedUnit, expected_values: int, says: str) -> None:
    expect(
        found.counts == {"all_gather": 1, "reduce_scatter": 1},
        f"{says}a step has these collectives: {found.counts or 'none'}; one all-gather and one reduce-scatter are"
        " enough",
    )
    expect(
        found.shard_values == expected_values, f"{says}a slice of {found.shard_values:,} values; are all equally long?"
    )
    expect(
        found.built_bytes <= 4 * expected_values + SLACK_BYTES,
        f"{says}{found.built_bytes:,} bytes are held after __init__, more than a slice needs; what was not freed?",
    )
    expect(
        found.held_bytes <= 16 * expected_values + SLACK_BYTES,
        f"{says}{found.held_bytes:,} bytes are held between steps, more than four slices need; what was not freed?",
    )
    _expect_same_losses(found.losses, found.right, f"{says}the losses are not those of one process")


@exercise("04")
def check_cut(module: str = "my_cut", ranks: tuple[int, ...] = RANKS) -> str:
    """Notebook 04: `shard_model(model, mesh)` cuts the checker's transformer, below a peak, with few collectives."""
    read_module(module, "shard_model")
    for world_size in ranks:
        for rank, found in enumerate(_run(workers.train_readers_cut, module, world_size)):
            _expect_cut(found, CUT_PEAK_BYTES[world_size], f"on {world_size} ranks, rank {rank}: ")
    return (
        f"Right: on {_and(ranks)} ranks, with {found.num_collectives} collectives and "
        f"{format_bytes(found.peak_bytes)} at the peak."
    )


def _expect_cut(found: workers.TrainedCut, limit_bytes: int, says: str) -> None:
    expect(not found.whole, f"{says}{len(found.whole)} parameters are in no unit, {_first(found.whole)} among them")
    expect(
        found.peak_bytes < limit_bytes,
        f"{says}the peak is {format_bytes(found.peak_bytes)}, the target below {format_bytes(limit_bytes)}",
    )
    expect(
        found.num_collectives <= CUT_COLLECTIVES,
        f"{says}{found.num_collectives} collectives a step, the target is at most {CUT_COLLECTIVES}",
    )
    expect(
        not found.in_root,
        f"{says}{', '.join(found.in_root)} belong to no unit but the root, which stays whole from forward to backward",
    )
    _expect_same_losses(found.losses, found.right, f"{says}the losses are not those of one process")


@exercise("06")
def check_loop(module: str = "my_loop", ranks: tuple[int, int] = (3, 2)) -> str:
    """Notebook 06: `train_loop(...)`, killed on the first number of ranks and resumed on the second."""
    read_module(module, "train_loop")
    killed_on, resumed_on = ranks
    with tempfile.TemporaryDirectory(prefix="fsdp_helpers-") as folder:
        status = _run_until_killed(module, killed_on, folder)
        when = f"in the save after step {build_loop.KILLED_AFTER}"
        if status == build_loop.IN_STEP:
            when = f"in step {build_loop.KILLED_AFTER + 2}"
        says = f"killed {when} on {killed_on} ranks and started again on {resumed_on}, your loop "
        try:
            losses, right = _run(build_loop.run_readers_loop, module, resumed_on, folder, False)[0]
        except NotYet as failure:
            raise NotYet(f"{says}fails; is all that it finds whole? {failure}") from None
    _expect_resumed(list(losses), build_loop.NEWEST_WHOLE[status], says)
    for step, loss in losses.items():
        expect(
            abs(loss - right[step]) < TOLERANCE,
            f"{says}has a loss of {loss:.5f} in step {step + 1}, an undisturbed run a different one; was all that it"
            " loads written by the same save, and what does a step depend on besides the parameters?",
        )
    return f"Right: killed on {killed_on} ranks, resumed on {resumed_on}, and the losses of an undisturbed run."


def _expect_resumed(steps: list[int], newest_whole: int, says: str) -> None:
    """Raise NotYet unless `steps`, as `loss_of` is called with them, go on from the newest whole checkpoint."""
    expect(bool(steps), f"{says}takes no step")
    expect(steps[0] > 0, f"{says}begins with step 1: nothing was loaded")
    expect(
        steps[0] == newest_whole,
        f"{says}goes on with step {steps[0] + 1}; it saves after every second step, and of what was saved whole the"
        " newest counts",
    )
    expected = list(range(newest_whole, build_loop.LOOP_STEPS))
    expect(steps == expected, f"{says}takes the steps {[step + 1 for step in steps]}, not all, each once")


@exercise("07")
def check_accumulation(module: str = "my_accumulation", ranks: tuple[int, ...] = RANKS) -> str:
    """Notebook 07: `add_up_gradients(model, parts, loss_of)`, reduced once; `gradient_norm(model)`, over all slices."""
    read_module(module, "add_up_gradients")
    read_module(module, "gradient_norm")
    for world_size in ranks:
        for rank, steps in enumerate(_run(build_accumulation.accumulate_by_reader, module, world_size)):
            for step in steps:
                _expect_accumulated(
                    step, f"on {world_size} ranks, with {build_accumulation.PARTS} parts, rank {rank}: "
                )
    return f"Right: one reduction of each unit on {_and(ranks)} ranks, and the norm of the whole gradient."


def _expect_accumulated(step: dict[str, object], says: str) -> None:
    expect(step["reduced"] > 0, f"{says}nothing was reduced; which backward sends the gradients?")
    expect(
        step["reduced"] <= workers.NET_UNITS,
        f"{says}{step['reduced']} reduce-scatters were seen in a step; the model has {workers.NET_UNITS} units",
    )
    largest = max((images for _, images in step["passes"]), default=0)
    expect(largest <= step["part"], f"{says}a forward takes {largest} images at once; a part has {step['part']}")
    kinds = [kind for kind, _ in step["passes"]]
    expect(
        kinds[:2] != ["forward", "forward"],
        f"{says}the second forward comes before the first backward, so the activations of both are there at once",
    )
    ratio = step["norm"] / step["right_norm"]
    expect(abs(ratio - 1) < TOLERANCE, f"{says}the gradient is {ratio:.2f} times as long as in one process")
    given = step["given_norm"]
    expect(isinstance(given, float), f"{says}gradient_norm returns a {given}; a number or a plain tensor is asked for")
    expect(
        abs(given / step["norm"] - 1) < TOLERANCE,
        f"{says}gradient_norm says {given:.5f}, not the norm of the whole gradient; whose slices are in it?",
    )
    expect(
        abs(step["norm_after"] / step["norm"] - 1) < TOLERANCE, f"{says}gradient_norm changes the gradient it looks at"
    )


@exercise("08")
def check_start(module: str = "my_start", ranks: tuple[int, ...] = RANKS) -> str:
    """Notebook 08: `start_sharded(build, weights, mesh)`: on meta, a unit per block, rank 0's weights, never whole."""
    read_module(module, "start_sharded")
    for world_size in ranks:
        for rank, found in enumerate(_run(start_by_reader, module, world_size)):
            _expect_start(found, f"on {world_size} ranks, rank {rank}: ")
    _expect_short_file_refused(module, ranks[0])
    return f"Right: on {_and(ranks)} ranks, rank 0's weights, all of them, and never more than a layer whole."


def _expect_start(found: StartedByReader, says: str) -> None:
    for names, what in ((found.whole, "in no unit"), (found.on_meta, "still on meta")):
        expect(not names, f"{says}{len(names)} tensors are {what}, {_first(names)} among them")
    expect(found.units == UNITS, f"{says}the units are {', '.join(found.units)}; one per block and the root, please")
    expect(
        found.extra_bytes <= START_EXTRA_BYTES,
        f"{says}{format_bytes(found.extra_bytes)} were needed besides what stays, enough for several layers at "
        "once; is the model whole for a moment?",
    )
    expect(found.is_tied, f"{says}head.weight and embed.weight are two parameters; they were one, with two names")
    expect(found.buffer_right, f"{says}the buffer has not its values; no file and no rank sends them")
    _expect_same_losses(found.losses, found.right, f"{says}the losses are not those of rank 0's weights")


def _expect_short_file_refused(module: str, world_size: int) -> None:
    """Raise NotYet unless the reader's start fails, on whichever rank, from weights that lack a tensor of a block."""
    try:
        _launch(start_from_short_file, module, world_size)
    except RankError:
        return
    raise NotYet(
        f"from weights without {LACKING} your model starts, too, with garbage in its place; {TIED} alone may be missing"
    )


# ---------------------------------------------------------------- on ranks


def _run(worker: Callable, module: str, world_size: int, *arguments: object) -> list:
    """What `worker` returns, rank by rank; NotYet, in one line, where the reader's code fails or never ends."""
    try:
        return _launch(worker, module, world_size, *arguments)
    except RankError as error:
        where = last_line_in(module, error.details)
        summary = IN_OUR_WORDS if TORCHS_WORDS in error.summary else shorten(error.summary, LONGEST)
        raise NotYet(f"on {world_size} ranks, {module}.py fails{where}: {summary}") from None


def _launch(worker: Callable, module: str, world_size: int, *arguments: object) -> list:
    """The same, but a failure is a RankError."""
    bar = ProgressBar()
    bar.start(f"{module}.py, {count_ranks(world_size)} on cpu")
    settings = {"device": "cpu", "stall_s": STALL_S, "timeout_s": TIMEOUT_S, "progress": bar}
    try:
        return launch(worker, module, *arguments, world_size=world_size, **settings)
    except RankTimeout as error:
        raise NotYet(
            f"on {world_size} ranks, {module}.py does not end: {'; '.join(error.places)}. A collective waits until"
            " every rank takes part in it"
        ) from None


def _run_until_killed(module: str, world_size: int, folder: str) -> int:
    """The exit status of the reader's loop, ended from outside as a job is that loses its machine."""
    try:
        _run(build_loop.run_readers_loop, module, world_size, folder, True)
    except NotYet as failure:
        for status in (build_loop.IN_SAVE, build_loop.IN_STEP):
            if f"exit status {status}" in str(failure):
                return status
        raise
    raise NotYet(f"on {world_size} ranks your loop ends before step {build_loop.KILLED_AFTER + 2}")


def _expect_same_losses(losses: list[float], right: list[float], message: str) -> None:
    differences = [abs(loss - expected) for loss, expected in zip(losses, right, strict=True)]
    same = all(difference < TOLERANCE for difference in differences)
    first = next((step for step, difference in enumerate(differences) if not difference < TOLERANCE), 0)
    expect(same, f"{message}: {losses[first]:.5f} instead of {right[first]:.5f} in step {first + 1}")


def _first(names: list[str]) -> str:
    return names[0] if names else ""


def _and(ranks: tuple[int, ...]) -> str:
    return " and ".join(map(str, ranks))
