"""`doctor --gpu` next to GPUs on which nothing can be computed: its rows fail, and none hangs."""

import sys

COMMAND = [sys.executable, "-m", "fsdp_helpers", "doctor", "--gpu"]


def test_rows_fail_and_none_hangs(gpus, run_beside):
    done = run_beside(COMMAND, gpus.environment(), status=1)
    rows = dict(line.split(" | ")[:2] for line in done.stdout.splitlines()[2:-2])
    assert rows.keys() == {
        "| GPUs",
        "| versions",
        "| memory",
        "| arithmetic",
        "| links",
        "| collectives",
        "| FSDP2",
        "| bf16",
    }
    assert {rows[title] for title in ("| GPUs", "| arithmetic", "| collectives", "| FSDP2", "| bf16")} == {"WRONG"}
    assert "Paste this table into an issue." in done.stdout
