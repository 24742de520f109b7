"""A checkpoint is there whole or not at all; its folder belongs to one run at a time."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager

import pytest

from fsdp_helpers.checkpointing import folder as checkpoint_folder
from fsdp_helpers.checkpointing.folder import (
    Checkpoint,
    CheckpointError,
    atomic_file,
    begin,
    checkpoint_name,
    clear_unfinished,
    commit,
    find_newest,
    find_steps,
    keep_newest,
    locked,
    read_checkpoint,
)

DESCRIPTION = {"world_size": 2, "settings": {"seed": 0}}


def save(folder, step, content=b"12345"):
    """A checkpoint of two files, as a run makes it."""
    unfinished = begin(folder / checkpoint_name(step))
    unfinished.mkdir(parents=True)
    (unfinished / "__0_0.distcp").write_bytes(content)
    (unfinished / ".metadata").write_bytes(b"123")
    return commit(unfinished, step=step, **DESCRIPTION)


def rewrite(path, **changes) -> None:
    description = json.loads((path / "checkpoint.json").read_text())
    (path / "checkpoint.json").write_text(json.dumps(description | changes))


def names(folder) -> list[str]:
    return sorted(os.listdir(folder))


def test_a_checkpoint_is_described_by_what_is_in_it(tmp_path):
    path = save(tmp_path, 20)
    assert path == tmp_path / "step-00000020"
    assert names(path) == [".metadata", "__0_0.distcp", "checkpoint.json"]
    expected = Checkpoint(format=2, step=20, files={".metadata": 3, "__0_0.distcp": 5}, **DESCRIPTION)
    assert read_checkpoint(path) == expected


def test_the_newest_is_the_one_of_the_latest_step(tmp_path):
    assert (find_steps(tmp_path / "none"), find_newest(tmp_path / "none")) == ([], None)
    for step in (100_000_000, 9, 20, 99_999_999):  # the first has a digit more than the others
        save(tmp_path, step)
    for other in (".writing-step-00000030", ".removing-step-00000031", "step-32", "step-00000033-old", "other"):
        (tmp_path / other).mkdir()
    assert find_steps(tmp_path) == [9, 20, 99_999_999, 100_000_000]
    assert find_newest(tmp_path) == tmp_path / checkpoint_name(100_000_000)


def test_nothing_bears_the_name_before_every_byte_is_on_the_disk(tmp_path, monkeypatch):
    """At each fsync and at the renaming: what a process that was killed there would leave."""
    seen = []

    def note(call, step):
        def noted(*args):
            seen.append((step, names(tmp_path)))
            return call(*args)

        return noted

    monkeypatch.setattr(os, "fsync", note(os.fsync, "fsync"))
    monkeypatch.setattr(os, "rename", note(os.rename, "rename"))
    save(tmp_path, 20)
    before, after = [".writing-step-00000020"], ["step-00000020"]
    # The description and then the folder are on the disk, then comes the name, then that is on the disk too.
    assert seen == [("fsync", before), ("fsync", before), ("rename", before), ("fsync", after)]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_the_newest_are_kept(count, tmp_path):
    for step in (5, 10, 15):
        save(tmp_path, step)
    keep_newest(tmp_path, count)
    assert names(tmp_path) == ["step-00000005", "step-00000010", "step-00000015"][-count:]
    for path in tmp_path.iterdir():
        read_checkpoint(path)


def test_a_checkpoint_loses_its_name_before_its_files(tmp_path, monkeypatch):
    for step in (5, 10):
        save(tmp_path, step)
    seen = []
    monkeypatch.setattr(checkpoint_folder.shutil, "rmtree", lambda path: seen.append((path.name, names(tmp_path))))
    keep_newest(tmp_path, 1)
    assert seen == [(".removing-step-00000005", [".removing-step-00000005", "step-00000010"])]


def cannot_be_removed(path, *args, **kwargs) -> None:
    raise PermissionError(13, "Permission denied", "__0_0.distcp")  # Python before 3.13 names the file, not its folder


@pytest.mark.parametrize("broken", ["os.rename", "shutil.rmtree"])
def test_a_checkpoint_that_cannot_be_removed_is_named(broken, tmp_path, monkeypatch):
    for step in (5, 10):
        save(tmp_path, step)
    monkeypatch.setattr(broken, cannot_be_removed)
    with pytest.raises(CheckpointError, match=r"step-00000005 can't be removed \(Permission denied\)"):
        keep_newest(tmp_path, 1)


# ---------------------------------------------------------------- one file, whole or as it was


@pytest.mark.parametrize("mode, text", [("w", "new"), ("wb", b"new")])
def test_a_file_appears_when_all_of_it_is_on_the_disk(mode, text, tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_text("old")
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(path.read_text()))
    with atomic_file(path, mode) as file:
        file.write(text)
        assert path.read_text() == "old"
    assert (synced, path.read_text(), names(tmp_path)) == (["old"], "new", ["file"])
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_file_that_fails_half_way_is_as_it_was(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    for error in (ZeroDivisionError, KeyboardInterrupt):
        with pytest.raises(error), atomic_file(path) as file:
            file.write(b"half")
            raise error
        assert (path.read_text(), names(tmp_path)) == ("old", ["file"])
    with pytest.raises(FileNotFoundError), atomic_file(tmp_path / "none" / "file"):
        pass


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda path: (path / ".metadata").unlink(), r"\.metadata is missing\. Put it back, or delete step-00000020"),
        (lambda path: (path / ".metadata").write_bytes(b"1234"), r"\.metadata is damaged: 4 bytes instead of 3"),
        (lambda path: (path / "__0_0.distcp").write_bytes(b""), r"__0_0\.distcp is damaged: 0 bytes instead of 5"),
        (lambda path: (path / "checkpoint.json").unlink(), "isn't a checkpoint: it has no readable checkpoint.json"),
        (lambda path: (path / "checkpoint.json").write_text("{"), "it has no readable checkpoint.json"),
        (lambda path: (path / "checkpoint.json").write_text('{"format": 3}'), "can't read formats above 2"),
        (lambda path: (path / "checkpoint.json").write_text('{"format": "1"}'), "has format 1, .* update fsdp_helpers"),
        (lambda path: (path / "checkpoint.json").write_text('{"format": 1}'), "checkpoint.json is damaged"),
        (lambda path: rewrite(path, color="red"), "checkpoint.json is damaged"),
        (lambda path: rewrite(path, files=[]), "checkpoint.json is damaged"),
        (lambda path: rewrite(path, settings=[]), "checkpoint.json is damaged"),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_name(spoil, message, tmp_path):
    path = save(tmp_path, 20)
    spoil(path)
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(path)


def test_the_way_out_is_the_checkpoint_before(tmp_path):
    for step in (5, 10, 15, 20):
        (save(tmp_path, step) / ".metadata").unlink()
    with pytest.raises(CheckpointError, match="or delete step-00000015 to continue from step-00000010$"):
        read_checkpoint(tmp_path / checkpoint_name(15))
    with pytest.raises(CheckpointError, match="or delete step-00000005 to start again$"):
        read_checkpoint(tmp_path / checkpoint_name(5))


def test_what_is_no_checkpoint_is_refused(tmp_path):
    (tmp_path / "file").write_text("text")
    for path in (tmp_path, tmp_path / "file", tmp_path / "none"):
        with pytest.raises(CheckpointError, match=f"{path} isn't a checkpoint.*such as step-00000020"):
            read_checkpoint(path)


# ---------------------------------------------------------------- one run at a time


HOLD = "import sys; from fsdp_helpers.checkpointing.folder import *\nwith locked(Path(sys.argv[1])): print(1, flush=True); "


@contextmanager
def held(folder, then="input()"):
    """Another process has the folder."""
    command = [sys.executable, "-c", HOLD + then, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"1\n"
        yield process


def test_a_folder_belongs_to_one_run_at_a_time(tmp_path):
    folder = tmp_path / "new" / "run"
    with held(folder) as process:
        (folder / ".writing-step-00000020").mkdir()
        message = f"another run is writing its checkpoints to {folder}; wait"
        with pytest.raises(CheckpointError, match=message), locked(folder):
            pass
        assert ".writing-step-00000020" in names(folder)  # the other one's, and not to be cleared away
        process.communicate(b"\n")
    with locked(folder):
        pass


def test_what_a_killed_process_left_is_cleared_away(tmp_path):
    save(tmp_path, 5)
    for left in (".writing-step-00000010", ".removing-step-00000001"):
        (tmp_path / left / "deep").mkdir(parents=True)
        (tmp_path / left / "deep" / "file").write_bytes(b"12345")
    (tmp_path / "notes.txt").write_text("the user's own")
    with locked(tmp_path):
        found = set(names(tmp_path))
    assert found - {".lock"} == {"step-00000005", "notes.txt"}
    read_checkpoint(tmp_path / checkpoint_name(5))


def test_only_what_is_unfinished_is_cleared(tmp_path):
    save(tmp_path, 5)
    (tmp_path / ".writing-step-00000010").mkdir()
    clear_unfinished(tmp_path)
    assert set(names(tmp_path)) - {".lock"} == {"step-00000005"}


def test_leftovers_that_cannot_be_removed(tmp_path, monkeypatch):
    left = tmp_path / ".writing-step-00000010"
    left.mkdir()
    monkeypatch.setattr("shutil.rmtree", cannot_be_removed)
    message = rf"{left} can't be removed \(Permission denied\); delete it by hand"
    with pytest.raises(CheckpointError, match=message), locked(tmp_path):
        pytest.fail("the block was entered")
    monkeypatch.undo()
    with locked(tmp_path):  # which isn't held any more
        assert not left.exists()


def test_the_lock_ends_with_the_block(tmp_path):
    with pytest.raises(ZeroDivisionError), locked(tmp_path):
        raise ZeroDivisionError
    for _ in range(2):
        with locked(tmp_path):
            pass


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("text")
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(CheckpointError, match=f"checkpoints can't be written to {folder} "), locked(folder):
            pass
    # Root may write anywhere, so the attempt is made as nobody.
    code = (
        "import os, sys; from fsdp_helpers.checkpointing.folder import *\n"
        "if os.geteuid() == 0: os.seteuid(65534)\n"
        "try:\n with locked(Path('run')): pass\n"
        "except CheckpointError as error: print(error)"
    )
    tmp_path.chmod(0o555)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    tmp_path.chmod(0o755)
    assert done.stdout == "checkpoints can't be written to run (Permission denied)\n", done.stderr


def test_the_folder_is_known_without_torch():
    code = "import sys, fsdp_helpers.checkpointing.folder; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
