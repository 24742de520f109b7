"""The body of a launched rank: join the group, run the worker once, send its result."""

import multiprocessing.connection
import pickle

from fsdp_helpers.ranks.group import process_group
from fsdp_helpers.ranks.pickling import pickle_result
from fsdp_helpers.ranks.progress import send_reports_to
from fsdp_helpers.ranks.rank import Sender, failures_sent
from fsdp_helpers.ranks.roll_call import silent_ranks_named
from fsdp_helpers.ranks.server import loading_worker
from fsdp_helpers.ranks.setup import Setup


def run_worker(rank: int, setup: Setup, send: Sender, link: multiprocessing.connection.Connection) -> None:
    """Run the worker, and send the parent its result or its failure; the parent heeds the first failure alone."""
    pickled, all_report = setup.payload
    if rank == 0 or all_report:
        send_reports_to(lambda *report: send("progress", report))
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
