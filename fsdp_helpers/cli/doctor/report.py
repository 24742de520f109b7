"""Check this machine and its environment: `python -m fsdp_helpers doctor`, one line per check."""

from collections.abc import Callable, Sequence

from fsdp_helpers.cli.doctor import environment, leftovers, machine, rendezvous
from fsdp_helpers.cli.doctor.rows import FAIL, NOTE, Look, Row, look_at

LOOKS = (
    Look("Python", environment.python_is_new_enough),
    Look("versions", environment.versions_fit),
    Look("lock", environment.versions_as_locked),
    Look("Jupyter", environment.jupyter_finds_this_environment),
    Look("cores", machine.cores),
    Look("memory", machine.memory),
    Look("shared memory", machine.shared_memory),
    Look("open files", machine.open_files),
    Look("temporary", machine.temporary_folder),
    Look("rank variables", rendezvous.rank_variables),
    Look("host name", rendezvous.host_name_is_this_machine),
    Look("interfaces", rendezvous.interfaces_exist),
    Look("ports", rendezvous.ports_answer),
    Look("proxies", rendezvous.proxies_leave_this_machine_alone),
    Look("data", machine.data_can_be_used),
    Look("leftovers", leftovers.processes_of_earlier_runs),
    Look("GPU", machine.gpu_is_usable_or_absent),
    Look("two ranks", rendezvous.two_ranks_add_up),
)


def examine(looks: Sequence[Look], on_row: Callable[[Row], None]) -> list[Row]:
    """Run the checks one by one, and pass each row to `on_row` as soon as it's known."""
    rows = []
    for look in looks:
        rows.append(look_at(look))
        on_row(rows[-1])
    return rows


def line(row: Row) -> str:
    """Return a row as a line of text."""
    return f"{row.result:6}{row.check:15} {row.measured}"


def verdict(rows: Sequence[Row]) -> str:
    """Return the report's last line, which states whether this machine is ready."""
    wrong = [row.check for row in rows if row.result == FAIL]
    if wrong:
        return f"{len(wrong)} of {len(rows)} wrong: {', '.join(wrong)}. Fix the first one, and run doctor again."
    notes = [row.check for row in rows if row.result == NOTE]
    doubts = f" Worth checking: {', '.join(notes)}." if notes else ""
    return f"This machine is ready for all notebooks on CPU ranks.{doubts} For its GPUs: python -m fsdp_helpers doctor --gpu"
