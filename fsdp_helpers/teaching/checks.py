"""Checkers for the exercises: each takes a reader's answer and says whether it holds, with the numbers."""

import importlib
import math
import sys
from collections.abc import Callable

from fsdp_helpers.quantities import format_bytes, format_count
from fsdp_helpers.ranks.launch import RankError, launch
from fsdp_helpers.records import RunRecord
from fsdp_helpers.teaching.probes import count_collectives_of


class NotYet(AssertionError):
    """The answer is missing or wrong; a notebook shows the message alone, without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return [f"Not yet: {self}"]


def _expect(holds: bool, message: str) -> None:
    if not holds:
        raise NotYet(message)


def _expect_answered(answer: object) -> None:
    _expect(answer is not None and answer is not ..., "replace the ... with your answer")


def check_parameter_count(answer: int | None) -> str:
    """Notebook 01: parameters of a convolution from 64 to 128 channels with 5 x 5 kernels and a bias."""
    _expect_answered(answer)
    # 128 kernels of 64 x 5 x 5 weights, and one bias each
    right = 128 * (64 * 5 * 5) + 128
    _expect(
        answer == right,
        f"{format_count(answer)} is not it: each of the 128 output channels has 64 x 5 x 5 weights and one bias",
    )
    return f"Right: {format_count(right)} parameters."


def check_largest_model(largest_model: Callable[[int], int] | None) -> str:
    """Notebook 01: the parameters that fit into so many bytes, with gradients and Adam, in fp32."""
    _expect_answered(largest_model)
    for budget_bytes in (16, 31, 8 * 10**9, 80 * 10**9):
        answer = largest_model(budget_bytes)
        _expect_answered(answer)
        _expect(
            answer == budget_bytes // 16,
            f"for {format_bytes(budget_bytes)} your function says {answer!r}; that many parameters need"
            f" {16 * answer:,} bytes, and one more would need {16 * (answer + 1):,}",
        )
    return "Right: 16 bytes a parameter, and only whole parameters."


def check_peak_below(record: RunRecord | None, limit_bytes: int) -> str:
    """The highest peak of any rank, measured, against a limit."""
    _expect_answered(record)
    _expect(record.ranks[0].peak_bytes is not None, "a run of one step has no steady step to measure; run 3 steps")
    peak_bytes = max(rank.peak_bytes for rank in record.ranks)
    _expect(
        peak_bytes < limit_bytes,
        f"the run peaks at {format_bytes(peak_bytes)} on a rank, the target is below {format_bytes(limit_bytes)}",
    )
    return f"Right: {format_bytes(peak_bytes)} at the peak, below {format_bytes(limit_bytes)}."


def check_all_reduce_bytes(answer: Callable[[int, int], float] | None) -> str:
    """Notebook 02: bytes that one rank sends in a ring all-reduce of so many bytes over so many ranks."""
    _expect_answered(answer)
    for tensor_bytes, world_size in ((4_799_528, 2), (1_000_000, 4), (1_000_000, 1)):
        given = answer(tensor_bytes, world_size)
        _expect_answered(given)
        right = 2 * (world_size - 1) / world_size * tensor_bytes
        _expect(
            abs(given - right) < 1,
            f"for {format_bytes(tensor_bytes)} over {world_size} rank(s) your function says {given:,.0f}, a ring"
            f" sends {right:,.0f}",
        )
    return "Right: 2 (N - 1) / N of the tensor, almost twice its size for many ranks."


def check_rank_indices(indices: Callable[[int, int, int], list[int]] | None) -> str:
    """Notebook 02: test images 0 to n - 1 over N ranks, each once, no rank with more than one extra."""
    _expect_answered(indices)
    for num_images, world_size in ((10, 3), (10_000, 7), (2, 4)):
        parts = [indices(num_images, rank, world_size) for rank in range(world_size)]
        _expect_answered(parts[0])
        seen = sorted(index for part in parts for index in part)
        _expect(
            seen == list(range(num_images)),
            f"{num_images} images over {world_size} ranks: {len(seen)} were counted, {len(set(seen))} of them different",
        )
        sizes = [len(part) for part in parts]
        _expect(max(sizes) - min(sizes) <= 1, f"uneven: the ranks get {sizes} images")
    return "Right: every image once, on exactly one rank."


def check_own_worker(module: str) -> str:
    """Notebook 02: the reader's module, launched: an all-reduce of the squared ranks, on any number of them."""
    _expect_answered(module)
    worker = _find_worker(module, "ranks_squared")
    for world_size in (3, 2):
        try:
            answers = launch(count_collectives_of, worker, world_size=world_size, timeout_s=120)
        except RankError as error:
            raise NotYet(f"on {world_size} ranks your worker fails. {error}") from None
        for rank, (given, ops) in enumerate(answers):
            _expect_answered(given)
            _expect("all_reduce" in ops, f"on {world_size} ranks, rank {rank} took part in no all-reduce")
            # 0 + 1 on two ranks, 0 + 1 + 4 on three
            right = sum(other**2 for other in range(world_size))
            _expect(
                given == right,
                f"on {world_size} ranks, rank {rank} returns {given}; that is not the sum of the squares",
            )
    return "Right: every rank knows the sum of all squares, on 2 ranks and on 3."


def _find_worker(module: str, name: str) -> Callable:
    """The function as the module's file has it now, however often it was imported before."""
    sys.modules.pop(module, None)
    importlib.invalidate_caches()
    try:
        found = getattr(importlib.import_module(module), name, None)
    except (ImportError, SyntaxError) as error:
        raise NotYet(f"{module}.py cannot be imported ({error}); run the cell that writes it") from None
    _expect(found is not None, f"{module}.py has no function {name}")
    return found


def check_held_bytes(held_bytes: Callable[[int, int], float] | None) -> str:
    """Notebook 03: bytes that an FSDP rank holds between steps, Adam in fp32, padding left aside."""
    _expect_answered(held_bytes)
    for num_params, world_size in ((1_000_000, 1), (1_000_000, 4), (94_104_234, 2)):
        given = held_bytes(num_params, world_size)
        _expect_answered(given)
        right = 16 * num_params / world_size
        _expect(
            abs(given - right) < 1,
            f"{format_count(num_params)} parameters over {world_size} rank(s): your function says {given:,.0f}, a rank"
            f" holds {right:,.0f}",
        )
    return "Right: 16 P / N."


def check_padding(padding: Callable[[int, int], int] | None) -> str:
    """Notebook 03: zeros that a flat parameter needs so that N ranks get slices of the same size."""
    _expect_answered(padding)
    for num_params, world_size in ((10, 5), (10, 3), (1_199_882, 3), (7, 8)):
        given = padding(num_params, world_size)
        _expect_answered(given)
        right = -num_params % world_size
        _expect(
            given == right,
            f"{format_count(num_params)} values over {world_size} ranks: your function says {given}, but with {right}"
            f" zeros every rank gets {(num_params + right) // world_size}",
        )
    return "Right: as few zeros as make the size a multiple of N."


def check_units(names: list[str], wanted: set[str]) -> str:
    """Notebook 04: a policy that makes exactly these modules units."""
    _expect_answered(names)
    extra, missing = set(names) - wanted, wanted - set(names)
    _expect(
        not extra and not missing,
        f"your policy chose {sorted(names)}; too many: {sorted(extra)}, missing: {sorted(missing)}",
    )
    return f"Right: {', '.join(sorted(wanted))}, and nothing else."


def check_run_within(record: RunRecord | None, *, peak_bytes: int, num_collectives: int) -> str:
    """Notebook 04: a run whose every rank stays below a peak with at most so many collectives a step."""
    _expect_answered(record)
    counted = max(sum(seen.count for seen in rank.collectives) for rank in record.ranks)
    verdict = check_peak_below(record, peak_bytes)
    _expect(counted <= num_collectives, f"{counted} collectives a step, the target is at most {num_collectives}")
    return f"{verdict} {counted} collectives a step."


def check_offload_split(split: Callable[[int, int], tuple[float, float]] | None) -> str:
    """Notebook 05: (device bytes, host bytes) that a rank holds between steps with everything offloaded."""
    _expect_answered(split)
    for num_params, world_size in ((1_000_000, 1), (94_104_234, 2)):
        given = split(num_params, world_size)
        _expect_answered(given)
        right = (0, 16 * num_params / world_size)
        _expect(
            abs(given[0] - right[0]) < 1 and abs(given[1] - right[1]) < 1,
            f"{format_count(num_params)} parameters over {world_size} rank(s): your function says {given}; between two"
            " steps, where do parameters, gradients and moments live?",
        )
    return "Right: nothing on the device between steps, 16 P / N on the host."


def check_transfer_seconds(transfer_seconds: Callable[[int, int, float], float] | None) -> str:
    """Notebook 05: seconds to move a rank's parameters to the device and its gradients back."""
    _expect_answered(transfer_seconds)
    for num_params, world_size, bytes_per_s in ((1_000_000, 1, 8e6), (94_104_234, 2, 25e9)):
        given = transfer_seconds(num_params, world_size, bytes_per_s)
        _expect_answered(given)
        right = 8 * num_params / world_size / bytes_per_s
        _expect(
            abs(given - right) < 1e-6 * right,
            f"{format_count(num_params)} parameters over {world_size} rank(s) at {format_bytes(int(bytes_per_s))}/s: your"
            f" function says {given} s, it takes {right:.6f} s",
        )
    return "Right: 4 bytes a parameter there, once with a single unit, and 4 bytes a gradient back."


def check_checkpoint_bytes(checkpoint_bytes: Callable[[int], float] | None) -> str:
    """Notebook 06: bytes of a checkpoint with Adam in fp32, for any strategy and number of ranks."""
    _expect_answered(checkpoint_bytes)
    for num_params in (1_199_882, 94_104_234, 7 * 10**9):
        given = checkpoint_bytes(num_params)
        _expect_answered(given)
        right = 12 * num_params
        _expect(
            abs(given - right) < 1,
            f"{format_count(num_params)} parameters: your function says {format_bytes(int(given))}; a checkpoint holds the"
            " parameters and two moments of each, once, and no gradients",
        )
    return "Right: 12 P, whatever the number of ranks."


def check_ranks_to_read(ranks_to_read: Callable[[int, int, int, int], list[int]] | None) -> str:
    """Notebook 06: which old ranks' files a new rank opens, for a tensor cut along its first dimension."""
    _expect_answered(ranks_to_read)
    for num_rows, saved, loading in ((12, 4, 3), (12, 4, 1), (128, 4, 3), (10, 4, 2)):
        for rank in range(loading):
            given = ranks_to_read(num_rows, saved, loading, rank)
            _expect_answered(given)
            mine = set(_rows(num_rows, loading, rank))
            right = [old for old in range(saved) if mine & set(_rows(num_rows, saved, old))]
            _expect(
                list(given) == right,
                f"{num_rows} rows, written by {saved} ranks and read by {loading}: rank {rank} keeps rows"
                f" {min(mine)} to {max(mine)} and needs the files of {right}; your function says {list(given)}",
            )
    return "Right: a rank opens the files whose rows overlap its own, and no others."


def _rows(num_rows: int, world_size: int, rank: int) -> range:
    """The rows of a tensor that FSDP gives to a rank: as many as `torch.chunk` would."""
    rows_a_rank = -(-num_rows // world_size)
    return range(min(rank * rows_a_rank, num_rows), min((rank + 1) * rows_a_rank, num_rows))


def check_saving_interval(interval_s: Callable[[float, float], float] | None) -> str:
    """Notebook 06: seconds between two checkpoints that lose the least, by Young's formula."""
    _expect_answered(interval_s)
    for save_s, between_failures_s in ((10.0, 86_400.0), (0.5, 3_600.0)):
        given = interval_s(save_s, between_failures_s)
        _expect_answered(given)
        right = (2 * save_s * between_failures_s) ** 0.5
        _expect(
            abs(given - right) < 1e-6 * right,
            f"a save of {save_s} s and a failure every {between_failures_s:,.0f} s: your function says {given:,.1f} s."
            f" The cost of saving, {save_s} / T, and of lost work, T / (2 x {between_failures_s:,.0f}), are equal at"
            f" {right:,.1f} s",
        )
    return "Right: the root of 2 x save time x time between failures."


def check_checkpointed_bytes(checkpointed_bytes: Callable[[int, int, int], int] | None) -> str:
    """Notebook 07: activations at the highest point of backward when every block is checkpointed."""
    _expect_answered(checkpointed_bytes)
    for num_blocks, kept_bytes, input_bytes in ((8, 13_377_536, 524_288), (1, 1_000, 40), (96, 1_000, 40)):
        given = checkpointed_bytes(num_blocks, kept_bytes, input_bytes)
        _expect_answered(given)
        right = (num_blocks - 1) * input_bytes + kept_bytes
        _expect(
            given == right,
            f"{num_blocks} block(s) that keep {format_bytes(kept_bytes)}, {format_bytes(input_bytes)} of it the input: your"
            f" function says {given:,.0f}; one block is whole, of the {num_blocks - 1} others there is the input",
        )
    return "Right: one block whole, and an input for each of the others."


def check_whole_norm(whole_norm: Callable[[list[float]], float] | None) -> str:
    """Notebook 07: the norm of a gradient from the norms of its slices, one a rank."""
    _expect_answered(whole_norm)
    for norms in ([3.0, 4.0], [2.0], [1.0, 2.0, 2.0]):
        given = whole_norm(norms)
        _expect_answered(given)
        right = math.hypot(*norms)
        _expect(
            abs(given - right) < 1e-9,
            f"slices with the norms {norms}: your function says {given}, together they have the norm {right:g}",
        )
    return "Right: squares add up over the ranks, norms do not."
