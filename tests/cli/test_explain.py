"""`explain` leads from what people wrote in public threads to a right card, tells quotes from guesses, and knows its limits."""

import io
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from runs import main_in_process

from fsdp_helpers.card_search import ACCOMPANYING, OOM_FRAGMENTED, OUT_OF_MEMORY, Index
from fsdp_helpers.cli.explain import GUESSES, MORE_GUESSES, ORDINARY, explain_text
from fsdp_helpers.field_guide import cards

SYMPTOMS = tomllib.loads(Path(__file__).with_name("symptoms.toml").read_text("utf-8"))["said"]
MOST_MISSES = 15
INDEX = Index(cards())


def found(text: str) -> list[str]:
    return [match.card.name for match in INDEX.find(text)]


def test_a_right_card_is_among_the_three_for_nearly_all_symptoms():
    misses = [f"{said['text']!r}\n  {found(said['text'])} instead of {said['right']}" for said in SYMPTOMS]
    misses = [
        miss for miss, said in zip(misses, SYMPTOMS, strict=True) if not {*found(said["text"])} & {*said["right"]}
    ]
    print(f"{len(misses)} of {len(SYMPTOMS)} symptoms lead to no right card:", *misses, sep="\n")
    assert len(SYMPTOMS) >= 255 and len(misses) <= MOST_MISSES


def test_the_table_names_cards_that_exist():
    named = {name for said in SYMPTOMS for name in said["right"]} | {*ACCOMPANYING, OOM_FRAGMENTED, OUT_OF_MEMORY}
    assert named - cards().keys() == set()


def test_all_of_an_output_names_the_cause_first():
    """torchrun's report is in every output; the message above it tells more."""
    said = "\n".join(said["text"] for said in SYMPTOMS if said["thread"] in ("pytorch#156535", "Chinese-Vicuna#113"))
    assert found(said)[0] == "crash-mixed-tensor-dtensor"


def test_a_long_output_is_searched_for_quotes():
    assert (
        found("step\n" * 10000 + "got mixed torch.Tensor and DTensor\n" + "step\n" * 10000)[0]
        == "crash-mixed-tensor-dtensor"
    )


# ---------------------------------------------------------------- what it doesn't know, it says

FOREIGN = (
    "ModuleNotFoundError: No module named 'pandas'",
    "SyntaxError: invalid syntax",
    '  File "train.py", line 12\n    print "hello"\nSyntaxError: Missing parentheses in call to print. Did you mean print()?',
    "FileNotFoundError: [Errno 2] No such file or directory: 'data.csv'",
    "TypeError: unsupported operand type(s) for +: 'int' and 'str'",
    "AttributeError: 'NoneType' object has no attribute 'split'",
    "IndexError: list index out of range",
    "curl: (6) Could not resolve host: github.com",
    'psycopg2.OperationalError: connection to server at "localhost" (127.0.0.1), port 5432 failed: Connection refused',
    "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='api', port=443): Max retries exceeded with url: /v1",
    "django.db.utils.OperationalError: no such table: model_checkpoint, while loading the dataset for training on all ranks",
    "docker: driver failed programming external connectivity on endpoint web: port is already allocated.",
    "pandas.errors.ParserError: Error tokenizing data. C error: Expected 5 fields in line 10, saw 7",
    "git: fatal: refusing to merge unrelated histories",
    "OSError: [Errno 28] No space left on device: '/var/log/app.log'",
    "OSError: [Errno 24] Too many open files: 'access.log'",
    "nginx: [emerg] bind() to 0.0.0.0:80 failed (98: Address already in use)",
    "Error: listen EADDRINUSE: address already in use :::3000",
    "ssh: connect to host 10.0.0.5 port 22: Connection timed out",
    'Exception in thread "main" java.lang.OutOfMemoryError: Java heap space',
    "how do I change the font of my plot?",
    "segmentation of medical images with U-Net",
    "42",
)


@pytest.mark.parametrize("said", FOREIGN)
def test_a_message_that_is_foreign_to_the_field_gets_no_card(said):
    assert found(said) == []


def test_no_card_is_one_sentence_and_status_1(capsys):
    assert main_in_process("explain", FOREIGN[0]) == 1
    assert re.fullmatch(r"No card matches this message\. .*\n", capsys.readouterr().out)


def test_a_guess_is_called_a_guess():
    said = "training hangs at the end of the epoch on 2 of 8 gpus"
    assert explain_text(said, INDEX.find(said)).startswith(GUESSES)


def test_a_quote_comes_before_any_guess_which_is_only_named():
    said = "got mixed torch.Tensor and DTensor, when I call generate after FSDP"
    matches = INDEX.find(said)
    shown, _, named = explain_text(said, matches).partition(MORE_GUESSES)
    assert shown.startswith("crash-mixed-tensor-dtensor: ") and GUESSES not in shown
    assert "seen as:     got mixed torch.Tensor and DTensor" in shown
    assert shown.count("  why:") == sum(bool(match.quote) for match in matches) < len(matches)
    assert named and "why:" not in named


SHAPES = "RuntimeError: The size of tensor a (10) must match the size of tensor b (12) at non-singleton dimension 0"
SAID_BY_ANY = {
    SHAPES: "save-plain-optimizer-state",
    "OSError: [Errno 28] No space left on device": "save-half-written",
    "OSError: [Errno 28] No space left on device: '/runs/ckpt/step-100/__0_0.distcp'": "save-half-written",
    "Address already in use": "crash-port-in-use",
    "Segmentation fault (core dumped)": "crash-segfault",
    "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cuda:1!": "crash-offload-device",
}


@pytest.mark.parametrize("said, name", SAID_BY_ANY.items())
def test_what_any_program_says_is_shown_as_such(said, name):
    matches = INDEX.find(said)
    assert (matches[0].card.name, bool(matches[0].quote)) == (name, True)
    assert explain_text(said, matches).startswith(ORDINARY)


def test_a_hint_that_goes_with_any_message_comes_after_the_message():
    said = (
        "CUDA error: invalid device ordinal\nCUDA kernel errors might be asynchronously reported at some other API call"
    )
    assert found(said)[:2] == ["crash-invalid-device", "crash-cuda-assert"]
    assert ORDINARY not in explain_text(said, INDEX.find(said))


def test_a_second_sign_makes_it_a_failure_of_several_ranks():
    in_optimizer = f'File "torch/optim/adam.py", line 7, in step\n{SHAPES}'
    assert ORDINARY not in explain_text(in_optimizer, INDEX.find(in_optimizer))


HINT = "If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
OUT = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.10 GiB of which 9.12 MiB is free."
BY_THE_NUMBERS = {
    f"{OUT} 78.1 GiB is allocated by PyTorch, and 20.57 MiB is reserved by PyTorch but unallocated. {HINT}": OUT_OF_MEMORY,
    f"{OUT} 58.1 GiB is allocated by PyTorch, and 20.57 GiB is reserved by PyTorch but unallocated. {HINT}": OOM_FRAGMENTED,
    "RuntimeError: CUDA out of memory": OUT_OF_MEMORY,
}


@pytest.mark.parametrize("said, name", BY_THE_NUMBERS.items())
def test_out_of_memory_is_read_by_its_numbers(said, name):
    assert found(said)[0] == name


CODES = {
    "exitcode: -9": "memory-every-rank-loads",
    "exit code 137": "memory-every-rank-loads",
    "Exit Code: 137": "memory-every-rank-loads",
    "failed with exit code 139": "crash-segfault",
    "exitcode: -11": "crash-segfault",
    "exit status 134": "hang-after-last-step",
    "exit code 135": "crash-shared-memory",
    "exit code 143": "crash-hangup",
    "exit code 124": "crash-slurm-node-failed",
}


@pytest.mark.parametrize("said, name", CODES.items())
def test_an_exit_code_alone_leads_to_its_card(said, name):
    assert name in found(said)


# ---------------------------------------------------------------- the command


def test_the_command_prints_the_remedy(capsys):
    assert main_in_process("explain", "got mixed torch.Tensor and DTensor") == 0
    out = capsys.readouterr().out
    assert "why:         A unit's hooks" in out and "how to tell: In the traceback" in out
    assert "fix:         Call the unit." in out and "failures/crash-mixed-tensor-dtensor." in out


def test_it_reads_from_a_pipe(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("step 1\nstep 2\nPytorchStreamReader failed reading zip archive\n"))
    assert main_in_process("explain") == 0
    assert capsys.readouterr().out.startswith("save-half-written: ")


def test_nothing_to_explain_is_bad_input(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    assert main_in_process("explain") == 2
    assert re.fullmatch(r"fsdp_helpers: explain: give a message.*\n", capsys.readouterr().err)


def test_it_answers_where_there_is_no_torch_and_no_process():
    """As in a browser, where `plan` has to work, too."""
    code = (
        "import sys; sys.modules |= {'torch': None, '_multiprocessing': None}\n"
        "from fsdp_helpers.__main__ import main; main('plan --model llama-8b --world-size 8'.split())\n"
        "sys.exit(main(['explain', 'exitcode: -9']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "memory-every-rank-loads: " in done.stdout, done.stderr
