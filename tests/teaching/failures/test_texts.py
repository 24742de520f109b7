"""The index by what you see: every card is in it, and what it quotes is what real runs, or PyTorch's files, say."""

import ast
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import nbformat
import pytest
import snippets
import torch

from fsdp_helpers.card_search import normalized
from fsdp_helpers.ranks.launch import launch
from fsdp_helpers.teaching.failures import plain
from fsdp_helpers.teaching.failures.entry import BEHAVIOR, MESSAGE, NUMBER, ON_CPU
from fsdp_helpers.teaching.failures.gallery import GALLERY, RUN, torch_release
from fsdp_helpers.teaching.failures.texts import TEXT, TEXTS
from fsdp_helpers.teaching.page import keep_cards

CARDS = {cell.id: cell.source for cell in nbformat.read(keep_cards.NOTEBOOK, as_version=4).cells}
ROWS = [(failure.name, row) for failure in GALLERY.values() for row in failure.rows()]
QUOTES = sorted({(row.source, row.text) for _, row in ROWS if row.source})
MESSAGES = [(failure.name, text) for failure in GALLERY.values() for text in failure.messages]
SITE = Path(torch.__file__).parent.parent
LIBRARIES = sorted((SITE / "torch/lib").glob("libc10*.so")) + sorted((SITE / "torch/lib").glob("libtorch*.so"))
ALONE, ON_TWO_RANKS = (Path(__file__).with_name(f"says_{where}.txt") for where in ("alone", "on_two_ranks"))
quoted_release = pytest.mark.skipif(torch_release() < "2.15", reason="the messages are quoted from PyTorch 2.15")


def one_side(text: str) -> str:
    """Which rank tells of it, whether it was sending, and how its connection ended are a matter of microseconds."""
    text = normalized(text).replace("send operation", "recv operation")
    return text.replace("connection reset by peer", "connection closed by peer")


def test_every_card_has_a_row():
    assert {name for name, _ in ROWS} == GALLERY.keys()
    assert {row.kind for _, row in ROWS} == {MESSAGE, NUMBER, BEHAVIOR}
    assert all("|" not in row.text and "\n" not in row.text for _, row in ROWS)


def test_the_text_read_without_torch_is_that_of_the_gallery():
    def text(failures):
        return {name: [getattr(failure, part) for part in TEXT] for name, failure in failures.items()}

    assert text(TEXTS) == text(GALLERY)


@pytest.mark.parametrize("name, text", MESSAGES)
def test_a_quoted_message_is_in_a_saved_run(name, text):
    """That torch still says so, test_failures asks the runs under `launch`; below, runs under torchrun."""
    assert name in {failure.name for failure in RUN}, "what a CPU can't show is a quote, with its source"
    assert any(
        one_side(text) in one_side(output) for output in re.findall(r"```text\n(.*?)```", CARDS[name], re.DOTALL)
    )


def quotes_from(kind: str) -> list[tuple[str, str]]:
    return [(source, text) for source, text in QUOTES if re.match(kind, source)]


@cache
def snippets_say() -> dict[str, str]:
    """What each snippet of the two files says, normalized."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, snippets.__file__, ALONE]
        settings = {"capture_output": True, "text": True, "check": True, "timeout": 300}
        alone = subprocess.run(command, **settings, env=os.environ | {"TMPDIR": folder})
    on_ranks = snippets.paragraphs(ON_TWO_RANKS)
    of_ranks = launch(snippets.say_on_ranks, on_ranks, world_size=2, device="cpu", progress=False, timeout_s=300)
    said = [*json.loads(alone.stdout), *("\n".join(both) for both in zip(*of_ranks, strict=True))]
    return {code: normalized(text) for code, text in zip(snippets.paragraphs(ALONE) + on_ranks, said, strict=True)}


@quoted_release
@pytest.mark.parametrize("_, text", quotes_from(f"{ON_CPU}$"))
def test_a_cpu_says_so(_, text):
    assert any(normalized(text) in said for said in snippets_say().values())


@quoted_release
def test_every_snippet_says_something_that_is_quoted():
    quotes = [normalized(text) for _, text in quotes_from(f"{ON_CPU}$")]
    assert [code for code, said in snippets_say().items() if not any(text in said for text in quotes)] == []


# Values that PyTorch writes into its format strings.
VALUE = re.compile(
    r"\[\d+\]|-?\d+|torch\.(?:b?float|cuda\.\w+)|\b(?:cuda|cpu|meta)\b|Signals\.\w+|(?<=OpType=)\w+|WorkNCCL|'inductor'"
    r"|(?<=\.) (?=[A-Z])"  # between two sentences, which may be two literals
)


def pieces(text: str) -> list[str]:
    """What a quote has of a format string: all but the values."""
    return [part for part in VALUE.split(" ".join(text.split())) if len(part) > 3] or [text]


@cache
def strings_in(path: Path) -> str:
    """A module's code, which tracebacks show, its string constants, and its classes, with single spaces."""
    found = [path.read_text()]
    for node in ast.walk(ast.parse(found[0])):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
        elif isinstance(node, ast.ClassDef):
            found.append(f"{'.'.join(path.relative_to(SITE).with_suffix('').parts)}.{node.name}")
    return " ".join("\n".join(found).split())


@cache
def literals_of_libraries() -> bytes:
    """The string literals in PyTorch's libraries: their read-only data, which is 2% of them."""
    return b"\0".join(read_only_data(path) for path in LIBRARIES)


def read_only_data(path: Path) -> bytes:
    """The section `.rodata` of a 64-bit ELF file."""
    with path.open("rb") as file:
        header = file.read(64)
        file.seek(struct.unpack_from("<Q", header, 40)[0])
        size, count, of_names = struct.unpack_from("<HHH", header, 58)
        sections = [struct.unpack_from("<IIQQQQ", file.read(size)) for _ in range(count)]
        file.seek(sections[of_names][4])
        names = file.read(sections[of_names][5])
        for name, _, _, _, begin, length in sections:
            if names[name:].startswith(b".rodata\0"):
                file.seek(begin)
                return file.read(length)
    return b""


@quoted_release
@pytest.mark.parametrize("source, text", quotes_from(r"torch/.*\.py$"))
def test_a_python_file_has_what_is_quoted_from_it(source, text):
    assert [part for part in pieces(text) if part.strip() not in strings_in(SITE / source)] == []


@quoted_release
@pytest.mark.skipif(not any("torch_cuda" in path.name for path in LIBRARIES), reason="needs PyTorch with CUDA on Linux")
@pytest.mark.parametrize("_, text", quotes_from("torch's "))
def test_a_library_has_what_is_quoted_from_its_source(_, text):
    assert [part for part in pieces(text) if part.strip().encode() not in literals_of_libraries()] == []


def test_every_other_quote_names_who_says_so():
    """NCCL, CUDA, Slurm, a framework, an older version: what isn't installed here, or can't be made to happen."""
    others = {source for source, _ in QUOTES} - {source for source, _ in quotes_from(f"{ON_CPU}$|torch/|torch's ")}
    assert {"NCCL", "Slurm", "accelerate", "an older PyTorch"} <= others and "torch" not in others


FAST = ("crash-connection-closed",)
UNDER_TORCHRUN = [
    pytest.param(failure, marks=[] if failure.name in FAST else pytest.mark.long, id=failure.name)
    for failure in RUN
    if keep_cards.UNDER_TORCHRUN in CARDS[failure.name]
]


@pytest.mark.parametrize("failure", UNDER_TORCHRUN)
def test_torchrun_still_says_so(failure):
    """The messages that the saved output has."""
    saved = one_side(keep_cards.saved_output(CARDS[failure.name]).partition("\n```\n\n")[0])
    said = one_side(keep_cards.plain_output(failure))
    assert "exit code 1" in said and "exit code 1" in saved
    assert all(one_side(text) in said for text in failure.messages if one_side(text) in saved)


PRINTED = """
[rank0]: Traceback (most recent call last):
[rank0]:   File "/home/somebody/train.py", line 3, in <module>
[rank0]: RuntimeError: Error(s) in loading state_dict for Sequential:
[rank0]: \tMissing key(s) in state_dict: "0.weight".
[rank0]: torch._dynamo.exc.Unsupported: Call to `torch._dynamo.disable()`
[rank1]:[E1123 17:10:15.245069943 socket.cpp:1028] [c10d] The client socket has timed out (127.0.0.1, 40399).
  what():  [enforce fail at /__w/gloo/tcp/pair.cc:464] op.preamble.length <= op.nbytes. 72 vs 18.
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
=====
  host      : somebodys-laptop
  exitcode  : -6 (pid: 8666)  (SIGABRT)
"""


def test_a_saved_run_has_what_matters_and_nothing_of_the_machine():
    assert plain.what_matters(1, PRINTED) == {
        "status": 1,
        "errors": [
            "[rank0]: RuntimeError: Error(s) in loading state_dict for Sequential:",
            '[rank0]: \tMissing key(s) in state_dict: "0.weight".',
            "[rank0]: torch._dynamo.exc.Unsupported: Call to `torch._dynamo.disable()`",
            "[rank1]:[E socket.cpp:1028] [c10d] The client socket has timed out (ADDRESS, PORT).",
            "  what():  [enforce fail at pair.cc:464] op.preamble.length <= op.nbytes. 72 vs 18.",
        ],
        "report": [
            "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:",
            "  host      : HOST",
            "  exitcode  : -6 (pid: PID)  (SIGABRT)",
        ],
    }


@pytest.mark.parametrize(
    "line", ["[rank0]: torch.distributed.elastic.rendezvous.api.RendezvousClosedError", "RuntimeError:"]
)
def test_an_error_without_a_message_is_one_too(line):
    assert list(plain.errors_of([line, "[rank0]: what it says"]))[0] == line
