"""The body of a launched rank: join the group, run the worker once, send its result."""

import multiprocessing.connection
import pickle
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from fsdp_helpers.ranks.group import process_group
from fsdp_helpers.ranks.launching.pickling import pickle_result
from fsdp_helpers.ranks.launching.process import Failure, Sender
from fsdp_helpers.ranks.launching.server import loading_worker
from fsdp_helpers.ranks.launching.setup import Setup
from fsdp_helpers.ranks.progress import send_reports_to
from fsdp_helpers.ranks.roll_call import silent_ranks_named


def run_worker(rank: int, setup: Setup, send: Sender, link: multiprocessing.connection.Connection) -> None:
    """Run the worker, and send the parent its result or its failure; the parent heeds the first failure alone."""
    pickled, all_report = setup.payload
    if rank == 0 or all_report:
        send_reports_to(lambda *report: send("progress", report))
    with failures_sent(send):
        with loading_worker():
            worker, args = pickle.loads(pickled)
        place = {"device": setup.device, "init_method": setup.meeting_point, "launched": True}
        with (
            process_group(rank, setup.world_size, **place, timeout_s=setup.timeout_s),
            failures_sent(send),  # at once: when the group ends, the other ranks fail too
            silent_ranks_named(setup.timeout_s),
        ):
            send("in group", None)
            result = worker(rank, setup.world_size, *args)
        send("result", pickle_result(worker, result))


@contextmanager
def failures_sent(send: Sender) -> Iterator[None]:
    """Tell the parent about every end except a normal one, sys.exit() included."""
    try:
        yield
    except BaseException as error:
        send("failure", Failure(time.monotonic(), *describe_error(error)))
        raise SystemExit(1) from error


def describe_error(error: BaseException) -> tuple[str, str]:
    """Return the last line of a traceback, and all of it from the worker on."""
    worker_frames = error.__traceback__
    while worker_frames and worker_frames.tb_frame.f_code.co_filename == __file__:
        worker_frames = worker_frames.tb_next
    details = "".join(traceback.format_exception(type(error), error, worker_frames)).rstrip()
    return traceback.format_exception_only(error)[-1].strip(), details
