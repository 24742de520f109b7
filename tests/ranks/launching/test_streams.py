import os
import subprocess

import pytest

from fsdp_helpers.ranks.launching.streams import LineSender


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def stream(lines) -> LineSender:
    return LineSender(lines.append)


def test_lines_travel_whole(stream, lines):
    print("one", end=" ", file=stream)
    assert lines == []
    print("line\n\nthe next", end="", file=stream)
    assert lines == ["one line", ""]
    stream.send_rest()
    assert lines == ["one line", "", "the next"]


def test_bytes_of_a_character_may_come_apart(stream, lines):
    whole = "früh\n".encode()
    for part in (whole[:3], whole[3:], b"\xff\n"):
        assert stream.buffer.write(part) == len(part)
    assert lines == ["früh", "\ufffd"]


def test_another_process_can_write_to_it(stream, lines):
    subprocess.run(["echo", "by echo"], stdout=stream, check=True)
    subprocess.run(["sh", "-c", "echo; printf 'no newline'"], stdout=stream.buffer, check=True)
    stream.send_rest()
    assert lines == ["by echo", "", "no newline"]


def test_the_end_does_not_wait_for_who_still_holds_the_file(stream, lines):
    with subprocess.Popen(["sleep", "600"], stdout=stream) as process:
        os.write(stream.fileno(), b"a line\n")
        stream.send_rest()
        assert process.poll() is None
        process.kill()
    assert lines == ["a line"]
