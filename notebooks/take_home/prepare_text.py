"""Tokenize documents for finetune_hf.py, on all cores; this needs transformers.

It also runs alone: `python prepare_text.py MODEL DATA FOLDER --length 4096`. Then give finetune_hf.py the FOLDER.

DATA is a text file with blank lines between documents, JSON lines (`.jsonl`) or a JSON array (`.json`). Each entry has
"text", or "messages" (and perhaps "tools"), or "prompt" and "completion" as two texts or two lists of messages.
Learned are texts, completions and the assistant's messages, except those with a "weight" of 0. A bad entry is refused
with its line, or counted with --skip-bad-lines. Texts longer than --length are split; longer conversations are cut off.
"""

import argparse
import ctypes
import hashlib
import json
import os
import re
import shutil
import signal
import sys
from array import array
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, groupby
from pathlib import Path

BATCH_BYTES = 1_000_000  # of data, for a worker at a time
KINDS = {"messages": ["messages"], "prompt": ["prompt", "completion"], "text": ["text"]}
TOKENS_BY = ("config", "token", "vocab", "merges", "chat", "special", "added", "spiece")  # files that affect the tokens


class BadData(Exception):
    """What is wrong with the data or the tokenizer, in one line."""


def end_with_parent() -> None:
    """Have Linux kill this process if its parent is killed; otherwise it would still be at work during the next run."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG
        if os.getppid() != parent:
            sys.exit("the parent was killed")  # it died before the call above


# ---------------------------------------------------------------- entries and documents


def read_entries(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield each entry and the number of the line on which it begins."""
    with path.open("rb") as file:
        if file.read(3) != b"\xef\xbb\xbf":  # a byte order mark
            file.seek(0)
        if path.suffix == ".json" and file.peek().lstrip()[:1] == b"[":
            yield from read_array(file.read())
        elif path.suffix in (".json", ".jsonl"):
            yield from ((number, line) for number, line in enumerate(file, start=1) if line.strip())
        else:
            for is_blank, lines in groupby(enumerate(file, start=1), lambda numbered: not numbered[1].strip()):
                numbers, texts = zip(*lines, strict=True)
                if not is_blank:
                    yield numbers[0], b"".join(texts)


def read_array(data: bytes) -> Iterator[tuple[int, bytes]]:
    text, line, last = decoded(data), 1, 0
    between, decode = re.compile(r"[\s,]*"), json.JSONDecoder().raw_decode
    at = between.match(text, text.index("[") + 1).end()
    while text[at : at + 1] != "]":
        line, last = line + text.count("\n", last, at), at
        try:
            _, end = decode(text, at)
        except json.JSONDecodeError as error:
            raise BadData(f"line {error.lineno}: it isn't JSON: {error.msg}") from None
        yield line, text[at:end].encode()
        at = between.match(text, end).end()


def decoded(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise BadData(f"line {data.count(10, 0, error.start) + 1}: it isn't UTF-8: {error.reason}") from None


@dataclass
class Document:
    kind: str  # text, prompt or messages
    text: str
    learned: list[tuple[int, int]]  # which characters
    has_end: bool = True  # whether an end token follows, unless the chat template put one there
    num_rewritten: int = 0  # how many of the assistant's messages the chat template rewrites later


def demand(condition: bool, otherwise: str) -> None:
    if not condition:
        raise ValueError(otherwise)


def document_of(entry: object, tokenizer) -> Document:
    """Return the document of an entry. Raise a `ValueError` that says what is wrong with it."""
    demand(isinstance(entry, dict), f"it's a {type(entry).__name__}, not an object")
    kinds = [kind for kind, keys in KINDS.items() if set(keys) & set(entry)]
    needed = 'it needs "text", or "messages", or "prompt" and "completion"'
    demand(len(kinds) == 1 and set(KINDS[kinds[0]]) <= set(entry), f"it has {sorted(entry)}; {needed}")
    odd = [key for key in ("image", "images", "audio", "audios", "video", "videos") if entry.get(key)]
    demand(not odd, f"it has {odd}, but only text can be learned here")
    check_weight(entry, "entry")
    kind, values = kinds[0], [entry[key] for key in KINDS[kinds[0]]]
    types = {type(value) for value in values}
    wanted = {"text": [{str}], "messages": [{list}], "prompt": [{str}, {list}]}[kind]
    demand(types in wanted, f"{KINDS[kind]} can't be {sorted(one.__name__ for one in types)}")
    if types == {list}:
        num_given = len(values[0]) if kind == "prompt" else 0
        document = document_of_messages(sum(values, []), num_given, entry, tokenizer)
    else:
        text, given = "".join(values), values[0] if kind == "prompt" else ""
        document = Document(kind, text, [(len(given), len(text))] if text[len(given) :].strip() else [])
    document.text.encode()  # half a surrogate pair can't be tokenized
    if entry.get("weight") == 0:
        document.learned = []
    return document


def check_weight(given: dict, place: str) -> None:
    demand(given.get("weight", 1) in (0, 1), f"the weight of the {place} is {given.get('weight')!r}, not 0 or 1")


def document_of_messages(messages: list, num_given: int, entry: dict, tokenizer) -> Document:
    """Render a conversation once, and find the characters that are the assistant's, after the first `num_given`.

    Some templates rewrite earlier messages (to drop their reasoning). We don't train on those; we only count them.
    """
    check_messages(messages)
    tools = entry.get("tools") or None
    demand(tools is None or isinstance(tools, list), f'"tools" is {type(tools).__name__}, not a list')
    demand(bool(tokenizer.chat_template), "messages need a chat template, which the tokenizer doesn't have")
    options = {"tokenize": False, "tools": tools} | (entry.get("chat_template_kwargs") or {})
    render = partial(tokenizer.apply_chat_template, **options)
    shown = [{key: value for key, value in message.items() if key != "weight"} for message in messages]
    full = render(shown)
    demand(not tools or full != render(shown, tools=None), 'it has "tools", which the chat template ignores')
    plain = [{key: value for key, value in message.items() if key != "tool_calls"} for message in shown]
    demand(plain == shown or full != render(plain), 'it has "tool_calls", which the chat template ignores')
    learned = [index for index in range(num_given, len(messages)) if is_learned(messages[index])]
    document = Document("messages", full, [], has_end=len(messages) - 1 in learned)
    done = 0
    for index in learned:
        before, after = render(shown[:index], add_generation_prompt=True), render(shown[: index + 1])
        if full.startswith(before) and full.startswith(after) and done <= len(before) <= len(after):
            document.learned.append((len(before), len(after)))
            done = len(after)
        else:
            document.num_rewritten += 1
    return document


def is_learned(message: dict) -> bool:
    return message["role"] == "assistant" and message.get("weight", 1) == 1


def check_messages(messages: list) -> None:
    for number, message in enumerate(messages, start=1):
        demand(isinstance(message, dict), f"message {number} is a {type(message).__name__}, not an object")
        demand(isinstance(message.get("role"), str), f'message {number} has no "role"')
        content = message.get("content")
        is_text = isinstance(content, (str, list)) or (content is None and bool(message.get("tool_calls")))
        demand(is_text, f'the "content" of message {number} is {type(content).__name__}, not a string')
        check_weight(message, f"message {number}")
        is_marked = message["role"] != "assistant" and message.get("weight", 0) == 1
        demand(not is_marked, f"message {number} has a weight of 1, but isn't the assistant's")
    roles = [message["role"] for message in messages if message["role"] not in ("system", "developer")]
    demand("assistant" in roles, "the conversation has no message of the assistant")
    demand(roles[0] != "assistant", "the conversation begins with the assistant, so its answer has no question")


# ---------------------------------------------------------------- tokens


class Bytes:
    """The tokenizer for a model that comes without one and whose 256 tokens are bytes. A zero ends a document."""

    bos_token_id, eos_token_id, chat_template, is_fast = None, 0, None, True

    def __call__(self, texts: list[str] | str, **_) -> argparse.Namespace:
        starts = [[(index, index + 1) for index, one in enumerate(text) for _ in one.encode()] for text in texts]
        return argparse.Namespace(input_ids=[list(text.encode()) for text in texts], offset_mapping=starts)


def read_tokenizer(folder: Path) -> tuple:
    """Return the folder's tokenizer, whose `eos_token_id` ends a document, and how many rows the embedding has."""
    import transformers  # takes seconds

    vocabulary = transformers.AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config().vocab_size
    if not any(folder.glob("tokenizer*")) and not (folder / "vocab.json").exists():
        if vocabulary != 256:
            raise BadData(f"{folder} has no tokenizer, and a vocabulary of {vocabulary} can't be bytes; copy one there")
        return Bytes(), vocabulary
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if tokenizer.eos_token_id is None:
        raise BadData(f"{folder}: the tokenizer has no end-of-text token; name an eos_token in tokenizer_config.json")
    return tokenizer, vocabulary


@dataclass
class Found:
    """What a batch of entries, or all of them, come to: pieces of documents, of at most length + 1 tokens."""

    tokens: array = field(default_factory=partial(array, "i"))
    learned: bytearray = field(default_factory=bytearray)  # 1 for each token that counts in the loss
    sizes: array = field(default_factory=partial(array, "i"))
    firsts: bytearray = field(default_factory=bytearray)  # 1 for each piece that begins a document
    counts: Counter = field(default_factory=Counter)
    bad: list[tuple[int, str]] = field(default_factory=list)
    largest: int = -1  # token

    def include(self, other: "Found") -> None:
        """Add all but the tokens, of which only the numbers are kept."""
        self.sizes += other.sizes
        self.firsts += other.firsts
        self.bad += other.bad
        self.counts.update(other.counts, tokens=len(other.tokens), learned=sum(other.learned))
        self.largest = max(self.largest, other.largest)

    def told(self, data: Path, length: int) -> str:
        count = self.counts
        said = [
            f"{count['documents']:,} documents, {count['tokens']:,} tokens, {count['learned']:,} of them trained on"
        ]
        if self.bad:
            number, what = self.bad[0]
            said.append(f"{len(self.bad):,} bad entries are left out; the first is {data}, line {number}: {what}")
        if count["empty"]:
            said.append(f"{count['empty']:,} with nothing to train on are left out")
        if count["split"] or count["cut"]:
            both = f"{count['split']:,} texts are split and {count['cut']:,} conversations are cut"
            said.append(f"longer than {length:,} tokens: {both}")
        if count["rewritten"]:
            turns = f"{count['rewritten']:,} of the assistant's earlier turns"
            said.append(f"the chat template rewrites {turns}; we don't train on these")
        return "\n".join(said)


def tokenize(entries: list[tuple[int, bytes]], tokenizer, is_json: bool, length: int) -> Found:
    found, documents = Found(), []
    for number, data in entries:
        try:
            text = decoded(data)
            entry = json.loads(text) if is_json else {"text": text.replace("\r\n", "\n").rstrip("\n")}
            documents.append(document_of(entry, tokenizer))
        except Exception as error:  # a chat template can raise any exception
            is_syntax = isinstance(error, json.JSONDecodeError)
            said = f"it isn't JSON: {error.msg}" if is_syntax else " ".join(str(error).split())
            if place := re.match(r"line (\d+): ", said):  # within the entry
                number, said = number + int(place[1]) - 1, said[place.end() :]
            found.bad.append((number, said or type(error).__name__))
    for document, tokens, learned in encode(documents, tokenizer):
        found.counts["documents"] += 1
        found.counts["rewritten"] += document.num_rewritten
        firsts = range(0, max(1, len(tokens) - 1), length)  # n + 1 tokens make n pairs of a token and the next one
        found.counts["split" if document.kind == "text" else "cut"] += len(firsts) > 1
        is_first = True
        for first in firsts if document.kind == "text" else [0]:
            piece = slice(first, first + length + 1)
            if document.learned and any(learned[piece][1:]):
                found.tokens.extend(tokens[piece])
                found.learned += learned[piece]
                found.sizes.append(len(tokens[piece]))
                found.firsts.append(is_first)
                is_first = False
            else:
                found.counts["empty"] += 1
    found.largest = max(found.tokens, default=-1)
    return found


def encode(documents: list[Document], tokenizer) -> Iterator[tuple[Document, list[int], bytearray]]:
    """Yield each document with its tokens and, for each token, 1 if it starts in a part that is learned, or 0."""
    if not documents:
        return
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    is_begun = begin is not None and begin in tokenizer([""]).input_ids[0]
    has_parts = any(document.kind != "text" for document in documents)
    if has_parts and not tokenizer.is_fast:
        raise BadData(f"{type(tokenizer).__name__} gives no offsets, which chats and prompts need")
    texts = [document.text for document in documents]
    found = tokenizer(texts, add_special_tokens=False, **({"return_offsets_mapping": True} if has_parts else {}))
    for index, (document, tokens) in enumerate(zip(documents, found.input_ids, strict=True)):
        learned = bytearray(b"\1") * len(tokens)
        if document.kind != "text":
            mask = bytearray(len(document.text) + 1)
            for first, last in document.learned:
                mask[first:last] = b"\1" * (last - first)
            learned = bytearray(mask[start] for start, _ in found.offset_mapping[index])
        is_chat = document.kind == "messages"  # chat templates have a begin token themselves, and often an end token
        if is_begun and not is_chat:
            tokens, learned = [begin, *tokens], b"\0" + learned
        has_own = is_chat and any(token == end and own for token, own in zip(tokens, learned, strict=True))
        if document.has_end and not has_own:
            tokens, learned = [*tokens, end], learned + b"\1"
        yield document, tokens, learned


# ---------------------------------------------------------------- the folder

SETUP = {}  # of a worker


def begin_worker(model: Path, setup: dict) -> None:
    end_with_parent()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there's a worker for each core
    SETUP.update(setup, tokenizer=read_tokenizer(model)[0])


def work(entries: list[tuple[int, bytes]]) -> Found:
    return tokenize(entries, **SETUP)


def results_of(batches: Iterator[list], model: Path, setup: dict, workers: int) -> Iterator[Found]:
    """Tokenize each batch, in order. No more than a few batches for each worker are in memory."""
    if workers == 1:
        tokenizer, _ = read_tokenizer(model)
        yield from (tokenize(batch, tokenizer, **setup) for batch in batches)
        return
    with ProcessPoolExecutor(workers, initializer=begin_worker, initargs=(model, setup)) as pool:
        waiting = deque()
        for batch in batches:
            waiting.append(pool.submit(work, batch))
            if len(waiting) > 3 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def batches_of(entries: Iterator[tuple[int, bytes]]) -> Iterator[list[tuple[int, bytes]]]:
    batch, size = [], 0
    for entry in entries:
        batch.append(entry)
        size += len(entry[1])
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    yield batch


def identity_of(model: Path, data: Path | None, **settings) -> dict:
    """Return what the tokens depend on: the settings, and digests of the data and of the tokenizer's files."""
    paths = sorted(path for path in model.iterdir() if path.is_file() and path.name.startswith(TOKENS_BY))
    for name, files in {"tokenizer": paths, "data": [data] if data else []}.items():
        digest = hashlib.sha256()
        for path in files:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        settings |= {name: digest.hexdigest()} if files else {}
    return settings


def prepare(model: Path, data: Path, folder: Path, *, length: int, skip_bad: bool = False, workers: int = 1) -> None:
    """Write the folder, unless it has these tokens already. Raise `BadData` if the data can't be learned.

    tokens.bin has int32, learned.bin a byte per token, ends.bin int64 (where each piece ends), and firsts.bin a byte
    per piece (whether it begins a document).
    """
    identity, record = identity_of(model, data, length=length, skip_bad=skip_bad), folder / "prepared.json"
    if record.exists() and json.loads(record.read_text()) == identity:
        return
    (_, vocabulary), total = read_tokenizer(model), Found()
    setup = {"is_json": data.suffix in (".json", ".jsonl"), "length": length}
    unfinished = folder.with_name(f"unfinished-{folder.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    with (unfinished / "tokens.bin").open("wb") as tokens, (unfinished / "learned.bin").open("wb") as learned:
        try:
            for found in results_of(batches_of(read_entries(data)), model, setup, workers):
                total.include(found)
                if total.bad and not skip_bad:
                    raise BadData("line {}: {}".format(*total.bad[0]))
                found.tokens.tofile(tokens)
                learned.write(found.learned)
        except BadData as error:
            raise BadData(f"{data}, {error}") from None
    print(total.told(data, length), flush=True)
    if not total.sizes:
        raise BadData(f"{data} has nothing to train on")
    if total.largest >= vocabulary:
        raise BadData(f"{model}: the tokenizer has tokens up to {total.largest}; the embedding has {vocabulary} rows")
    (unfinished / "ends.bin").write_bytes(array("q", accumulate(total.sizes)))
    (unfinished / "firsts.bin").write_bytes(total.firsts)
    (unfinished / "prepared.json").write_text(json.dumps(identity, indent=1))
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)


def check_prepared(model: Path, folder: Path, length: int) -> None:
    """Raise `BadData` unless the folder has been written with this tokenizer and length."""
    if not (folder / "prepared.json").exists():
        raise BadData(f"{folder} has no prepared.json; write it with prepare_text.py")
    record, wanted = json.loads((folder / "prepared.json").read_text()), identity_of(model, None, length=length)
    for name, value in wanted.items():
        if record[name] != value:
            raise BadData(f"{folder} has been prepared with another {name}; run prepare_text.py again")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a folder with config.json and a tokenizer")
    parser.add_argument("data", type=Path, help="a text file, JSON lines or a JSON array")
    parser.add_argument("folder", type=Path, help="where the tokens go")
    parser.add_argument("--length", type=int, default=4096, help="that of finetune_hf.py (4096)")
    parser.add_argument("--skip-bad-lines", dest="skip_bad", action="store_true", help="count bad entries, and go on")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes (one for each core)")
    try:
        prepare(**vars(parser.parse_args()))
    except (BadData, OSError) as error:
        print(f"prepare_text.py: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    end_with_parent()
    main()
