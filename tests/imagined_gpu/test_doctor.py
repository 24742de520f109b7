"""`doctor --gpu` next to GPUs on which nothing can be computed: its checks fail, and none hangs."""

import sys

COMMAND = [sys.executable, "-m", "fsdp_helpers", "doctor", "--gpu"]


def test_checks_fail_and_none_hangs(gpus, run_beside):
    done = run_beside(COMMAND, gpus.environment(), status=1)
    rows = dict(line.strip("| ").split(" | ")[:: len(line.strip("| ").split(" | ")) - 1] for line in table_of(done))
    assert rows["versions"] == "ok"
    assert {rows[title] for title in ("machine", "collectives", "losses")} == {"WRONG"}
    assert "Paste this table into an issue." in done.stdout


def table_of(done) -> list[str]:
    return [line for line in done.stdout.splitlines() if line.startswith("| ")][2:]
