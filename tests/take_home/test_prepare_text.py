"""prepare_text.py: documents in all formats, as tokens that are learned or not; and what is refused, with its line."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[tools]'")

from hf_models import END, config_of, make_tokenizer, write_chats
from take_home_workers import FOLDER, load_script
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

pytestmark = pytest.mark.tools
load_script("prepare_text.py")  # which makes its folder known
SCRIPT = importlib.import_module("prepare_text")
USER, ASSISTANT = {"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3"}
CHAT = [62, 1, 2, 63, 3, END]


@pytest.fixture
def model(tmp_path) -> Path:
    make_tokenizer().save_pretrained(tmp_path / "model")
    config_of("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def prepared(
    model: Path, name: str, data: bytes | str | list, **settings
) -> tuple[list[list[int]], list[list[int]], list]:
    """Each piece's tokens, those of them that are learned, and whether it begins a document."""
    path, folder = model.parent / name, model.parent / "tokens"
    if isinstance(data, list):
        data = "\n".join(map(json.dumps, data))
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    SCRIPT.prepare(model, path, folder, **{"length": 64} | settings)
    tokens, ends = SCRIPT.array("i"), SCRIPT.array("q")
    tokens.frombytes((folder / "tokens.bin").read_bytes())
    ends.frombytes((folder / "ends.bin").read_bytes())
    learned = (folder / "learned.bin").read_bytes()
    pieces = [slice(first, last) for first, last in zip([0, *ends], ends, strict=False)]
    own = [[token for token, is_own in zip(tokens[one], learned[one], strict=True) if is_own] for one in pieces]
    return [list(tokens[one]) for one in pieces], own, list((folder / "firsts.bin").read_bytes())


TEXT = "w1 w2\n \t\nw3\nw4\n\n\n"
TEXTS = [[1, 2, END], [3, 4, END]]
ENTRIES = [{"text": "w1 w2"}, {"text": "w3 w4"}]


@pytest.mark.parametrize(
    "name, data",
    [
        ("text.txt", TEXT),
        ("bom.txt", b"\xef\xbb\xbf" + TEXT.encode()),
        ("windows.txt", TEXT.replace("\n", "\r\n")),
        ("lines.jsonl", ENTRIES),
        ("lines.json", ENTRIES),
        ("array.json", json.dumps(ENTRIES, indent=2)),
        ("bom.json", b"\xef\xbb\xbf" + json.dumps(ENTRIES).encode()),
    ],
)
def test_each_format_has_the_same_documents(name, data, model):
    assert prepared(model, name, data) == (TEXTS, TEXTS, [1, 1])


@pytest.mark.parametrize(
    "entry, tokens, learned",
    [
        ({"prompt": "w1 w2 ", "completion": "w3 w4"}, [1, 2, 3, 4, END], [3, 4, END]),
        ({"messages": [USER, ASSISTANT]}, CHAT, [3, END]),
        ({"prompt": [USER], "completion": [ASSISTANT]}, CHAT, [3, END]),
        ({"prompt": [USER, ASSISTANT, USER], "completion": [ASSISTANT]}, [*CHAT, *CHAT], [3, END]),
        ({"messages": [USER, ASSISTANT, USER, ASSISTANT]}, [*CHAT, *CHAT], [3, END, 3, END]),
        ({"messages": [USER, ASSISTANT | {"weight": 0}, USER, ASSISTANT]}, [*CHAT, *CHAT], [3, END]),
        ({"messages": [USER, ASSISTANT, USER, ASSISTANT | {"weight": 0}]}, [*CHAT, *CHAT], [3, END]),
        ({"messages": [USER, ASSISTANT, USER]}, [*CHAT, 62, 1, 2], [3, END]),  # no end token, and none is learned
    ],
)
def test_what_is_learned(entry, tokens, learned, model):
    assert prepared(model, "data.jsonl", [entry])[:2] == ([tokens], [learned])


def test_an_entry_with_a_weight_of_0_is_not_learned(model, capsys):
    found, own, _ = prepared(model, "data.jsonl", [{"text": "w1 w2", "weight": 0}, {"text": "w3", "weight": 1}])
    assert (found, own) == ([[3, END]], [[3, END]])
    assert (
        "2 documents, 2 tokens, 2 of them trained on\n1 with nothing to train on are left out"
        in capsys.readouterr().out
    )


def llama_like() -> PreTrainedTokenizerFast:
    """As Llama 2's: a ▁ before the first word, wherever a text begins; and a begin token."""
    words = {"<s>": 0, "</s>": 1, "▁": 2, "▁w": 3, "w": 4, "▁v": 5, "v": 6, "<unk>": 7, ":": 8}
    raw = Tokenizer(models.WordPiece(words, unk_token="<unk>", continuing_subword_prefix=""))
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    raw.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def test_a_prompt_and_its_completion_are_encoded_once_as_one_text(model):
    llama_like().save_pretrained(model)
    found = prepared(model, "data.jsonl", [{"prompt": "w", "completion": "v"}, {"prompt": "w:", "completion": " v"}])
    assert found[0] == [[0, 3, 6, 1], [0, 3, 8, 5, 1]]  # no ▁ before a completion that has no space
    assert found[1] == [[6, 1], [5, 1]]  # and the begin token isn't learned
    assert prepared(model, "data.txt", "w v")[:2] == ([[0, 3, 5, 1]], [[3, 5, 1]])


def test_bytes_for_a_model_without_a_tokenizer(tmp_path):
    config_of("llama", vocab_size=256).save_pretrained(tmp_path / "model")
    found = prepared(tmp_path / "model", "data.jsonl", [{"prompt": "é", "completion": "ü"}])
    assert found[:2] == ([[*"éü".encode(), 0]], [[*"ü".encode(), 0]])


BAD = {
    "it isn't JSON": '{"text": "w1"',
    "it's a int, not an object": "5",
    "['text'] can't be ['int']": '{"text": 5}',
    "['text'] can't be ['NoneType']": '{"text": null}',
    "it has ['story']; it needs": '{"story": "w1"}',
    "it has ['conversations']": '{"conversations": [{"from": "human", "value": "w1"}]}',
    "it has ['prompt']; it needs": '{"prompt": "w1"}',
    "it has ['messages', 'text']; it needs": '{"text": "w1", "messages": []}',
    "can't be ['list', 'str']": {"prompt": "w1", "completion": [ASSISTANT]},
    "['messages'] can't be ['str']": {"messages": "w1"},
    "the conversation has no message of the assistant": {"messages": [USER]},
    "the conversation begins with the assistant": {"messages": [{"role": "system", "content": "w1"}, ASSISTANT]},
    "message 2 is a str, not an object": {"messages": [USER, "w3"]},
    'message 1 has no "role"': {"messages": [{"content": "w1"}, ASSISTANT]},
    'the "content" of message 2 is int': {"messages": [USER, ASSISTANT | {"content": 5}]},
    "the weight of the message 2 is 0.5, not 0 or 1": {"messages": [USER, ASSISTANT | {"weight": 0.5}]},
    "the weight of the entry is 2, not 0 or 1": {"text": "w1", "weight": 2},
    "message 1 has a weight of 1, but isn't the assistant's": {"messages": [USER | {"weight": 1}, ASSISTANT]},
    'it has "tools", which the chat template ignores': {"messages": [USER, ASSISTANT], "tools": [{"name": "add"}]},
    '"tools" is str, not a list': {"messages": [USER, ASSISTANT], "tools": "[]"},
    'it has "tool_calls", which the chat template': {"messages": [USER, ASSISTANT | {"tool_calls": [{"name": "add"}]}]},
    "it has ['images'], but only text": {"messages": [USER, ASSISTANT], "images": ["a.png"]},
    "it isn't UTF-8": b'{"text": "\xff"}',
    "surrogates not allowed": '{"text": "\\ud800"}',
}


@pytest.mark.parametrize("message", BAD)
def test_bad_entries_are_named_or_counted(message, model, capsys):
    """With file and line, and what is wrong; the others are still learned if that's asked for."""
    bad = BAD[message]
    line = bad if isinstance(bad, bytes) else bad.encode() if isinstance(bad, str) else json.dumps(bad).encode()
    data = b'{"text": "w1 w2"}\n\n' + line + b'\n{"text": "w3 w4"}\n'
    with pytest.raises(SCRIPT.BadData) as refused:
        prepared(model, "data.jsonl", data)
    said = str(refused.value)
    assert said.startswith(f"{model.parent / 'data.jsonl'}, line 3: ") and message in said and "\n" not in said
    assert prepared(model, "data.jsonl", data, skip_bad=True)[0] == TEXTS
    assert (
        f"1 bad entries are left out; the first is {model.parent / 'data.jsonl'}, line 3: " in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    "name, data, message",
    [
        ("data.json", '[{"text": "w1"},\n{"text": 5}]', "line 2: ['text'] can't be ['int']"),
        ("data.json", '[{"text": "w1"},\n{"text": ]', "line 2: it isn't JSON"),
        ("data.json", '[{"text": "w1"},\n', "line 2: it isn't JSON"),
        ("data.txt", b"w1\n\nw2\n\xff\n", "line 4: it isn't UTF-8"),
        ("data.txt", b"\xff\xfew\x001\x00", "line 1: it isn't UTF-8"),
        ("data.txt", " \n\n ", "has nothing to train on"),
    ],
)
def test_bad_files(name, data, message, model):
    with pytest.raises(SCRIPT.BadData, match="^[^\n]*$") as refused:
        prepared(model, name, data)
    assert message in str(refused.value) and name in str(refused.value)


def test_tokenizers_that_do_not_fit(model):
    make_tokenizer(end=False).save_pretrained(model)
    with pytest.raises(SCRIPT.BadData, match="no end-of-text token"):
        prepared(model, "data.txt", "w1")
    make_tokenizer(chat=False).save_pretrained(model)
    (model / "chat_template.jinja").unlink(missing_ok=True)
    with pytest.raises(SCRIPT.BadData, match="line 1: messages need a chat template"):
        prepared(model, "data.jsonl", [{"messages": [USER, ASSISTANT]}])
    for rows, is_refused in ((62, False), (61, True)):  # the largest token is 61
        config_of("llama", vocab_size=rows).save_pretrained(model)
        if is_refused:
            with pytest.raises(SCRIPT.BadData, match="has tokens up to 61; the embedding has 61 rows"):
                prepared(model, "other.txt", "w1 w2")
        else:
            prepared(model, "data.txt", "w1")


def test_a_template_that_rewrites_earlier_turns_is_told(model, capsys):
    """As those do that drop the thoughts of all answers except the last; the others aren't trained on."""
    tokenizer = make_tokenizer()
    thought = "{% if m.role == 'user' or loop.last %}w9 {% endif %}{{ m.content }}"
    tokenizer.chat_template = tokenizer.chat_template.replace("{{ m.content }}", thought)
    tokenizer.save_pretrained(model)
    write_chats(model.parent / "chats.jsonl", num_chats=3)
    prepared(model, "data.jsonl", (model.parent / "chats.jsonl").read_text())
    said = capsys.readouterr().out
    assert "the chat template rewrites 3 of the assistant's earlier turns; we don't train on these" in said


def test_long_texts_are_split_and_long_conversations_cut(model, capsys):
    text = " ".join(f"w{index}" for index in range(20))
    tokens, own, firsts = prepared(model, "data.jsonl", [{"text": "w1 w2"}, {"text": text}], length=8)
    assert [len(piece) - 1 for piece in tokens] == [2, 8, 8, 4]  # every pair of a token and the next one, once
    assert sum([piece[1:] for piece in tokens[1:]], []) == [*range(1, 20), END] and firsts == [1, 1, 0, 0]
    entries = [{"prompt": "w2 ", "completion": text}, {"prompt": f"{text} ", "completion": "w2"}]
    tokens, own, _ = prepared(model, "cut.jsonl", entries, length=8)
    assert (tokens, own) == ([[2, *range(8)]], [list(range(8))])
    said = capsys.readouterr().out
    assert "1 with nothing to train on are left out" in said and "0 texts are split and 2 conversations are cut" in said


def test_workers_write_the_same_and_what_is_there_is_not_made_again(model, monkeypatch, capsys):
    """Alone, as a program; batches of a few entries each."""
    data = "\n\n".join(f"w{index % 50} w1" for index in range(50))
    right = prepared(model, "data.txt", data, length=8)
    folder, path = model.parent / "other", model.parent / "data.txt"
    monkeypatch.setattr(SCRIPT, "BATCH_BYTES", 20)
    SCRIPT.prepare(model, path, folder, length=8, workers=2)
    written = {one.name: one.read_bytes() for one in folder.iterdir()}
    assert (
        written == {one.name: one.read_bytes() for one in (model.parent / "tokens").iterdir()} and len(right[0]) == 50
    )
    assert sum(map(len, (written[name] for name in ("tokens.bin", "learned.bin")))) == 5 * 3 * 50
    monkeypatch.setattr(SCRIPT, "read_tokenizer", None)
    SCRIPT.prepare(model, path, folder, length=8)
    SCRIPT.check_prepared(model, folder, 8)
    with pytest.raises(SCRIPT.BadData, match="prepared with another length"):
        SCRIPT.check_prepared(model, folder, 9)
    command = [sys.executable, FOLDER / "prepare_text.py", model, path.with_name("none.txt"), folder]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1 and "none.txt" in ended.stderr
