"""The files of a Slurm for tests, and what it needs; `tests/evidence` starts a real one."""

import re
import stat

import pytest
import slurm
import two_machines


def test_what_is_missing_is_said_with_how_to_get_it(monkeypatch):
    monkeypatch.setattr(two_machines.os, "geteuid", lambda: 0)
    monkeypatch.setattr(two_machines.shutil, "which", lambda name: None if name.startswith("no-") else name)
    assert two_machines.what_is_missing(("sh", "no-a", "no-b"), "apt") == "no-a, no-b not found here; to get them: apt"
    assert two_machines.what_is_missing(("sh",), "apt") is None
    monkeypatch.setattr(two_machines.os, "geteuid", lambda: 1000)
    assert two_machines.what_is_missing((), "apt").startswith("root is needed")


def test_every_cluster_has_ports_and_a_key_of_its_own(tmp_path):
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        slurm.write_files(tmp_path / name)
        ports = re.findall(r"Port=(\d+)", (tmp_path / name / "slurm.conf").read_text())
        assert len(ports) == len(set(ports)) == 3  # of the controller and of two nodes
        assert stat.S_IMODE((tmp_path / name / "munge.key").stat().st_mode) == 0o400
    assert (tmp_path / "one" / "munge.key").read_bytes() != (tmp_path / "other" / "munge.key").read_bytes()


@pytest.mark.parametrize("output, found", [("", ""), ("[default0]:a\nslurm: b\n[default1]:c\n", "[default0]:a")])
def test_what_rank_0_printed(output, found):
    assert slurm.rank_0_of(output) == found
