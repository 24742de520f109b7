"""gpu-check beside GPUs on which nothing can be computed: its rows fail, and none hangs."""

import json
import signal
import sys

from programs import running, wait_until

LIMIT_S = 120  # for one check, on a busy machine
COMMAND = [sys.executable, "-m", "fsdp_helpers", "gpu-check", "--limit", LIMIT_S]


def test_rows_fail_and_none_hangs(gpus, run_beside, tmp_path):
    done = run_beside([*COMMAND, "--json", tmp_path / "found.json"], gpus.environment(), status=1)
    found = json.loads((tmp_path / "found.json").read_text())
    rows = {row["check"]: row for row in found["rows"]}
    assert not [row for row in rows.values() if row["measured"].startswith("still running")]
    passed = {name for name, row in rows.items() if row["result"] == "PASS"}
    skipped = [row["measured"] for row in rows.values() if row["result"] == "SKIP"]
    assert skipped and all("this machine has 1" in reason for reason in skipped)
    failed = [row["measured"] for row in rows.values() if row["result"] == "FAIL"]
    assert failed and all("out of memory" in text for text in failed), failed
    assert passed == {
        "ranks on the CPU leave the GPU alone",
        "a stopped rank on the CPU is named",
        "nothing is left behind",
    }
    assert done.stdout.count("paste from here") == 2


def test_an_interrupt_leaves_nothing_behind(gpus, tmp_path):
    """The test's own fixture looks for processes and files."""
    with running(list(map(str, COMMAND)), variables=gpus.environment()) as process:
        assert wait_until(lambda: any("one_check" in use.command for use in gpus.uses()), timeout_s=120)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said.splitlines()[-1] == "fsdp_helpers: interrupted; all ranks are stopped"
