"""Fine-tune any causal language model in `transformers` with FSDP2. This script needs torch and transformers.

Run it with `torchrun --nproc-per-node 8 finetune_hf.py MODEL DATA --out RUN`. It uses GPUs if every host has one for
each of its ranks, or the CPU if no host has any. A loss or gradient that isn't finite ends the run, and harms nothing.

MODEL is a folder with config.json, safetensors files and a tokenizer; `AutoModelForCausalLM` builds the model. (If it
has no tokenizer and a vocabulary of 256, tokens are bytes.) Mixtures of experts, encoders, and models whose loss in
chunks isn't that of their own logits are refused. DATA is a text file with blank lines between documents, or JSON lines
(`.jsonl`): {"text": ...}, {"prompt": ..., "completion": ...} or {"messages": [...]}, with "tools" if the template knows
them. The loss covers texts, completions, and the assistant's turns, except those with "weight": 0. Texts longer than
--length are split, and longer conversations are cut off. As many documents as fit are packed into a row, unless the
model's attention would mix them. Checkpoints and log.jsonl go in RUN, and so does the finished model (or the adapter),
in its own folder.

Run the same command again to continue from the newest checkpoint, on any number of ranks. Between two runs, you may
change --lr, --warmup, --steps, --epochs, and anything that doesn't affect the result. A different --batch, --length,
--seed, --held-out, data or kind of training is refused; use a new RUN for those.
"""

import argparse
import bisect
import ctypes
import fcntl
import hashlib
import inspect
import json
import math
import os
import re
import resource
import shutil
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TextIO


def end_with_torchrun() -> None:
    """Have Linux kill this rank if torchrun is killed; otherwise it would still be training during the next run."""
    if sys.platform == "linux":
        torchrun = os.getppid()
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG
        if os.getppid() != torchrun:
            sys.exit("torchrun was killed")  # it died before the call above


if __name__ == "__main__":
    end_with_torchrun()  # before the imports, which take seconds

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files_on_every_rank
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

try:
    import transformers
except ImportError:
    sys.exit("finetune_hf.py needs transformers: pip install transformers")

IGNORED = -100  # the target of a token that has no loss, such as padding or part of the prompt
CHUNK = 1024  # number of tokens whose logits exist at the same time
MAX_NORM = 1.0  # the largest gradient norm; larger gradients are scaled down to it
SCALE = 2.0  # an adapter's output is multiplied by this
FILE_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
DIGEST = "digest"
SAMPLES, SAMPLE_BYTES = 64, 65_536  # of each file of weights
TOKENS = "tokens.safetensors"
# FIXED settings can't change when a run resumes; OBEYED ones can. The others don't affect the result.
FIXED = ("batch", "length", "seed", "held_out", "lora_rank", "packed", DIGEST)
OBEYED = ("lr", "warmup", "steps", "decay")
TOKENS_BY = ("config", "token", "vocab", "merges", "chat", "special", "added", "spiece")  # files that affect the tokens
WEIGHTS = (".safetensors", ".bin", ".index.json", ".pt", ".pth", ".gguf", ".h5", ".msgpack")


def refuse(message: str, status: int = 2) -> None:
    """End the run because of a problem that all ranks of a machine find. The first of them prints one line.

    torchrun then stops the other ranks. It isn't left to rank 0, because a file may be missing on another machine only.
    """
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"finetune_hf.py: {message}", file=sys.stderr, flush=True)
    else:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(60)
    sys.exit(status)


def end_together(message: str, status: int) -> None:
    """End the run for a reason that all ranks have; rank 0 prints one line before torchrun can stop it."""
    if dist.get_rank() == 0:
        print(f"finetune_hf.py: {message}", file=sys.stderr, flush=True)
    dist.barrier()
    os._exit(status)  # a leftover gloo thread can abort Python's cleanup, and then the status is another one


def from_rank_0(find: Callable):
    """Return what `find` returns on rank 0: hosts may see a shared folder as it was up to a minute ago."""
    found = [find() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    return found[0]


# ---------------------------------------------------------------- settings


def read_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", type=Path, help="a folder with config.json, safetensors files and a tokenizer")
    add("data", type=Path, help="a text file, or JSON lines")
    add("--out", type=Path, required=True, metavar="RUN", help="this run's folder")
    add("--epochs", type=float, default=1.0, help="how many times each row is seen (1)")
    add("--steps", type=int, help="number of optimizer steps, instead of --epochs")
    add("--batch", type=int, default=64, help="rows of --length tokens per step, across all ranks (64)")
    add(
        "--micro-batch",
        type=int,
        default=1,
        help="rows that a rank processes at a time (1); flash attention needs 1 for packed rows",
    )
    add("--length", type=int, help="tokens in a row (4096, or the model's context if that's shorter)")
    add("--lr", type=float, help="the peak learning rate (1e-5; 2e-4 for adapters)")
    add("--warmup", type=int, default=20, help="steps over which the learning rate rises (20)")
    add("--decay", type=float, default=0.0, help="weight decay for matrices; norms and biases have none (0)")
    add(
        "--save-every",
        type=read_interval,
        default="20m",
        metavar="N|Nm",
        help="number of steps between saves, or of minutes if it ends in m (20m); the first save is after step 1",
    )
    add("--keep", type=int, default=2, help="how many checkpoints to keep (2)")
    add("--held-out", type=float, default=0.02, help="fraction of the documents to hold out for testing (0.02)")
    add("--test-every", type=int, default=100, help="measure the held-out loss every N steps (100)")
    add("--lora-rank", type=int, default=0, metavar="R", help="freeze the model and train adapters of rank R")
    add("--attention", help="sdpa, eager, flash_attention_2 ... (sdpa, or eager if the model lacks sdpa)")
    add("--compile", action="store_true", help="compile each layer with torch.compile")
    add("--offload", action="store_true", help="keep the shards and the optimizer state in host memory")
    add("--unit", metavar="CLASS", help="the class of the modules that become units (the model's decoder layers)")
    add("--seed", type=int, default=0)
    add(
        "--device",
        choices=("auto", "cuda", "cpu"),
        default="auto",
        help="cuda refuses the CPU; cpu ignores GPUs (auto)",
    )
    arguments = parser.parse_args(words)
    for name in ("batch", "micro_batch", "length", "keep", "test_every", "steps", "epochs"):
        value = getattr(arguments, name)
        if value is not None and value <= 0:
            parser.error(f"--{name.replace('_', '-')} is {value}, but it has to be greater than 0")
    if not 0 <= arguments.held_out < 1:
        parser.error(f"--held-out is {arguments.held_out}, but it has to be a fraction, at least 0 and less than 1")
    if arguments.lora_rank < 0 or arguments.warmup < 0:
        parser.error("--lora-rank and --warmup can't be negative")
    if arguments.lr is None:
        arguments.lr = 2e-4 if arguments.lora_rank else 1e-5
    return arguments


def read_interval(text: str) -> tuple[int | None, float | None]:
    """Return the interval between saves as (steps, None) or as (None, seconds)."""
    if not (found := re.fullmatch(r"(\d+)(m?)", text)) or int(found[1]) == 0:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a number of steps, such as 500, nor a number of minutes, such as 20m"
        )
    return (None, 60.0 * int(found[1])) if found[2] else (int(found[1]), None)


def check_resumed(arguments: argparse.Namespace) -> None:
    """Compare the settings with those of the run so far. Print changes that are allowed, and refuse any others."""
    run = arguments.out
    path = run / "settings.json"
    settings = {name: getattr(arguments, name) for name in (*FIXED, *OBEYED)}
    before = from_rank_0(lambda: json.loads(path.read_text()) if path.exists() and newest_checkpoint(run) else {})
    if before:
        changed = {name: (before[name], value) for name, value in settings.items() if before.get(name) != value}
        for name in FIXED:
            if name == DIGEST and name in changed:
                refuse(f"{run} was started with a different model, tokenizer or data; use a new --out for those")
            if name in changed:
                old, new = changed[name]
                cause = " (because of --attention or --micro-batch)" if name == "packed" else ""
                refuse(f"{run} was started with {name} {old}, not {new}{cause}; keep {old}, or use a new --out")
        for name in OBEYED:
            if name in changed:
                old, new = changed[name]
                say(f"{name} was {old} until now, and is {new} from here on")
    if dist.get_rank() == 0:
        write_whole(path, json.dumps(settings, indent=1))


def write_whole(path: Path, text: str) -> None:
    """Write a file under a temporary name, then rename it once it's completely on disk."""
    unfinished = path.with_name(f"unfinished-{path.name}")
    with unfinished.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(path)


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


# ---------------------------------------------------------------- documents and tokens


class Bytes:
    """The tokenizer for a model that comes without one and whose 256 tokens are bytes. A zero ends a document."""

    bos_token_id = None
    eos_token_id = 0
    chat_template = None

    def __call__(self, text: str, add_special_tokens: bool = True) -> argparse.Namespace:
        return argparse.Namespace(input_ids=list(text.encode()))


def read_tokenizer(folder: Path, vocabulary: int):
    """Return the folder's tokenizer; its `eos_token_id` ends a document."""
    if not any(folder.glob("tokenizer*")) and not (folder / "vocab.json").exists():
        if vocabulary != 256:
            refuse(
                f"{folder} has no tokenizer, and a vocabulary of {vocabulary} can't be bytes; copy a tokenizer there"
            )
        return Bytes()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if tokenizer.eos_token_id is None:
        refuse(f"the tokenizer of {folder} has no end-of-text token; name one as eos_token in tokenizer_config.json")
    return tokenizer


@dataclass(frozen=True)
class Document:
    """A document as a list of segments, each with a flag for whether its tokens count in the loss."""

    kind: str  # text, prompt or messages
    segments: list[tuple[str, bool]]
    num_rewritten: int = 0  # how many of the assistant's turns the chat template rewrites later


def read_documents(path: Path, tokenizer) -> Iterator[Document]:
    if path.suffix not in (".json", ".jsonl"):
        for text in re.split(r"\n\s*\n", path.read_text(encoding="utf-8-sig")):  # a blank line may hold spaces
            yield Document("text", [(text, True)])
        return
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    yield document_of(json.loads(line), tokenizer)
                except Exception as error:  # a chat template can raise any exception
                    refuse(f"{path}, line {number}: {error}")


def document_of(entry: dict, tokenizer) -> Document:
    """Raise ValueError for an entry that isn't as the module's docstring says."""
    if not isinstance(entry, dict):
        raise ValueError(f"it's a {type(entry).__name__}; each line must be an object")
    if "messages" in entry:
        return document_of_messages(entry["messages"], entry.get("tools"), tokenizer)
    if "completion" in entry:
        prompt, completion = entry.get("prompt"), entry["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            return Document("prompt", [(prompt, False), (completion, True)])
        if isinstance(prompt, list) and isinstance(completion, list):
            messages = [*({**message, "weight": 0} for message in prompt), *completion]
            return document_of_messages(messages, entry.get("tools"), tokenizer)
        raise ValueError('"prompt" and "completion" have to be two texts, or two lists of messages')
    if "text" in entry:
        if not isinstance(entry["text"], str):
            raise ValueError(f'"text" is {entry["text"]!r}, which isn\'t a text')
        return Document("text", [(entry["text"], True)])
    raise ValueError(f'it has {sorted(entry)}, but neither "text" nor "messages" nor "prompt" and "completion"')


def document_of_messages(messages: list[dict], tools: list | None, tokenizer) -> Document:
    """Split a rendered conversation where the assistant's turns begin and end, so that we train only on those turns.

    A turn whose `weight` is 0 isn't trained on.
    Some templates rewrite earlier turns (to drop their reasoning). We don't train on those turns; we only count them.
    """
    if not tokenizer.chat_template:
        raise ValueError('"messages" need a chat template, but the tokenizer has none; use "prompt" and "completion"')
    if odd := [message["weight"] for message in messages if message.get("weight", 1) not in (None, 0, 1)]:
        raise ValueError(f"a message has the weight {odd[0]}; this script knows 0 (not trained on) and 1")
    render = partial(tokenizer.apply_chat_template, tools=tools, tokenize=False)
    full = render(messages)
    segments, done, num_rewritten = [], 0, 0
    for index, message in enumerate(messages):
        if message["role"] != "assistant" or message.get("weight") == 0:
            continue
        before = render(messages[:index], add_generation_prompt=True)
        after = render(messages[: index + 1])
        if full.startswith(before) and full.startswith(after) and done <= len(before) <= len(after):
            segments += [(full[done : len(before)], False), (full[len(before) : len(after)], True)]
            done = len(after)
        else:
            num_rewritten += 1
    return Document("messages", [*segments, (full[done:], False)], num_rewritten)


def encode(document: Document, tokenizer) -> tuple[list[int], list[bool]]:
    """Return a document's tokens and, for each token, whether it counts in the loss.

    We encode each segment separately, as at inference time, when the prompt is encoded before there's an answer.
    """
    if not any(text for text, is_learned in document.segments if is_learned):
        return [], []
    is_chat = document.kind == "messages"
    tokens, learned = [], []
    if not is_chat and tokenizer.bos_token_id in tokenizer("").input_ids:  # chat templates add this token themselves
        tokens, learned = [tokenizer.bos_token_id], [False]
    for text, is_learned in document.segments:
        found = tokenizer(text, add_special_tokens=False).input_ids if text else []
        tokens += found
        learned += [is_learned] * len(found)
    end = tokenizer.eos_token_id
    has_end = is_chat and any(token == end and own for token, own in zip(tokens, learned, strict=True))
    is_unanswered = is_chat and learned[-1:] == [False]
    if not has_end and not is_unanswered:  # an answer in a chat may already have one
        tokens.append(end)
        learned.append(True)
    return tokens, learned


def tokenize_once(arguments: argparse.Namespace, tokenizer, vocabulary: int) -> None:
    """Write the documents' tokens to a file, unless it exists. Only rank 0 calls this; every rank reads the file."""
    path = arguments.out / TOKENS
    if path.exists():
        with safe_open(path, "pt") as file:
            if file.metadata()[DIGEST] == arguments.digest:
                return
    tokens, learned, ends, counts = tokenize(arguments, tokenizer)
    print(f"{counts['documents']:,} documents, {len(tokens):,} tokens, {sum(learned):,} of them trained on", flush=True)
    if counts["empty"]:
        print(f"{counts['empty']:,} with nothing to train on are left out", flush=True)
    if counts["split"] or counts["cut"]:
        both = f"{counts['split']:,} texts are split and {counts['cut']:,} conversations are cut"
        print(f"longer than {arguments.length:,} tokens: {both}", flush=True)
    if counts["rewritten"]:
        turns = f"{counts['rewritten']:,} of the assistant's earlier turns"
        print(f"the chat template rewrites {turns}; we don't train on these", flush=True)
    if not tokens:
        refuse(f"{arguments.data} has nothing to train on")
    if max(tokens) >= vocabulary:
        refuse(
            f"the tokenizer of {arguments.model} has tokens up to {max(tokens)}; the embedding has {vocabulary} rows"
        )
    content = {"tokens": torch.tensor(tokens, dtype=torch.int32), "learned": torch.tensor(learned)}
    unfinished = path.with_name(f"unfinished-{path.name}")
    save_file(content | {"ends": torch.tensor(ends)}, unfinished, metadata={DIGEST: arguments.digest})
    unfinished.rename(path)


def tokenize(arguments: argparse.Namespace, tokenizer) -> tuple[list[int], list[bool], list[int], Counter]:
    """Return all tokens, whether each token counts in the loss, where each document ends, and numbers to print."""
    tokens, learned, ends = [], [], [0]
    counts = Counter()
    for document in read_documents(arguments.data, tokenizer):
        found, own = encode(document, tokenizer)
        firsts = range(0, max(1, len(found) - 1), arguments.length)  # n + 1 tokens make n pairs of token and next token
        is_text = document.kind == "text"
        counts["documents"] += 1
        counts["rewritten"] += document.num_rewritten
        counts["split" if is_text else "cut"] += len(firsts) > 1
        for first in firsts if is_text else [0]:
            piece = slice(first, first + arguments.length + 1)
            if any(own[piece][1:]):
                tokens += found[piece]
                learned += own[piece]
                ends.append(len(tokens))
            else:
                counts["empty"] += 1
    return tokens, learned, ends, counts


def digest_of(arguments: argparse.Namespace) -> str:
    """Return a 16-digit digest of the model, tokenizer and data; for adapters, also of a sample of the model's weights.

    A checkpoint of adapters fits only the weights that they were trained on; other checkpoints have all weights.
    """
    paths = [path for path in side_files(arguments.model) if path.name.startswith(TOKENS_BY)]
    found = hashlib.sha256(f"{arguments.length}".encode())
    for path in [*paths, arguments.data]:
        with path.open("rb") as file:
            found.update(hashlib.file_digest(file, "sha256").digest())
    for path in sorted(arguments.model.glob("*.safetensors")) if arguments.lora_rank else ():
        size = path.stat().st_size
        found.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for part in range(SAMPLES):
                file.seek(size * part // SAMPLES)
                found.update(file.read(SAMPLE_BYTES))
    return found.hexdigest()[:16]


# ---------------------------------------------------------------- rows and batches


def pack(sizes: list[int], length: int) -> list[list[int]]:
    """Pack documents into rows of at most `length` tokens: the longest first, each into the row where it fits best."""
    rows, room = [], []  # room: for each row that isn't full, (tokens of free space, row), sorted
    for document in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        at = bisect.bisect_left(room, (sizes[document], 0))
        left, row = room.pop(at) if at < len(room) else (length, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(document)
        if left > sizes[document]:
            bisect.insort(room, (left - sizes[document], row))
    return rows


class Rows:
    """The documents in the token file, arranged in rows: some for training, some held out."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.file = safe_open(arguments.out / TOKENS, "pt")
        self.ends = self.file.get_tensor("ends").tolist()
        self.seed = arguments.seed
        num_documents = len(self.ends) - 1
        order = torch.randperm(num_documents, generator=torch.Generator().manual_seed(self.seed)).tolist()
        num_held_out = min(math.ceil(arguments.held_out * num_documents), num_documents - 1)
        self.held_out = self.in_rows(sorted(order[:num_held_out]), arguments)
        self.learned = self.in_rows(sorted(order[num_held_out:]), arguments)

    def in_rows(self, documents: list[int], arguments: argparse.Namespace) -> list[list[int]]:
        sizes = [self.ends[document + 1] - self.ends[document] - 1 for document in documents]
        rows = pack(sizes, arguments.length) if arguments.packed else [[index] for index in range(len(sizes))]
        return [[documents[index] for index in row] for row in rows]

    def of_step(self, step: int, batch: int) -> list[list[int]]:
        """Return the rows in a step's global batch. Each epoch contains every row once, in a new order."""
        rows = []
        for index in range(step * batch, (step + 1) * batch):
            epoch, place = divmod(index, len(self.learned))
            if not rows or place == 0:
                order = torch.randperm(
                    len(self.learned), generator=torch.Generator().manual_seed(self.seed + 1 + epoch)
                )
            rows.append(self.learned[order[place]])
        return rows

    def read(self, row: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return a row's tokens, each token's position in its document, and the targets, all of shape (length,)."""
        tokens, positions, targets = [], [], []
        for document in row:
            first, last = self.ends[document], self.ends[document + 1]
            own = self.file.get_slice("tokens")[first:last].long()
            learned = self.file.get_slice("learned")[first:last]
            tokens.append(own[:-1])
            positions.append(torch.arange(last - first - 1))
            targets.append(own[1:].where(learned[1:], IGNORED))
        return torch.cat(tokens), torch.cat(positions), torch.cat(targets)

    def num_tokens(self, row: list[int]) -> int:
        return sum(self.ends[document + 1] - self.ends[document] - 1 for document in row)

    def num_learned(self, rows: list[list[int]]) -> int:
        learned = self.file.get_slice("learned")
        documents = [document for row in rows for document in row]
        return sum(learned[self.ends[one] + 1 : self.ends[one + 1]].sum().item() for one in documents)

    def micro_batches(self, rows: list[list[int]], size: int, device: torch.device) -> Iterator[tuple[Tensor, ...]]:
        """Yield this rank's rows, `size` at a time: tokens, positions and targets, each of shape (rows, longest).

        Every rank gets the same number of micro-batches, because each one runs collectives. A rank without a row
        gets an empty micro-batch without a loss.
        """
        rank, world_size = dist.get_rank(), dist.get_world_size()
        own = rows[rank::world_size]
        for first in range(0, math.ceil(len(rows) / world_size), size):
            found = [self.read(row) for row in own[first : first + size]]
            found = found or [(torch.zeros(1, dtype=torch.long),) * 2 + (torch.full((1,), IGNORED),)]
            tokens, positions, targets = zip(*found, strict=True)
            yield tuple(
                nn.utils.rnn.pad_sequence(one, batch_first=True, padding_value=filler).to(device)
                for one, filler in ((tokens, 0), (positions, 0), (targets, IGNORED))
            )


# ---------------------------------------------------------------- the model


class TokenLoss(nn.Module):
    """A language model whose `forward` returns the sum of its tokens' losses, computing logits in chunks."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, positions: Tensor | None = None, targets: Tensor | None = None) -> Tensor:
        """Return the summed loss or, without targets, the last hidden states; without positions, the model's logits.

        All inputs have shape (rows, length). A position of 0 begins a new document.
        """
        if positions is None:
            return self.model(input_ids=tokens, use_cache=False).logits
        decoder = self.model.get_decoder()
        places = {"position_ids": positions} if takes_positions(decoder) else {}
        output = decoder(input_ids=tokens, use_cache=False, **places)
        hidden = output.last_hidden_state
        if targets is None:
            return hidden
        total = torch.zeros((), device=hidden.device)
        chunks = zip(hidden.flatten(0, 1).split(CHUNK), targets.flatten().split(CHUNK), strict=True)
        for part, wanted in chunks:
            total = total + checkpoint(self.loss_of, type(output), part, wanted, use_reentrant=False)
        return total

    def loss_of(self, output: type, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the summed loss of a chunk: hidden states (tokens, width), and targets (tokens,).

        The model's `forward` computes logits, since some models scale or cap them.
        """
        decoder = self.model.get_decoder()
        decoder.forward = lambda *_, **__: output(last_hidden_state=hidden[None])
        try:
            logits = self.model(inputs_embeds=hidden[None], use_cache=False).logits[0]
        finally:
            del decoder.forward
        return F.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="sum")


def takes_positions(decoder: nn.Module) -> bool:
    return "position_ids" in inspect.signature(decoder.forward).parameters


def read_config(folder: Path) -> transformers.PretrainedConfig:
    if not (folder / "config.json").exists():
        refuse(f"{folder} has no config.json; give the folder of a model in Hugging Face format")
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except ValueError as error:  # a model that this version doesn't know, or whose code is in its own folder
        refuse(f"{folder}: {first_line(error)}")
    if any((getattr(config, name, None) or 0) > 1 for name in EXPERTS):
        refuse(f"{folder} is a mixture of experts, whose routers need an extra loss that this script doesn't have")
    if type(config) not in transformers.AutoModelForCausalLM._model_mapping:
        refuse(f"{folder}: AutoModelForCausalLM doesn't support the model type {config.model_type}")
    if not any(folder.glob("*.safetensors")):
        refuse(f"{folder} has no safetensors files")
    return config


@dataclass(frozen=True, kw_only=True)
class FileTensor:
    """A tensor in one of the model's files."""

    file: int  # the file's number, counted from 1
    name: str  # the file's name
    dtype: torch.dtype
    shape: tuple[int, ...]


def tensors_in_files(folder: Path) -> dict[str, FileTensor]:
    """Return each tensor's file, dtype and shape, for the files in the folder's index or, without one, for all.

    A tensor mustn't be in two files, listed or not: torch reads every file in the folder, and the last one would win.
    """
    index = folder / "model.safetensors.index.json"
    names = {path.name for path in folder.glob("*.safetensors")}
    listed = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else names
    found = {}
    for number, name in enumerate([*sorted(listed), *sorted(names - listed)], start=1):
        with safe_open(folder / name, "pt") as file:
            for key in file.keys():
                if key in found:
                    refuse(f"{folder}: {key} is in {name} and in another file; move the wrong one out of the folder")
                if name not in listed:
                    continue
                tensor = file.get_slice(key)
                if tensor.get_dtype() not in FILE_DTYPES:
                    refuse(f"{folder / name}: {key} is {tensor.get_dtype()}; this script can't train quantized models")
                dtype = FILE_DTYPES[tensor.get_dtype()]
                found[key] = FileTensor(file=number, name=name, dtype=dtype, shape=tuple(tensor.get_shape()))
    return found


def build(config: transformers.PretrainedConfig, arguments: argparse.Namespace) -> nn.Module:
    """Return the model on the meta device, where tensors have shapes but no memory."""
    try:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation=arguments.attention
            )
        decoder = model.get_decoder()
    except Exception as error:  # of the model's own code, or because of a wrong --attention
        refuse(f"{arguments.model}: {first_line(error)}")
    if decoder is model:
        refuse(f"{type(model).__name__} has no decoder below its head")
    if model.config.is_encoder_decoder:
        refuse(f"{type(model).__name__} needs an encoder's output, which this script doesn't have")
    return model


def match_files(model: nn.Module, folder: Path, files: dict[str, FileTensor]) -> dict[str, str]:
    """Map each name in the files to a name in the model; files have a tied weight under only one of its names."""
    names_of = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *persistent_buffers(model)]:
        names_of.setdefault(tensor, []).append(name)
    chosen = {next((name for name in names if name in files), names[0]): names[0] for names in names_of.values()}
    known = {name for names in names_of.values() for name in names}
    old = [*(model._keys_to_ignore_on_load_unexpected or []), r"rotary_emb\.inv_freq$"]  # now computed
    extra = [name for name in files if name not in known and not any(re.search(pattern, name) for pattern in old)]
    missing = [name for name in chosen if name not in files]
    if missing or extra:
        refuse(
            f"{folder} doesn't fit {type(model).__name__}: its files lack {len(missing)} tensors{first_of(missing)}, "
            f"and have {len(extra)} that the model lacks{first_of(extra)}"
        )
    for names in names_of.values():
        if len(twice := [name for name in names if name in files]) > 1 and are_different(folder, files, *twice[:2]):
            refuse(
                f"{folder}: config.json ties {' and '.join(twice)}, but they differ in the files; which one is right?"
            )
    for in_file, name in chosen.items():
        shape = tuple(model.get_parameter_or_buffer(name).shape)
        if files[in_file].shape != shape:
            refuse(f"{folder}: {in_file} is {files[in_file].shape}, but {shape} in the model built from config.json")
    return chosen


def are_different(folder: Path, files: dict[str, FileTensor], one: str, other: str) -> bool:
    """Return whether two tensors in the files differ; only the first rank of a host reads them."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return False
    with safe_open(folder / files[one].name, "pt") as first, safe_open(folder / files[other].name, "pt") as second:
        left, right = first.get_slice(one), second.get_slice(other)
        if files[one].shape != files[other].shape:
            return True
        rows = range(0, files[one].shape[0], 4096)
        return any(not torch.equal(left[row : row + 4096], right[row : row + 4096]) for row in rows)


def first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def first_of(names: list[str]) -> str:
    return f" ({', '.join(sorted(names)[:3])}{', ...' if len(names) > 3 else ''})" if names else ""


def persistent_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the buffers that a file has, of any shape."""
    kept = model.state_dict(keep_vars=True)
    return [(name, buffer) for name, buffer in model.named_buffers() if name in kept]


def find_units(model: nn.Module, class_name: str | None) -> dict[str, nn.Module]:
    """Return the modules to use as units: all of the given class, or all in the largest outermost list."""
    modules = dict(model.named_modules())
    if class_name:
        units = {name: module for name, module in modules.items() if type(module).__name__ == class_name}
        if not units:
            known = sorted({type(module).__name__ for module in modules.values()})
            refuse(f"--unit {class_name}: the model has no such class; it has {', '.join(known)}")
        return units
    lists = {name: module for name, module in modules.items() if isinstance(module, nn.ModuleList)}
    outermost = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    if not outermost:
        refuse("the model has no list of layers; give the class of its layers with --unit")
    largest = max(outermost, key=lambda name: sum(one.numel() for one in lists[name].parameters()))
    return {f"{largest}.{name}": module for name, module in lists[largest].named_children()}


def shard(loss: TokenLoss, units: dict[str, nn.Module], device: torch.device, arguments: argparse.Namespace) -> None:
    """Make each layer a unit, recomputed in backward. The embedding and the head stay in the root.

    As its own unit, the head would be all-gathered again for every chunk of the loss.
    """
    settings = {
        "mesh": dist.init_device_mesh(device.type, (dist.get_world_size(),)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=compute_dtype(device), reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy() if arguments.offload else OffloadPolicy(),
    }
    for unit in units.values():
        unit.forward = partial(checkpoint, unit.forward, use_reentrant=False)
        if arguments.compile:
            unit.forward = torch.compile(unit.forward)
        fully_shard(unit, **settings)
    fully_shard(loss, **settings)


def compute_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "cpu" else torch.bfloat16  # CPU ranks emulate bf16, slowly


def load(loss: TokenLoss, folder: Path, names: dict[str, str], device: torch.device, offload: bool) -> None:
    """Allocate the shards and fill them; each rank reads only its own rows from the files."""
    loss.to_empty(device="cpu" if offload else device)
    model = loss.model
    tensors = {in_file: model.get_parameter_or_buffer(name).detach() for in_file, name in names.items()}
    dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(str(folder)))
    for name, tensor in [*model.named_parameters(), *persistent_buffers(model)]:
        tensor._is_hf_initialized = name in names.values() or tensor.requires_grad  # adapters get their values later
    model.initialize_weights()  # transformers fills the buffers that aren't in any file, such as rotary frequencies
    for module in model.modules() if offload else ():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


@torch.no_grad()
def check_model(loss: TokenLoss, device: torch.device) -> None:
    """End the run if the loss isn't that of the model's own logits, or if an output depends on later tokens."""
    row = torch.arange(1, 9, device=device)[None] % loss.model.config.get_text_config().vocab_size
    other = torch.cat([row[:, :-1], row[:, :1]], dim=1)  # another last token
    positions = torch.arange(8, device=device)[None]
    tolerance = 1e-5 if compute_dtype(device) == torch.float32 else 1e-2
    name, problem = type(loss.model).__name__, None
    loss.eval()
    try:
        wanted = F.cross_entropy(loss(row[:, :-1])[0].float(), row[0, 1:], reduction="sum").item()
        summed = loss(row[:, :-1], positions[:, :-1], row[:, 1:]).item()
        hidden = [loss(tokens, positions)[:, :-1] for tokens in (row, other)]
        if not math.isfinite(wanted):
            problem = f"{name}: the loss of its own logits is {wanted}; look for values that aren't finite in its files"
        elif not torch.allclose(*hidden, rtol=tolerance, atol=tolerance):
            problem = f"{name} isn't causal: a token's output depends on later tokens"
        elif not math.isclose(summed, wanted, rel_tol=tolerance):
            problem = f"{name}: the loss in chunks is {summed:.6f}, but that of the model's own logits is {wanted:.6f}"
    except RuntimeError:  # of one rank, perhaps
        raise
    except Exception as error:  # of the model's own code, on all ranks
        problem = f"this script can't train {name}: {type(error).__name__}: {first_line(error)}"
    is_wrong = torch.tensor(int(problem is not None))
    dist.all_reduce(is_wrong, dist.ReduceOp.MAX)  # rounding may differ between hosts
    if is_wrong:
        end_together(problem or f"another rank finds that {name} can't be trained exactly", status=2)
    loss.train()
    loss.reshard()


def documents_are_apart(loss: TokenLoss, device: torch.device, num_rows: int) -> bool:
    """Return whether a row's second document gets the same outputs when the first one changes.

    A model without position IDs can't tell documents apart. We try `num_rows` equal rows at a time, as in training:
    with flash attention, transformers keeps documents apart only in a single row.
    """
    if not takes_positions(loss.model.get_decoder()):
        return False
    num_tokens = loss.model.config.get_text_config().vocab_size
    rows = torch.tensor([[1, 2, 3, 4, 5, 6], [7, 8, 9, 4, 5, 6]], device=device) % num_tokens
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]] * num_rows, device=device)
    loss.eval()
    with torch.no_grad():
        hidden = [loss(row.repeat(num_rows, 1), positions) for row in rows]
    loss.train()
    loss.reshard()
    answer = torch.tensor(int(torch.equal(hidden[0][:, 3:], hidden[1][:, 3:])))
    dist.all_reduce(answer, dist.ReduceOp.MIN)  # one answer for all ranks
    return bool(answer)


# ---------------------------------------------------------------- adapters


def add_adapters(model: nn.Module, units: dict[str, nn.Module], rank: int, dtype: torch.dtype) -> list[str]:
    """Freeze the model in `dtype`, and add two thin fp32 matrices to each projection in its units. Return the names.

    Hu et al. 2021, arXiv:2106.09685. SCALE * B A input is added to a projection's output. Existing tensors keep
    their names, so the model's files still fit.
    """
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(dtype)
    adapted = []
    for unit_name, unit in units.items():
        for name, module in unit.named_modules():
            if isinstance(module, (nn.Linear, transformers.pytorch_utils.Conv1D)):
                num_inputs, num_outputs = inputs_and_outputs(module)
                module.lora_A = nn.Parameter(torch.empty(rank, num_inputs, device="meta"))
                module.lora_B = nn.Parameter(torch.empty(num_outputs, rank, device="meta"))
                module.register_forward_hook(add_low_rank)
                adapted.append(f"{unit_name}.{name}")
    if not adapted:
        refuse("--lora-rank: the model's layers have no linear projections to adapt")
    return adapted


def inputs_and_outputs(projection: nn.Module) -> tuple[int, int]:
    """Return a projection's input and output widths; GPT-2's Conv1D stores its weight transposed."""
    first, second = projection.weight.shape
    return (second, first) if isinstance(projection, nn.Linear) else (first, second)


def add_low_rank(projection: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    """Add the adapter's product to the projection's output (..., out_features), as a forward hook."""
    return output + SCALE * F.linear(F.linear(inputs[0], projection.lora_A), projection.lora_B)


@torch.no_grad()
def draw_adapters(model: nn.Module, adapted: list[str], seed: int) -> None:
    """Draw each A, with the same values on any number of ranks, and zero each B, so that no output changes at first."""
    random = torch.Generator().manual_seed(seed)
    for name in adapted:
        projection = model.get_submodule(name)
        projection.lora_B.zero_()
        full = torch.empty(projection.lora_A.shape)
        nn.init.kaiming_uniform_(full, a=math.sqrt(5), generator=random)
        own = projection.lora_A
        full = full.to(own.device)
        own.copy_(distribute_tensor(full, own.device_mesh, own.placements, src_data_rank=None))


def export_adapters(model: nn.Module, adapted: list[str], arguments: argparse.Namespace) -> None:
    """Write the adapters as a folder that `peft` loads: adapter_config.json and adapter_model.safetensors."""
    tensors = {}
    for name in adapted:  # `full_tensor` is a collective: every rank takes part, and rank 0 writes
        projection = model.get_submodule(name)
        for matrix in ("lora_A", "lora_B"):
            full = getattr(projection, matrix).detach().full_tensor()
            tensors[f"base_model.model.{name}.{matrix}.weight"] = full.cpu()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(arguments.model),
        "r": arguments.lora_rank,
        "lora_alpha": SCALE * arguments.lora_rank,
        "lora_dropout": 0.0,
        "target_modules": sorted(adapted),
        "fan_in_fan_out": not isinstance(model.get_submodule(adapted[0]), nn.Linear),
        "bias": "none",
        "inference_mode": True,
    }
    if dist.get_rank() == 0:
        unfinished = empty_folder(arguments.out / "unfinished-adapter")
        save_file(tensors, unfinished / "adapter_model.safetensors", metadata={"format": "pt"})
        (unfinished / "adapter_config.json").write_text(json.dumps(config, indent=1))
        give_name(unfinished, arguments.out / "adapter")
    dist.barrier()


# ---------------------------------------------------------------- checkpoints and export


def newest_checkpoint(run: Path) -> Path | None:
    return max(run.glob("step-*"), default=None)  # names sort by step, since all numbers have eight digits


def empty_folder(path: Path) -> Path:
    shutil.rmtree(path, ignore_errors=True)  # left by a killed run
    path.mkdir()
    return path


def give_name(unfinished: Path, path: Path) -> None:
    """Rename a folder once it's completely on disk. A kill comes either before or after the rename."""
    for file in unfinished.rglob("*"):
        if file.is_file():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
    if path.exists():
        remove(path)
    unfinished.rename(path)


def remove(path: Path) -> None:
    """Rename a folder before removing it, so that a killed run never leaves half of one under its name."""
    nameless = path.with_name(f"unfinished-removal-of-{path.name}")
    shutil.rmtree(nameless, ignore_errors=True)
    path.rename(nameless)
    shutil.rmtree(nameless)


class Checkpoints:
    """The run's checkpoints, written in the background, one at a time. The newest `keep` of them are kept.

    With --offload, a save in the background would copy the state within host memory, so training waits for the save.
    The first save comes after step 1, to show early whether saving works. It's removed when there's a newer one.
    """

    def __init__(self, arguments: argparse.Namespace, group: dist.ProcessGroup) -> None:
        self.run = arguments.out
        self.keep = arguments.keep
        self.is_offloaded = arguments.offload
        self.every_steps, self.every_s = arguments.save_every
        self.group = group  # only for the background, so that its collectives can't get mixed up with a step's
        self.writing = None
        self.step = 0
        self.begun_s = time.monotonic()

    def is_due(self, step: int) -> bool:
        """Return whether to save after `step`. If the interval is in minutes, only rank 0 keeps time."""
        if step == 1:
            return True
        if self.every_steps:
            return step % self.every_steps == 0
        return dist.get_rank() == 0 and time.monotonic() - self.begun_s >= self.every_s

    @property
    def unfinished(self) -> Path:
        """This save's folder until it's complete. No other save has this name, which hosts may remember for a minute."""
        return self.run / f"unfinished-step-{self.step:08d}"

    def begin(self, loss: TokenLoss, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Save the state, in the background unless it's offloaded. All ranks call this."""
        self.finish()
        self.step = step
        if dist.get_rank() == 0:
            shutil.rmtree(self.unfinished, ignore_errors=True)
        dist.barrier(group=self.group)  # rank 0 has to remove the old folder before any rank creates a new one
        self.begun_s = time.monotonic()
        state = state_of(loss, optimizer)[0]
        settings = {"checkpoint_id": self.unfinished, "process_group": self.group}
        if self.is_offloaded:
            with ThreadPoolExecutor(1) as thread:  # which ends before the next line
                self.writing = thread.submit(dcp.save, state, **settings)
            self.finish()
        else:
            self.writing = dcp.async_save(state, **settings)

    @property
    def is_written(self) -> bool:
        return self.writing is None or self.writing.done()

    def finish(self) -> None:
        """Wait until all ranks have written their shards. Only then does the checkpoint get its final name."""
        if self.writing is None:
            return
        try:
            self.writing.result()
        except (dcp.api.CheckpointException, OSError, RuntimeError) as error:
            newest = newest_checkpoint(self.run)
            shutil.rmtree(self.unfinished, ignore_errors=True)
            refuse(f"step {self.step} can't be saved ({cause_of(error)}); the newest checkpoint is {newest}", status=1)
        self.writing = None
        if dist.get_rank() == 0:
            give_name(self.unfinished, self.run / f"step-{self.step:08d}")
            first = list(self.run.glob("step-00000001"))
            others = sorted(set(self.run.glob("step-*")) - set(first))
            for old in [*(first if others else ()), *others[: -self.keep]]:
                remove(old)


def cause_of(error: BaseException) -> str:
    """Return the first rank's error in one line; torch's own message has every rank's traceback."""
    failures = getattr(error, "failures", None) or {0: (error, None)}
    cause = next(iter(failures.values()))[0]
    said = str(getattr(cause, "strerror", None) or cause).strip()
    return said.splitlines()[0] if said else type(cause).__name__


def state_of(loss: TokenLoss, optimizer: torch.optim.Optimizer) -> tuple[dict, dict]:
    """Return a checkpoint's tensors (except frozen tensors) and the optimizer's complete state dict."""
    parameters = {name: one for name, one in loss.model.named_parameters() if one.requires_grad}
    moments = get_optimizer_state_dict(loss, optimizer)
    return {"model": parameters, "optimizer": moments["state"]}, moments


def load_newest(loss: TokenLoss, optimizer: torch.optim.Optimizer, run: Path) -> int:
    """Load the newest checkpoint, saved on any number of ranks. Return the number of steps already taken."""
    newest = from_rank_0(lambda: newest_checkpoint(run))
    if newest is None:
        return 0
    state, moments = state_of(loss, optimizer)
    dcp.load(state, checkpoint_id=newest)  # into this rank's shards
    set_optimizer_state_dict(loss, optimizer, optim_state_dict=moments | {"state": state["optimizer"]})
    return int(newest.name.removeprefix("step-"))


def side_files(folder: Path) -> list[Path]:
    """Return all files that don't hold weights, such as the configuration, tokenizer and chat template."""
    return sorted(path for path in folder.iterdir() if path.is_file() and not path.name.endswith(WEIGHTS))


def export(
    model: nn.Module, folder: Path, files: dict[str, FileTensor], names: dict[str, str], run: Path, group
) -> None:
    """Write the model to a folder like the one it came from, with the same files, names and dtypes.

    Every rank writes its shards, and then joins its share of the files. That may take longer than the default limit of
    30 minutes, but not than that of `group`.
    """
    unfinished = run / "unfinished-model"
    if dist.get_rank() == 0:
        empty_folder(unfinished)  # torch would join everything it finds there
    dist.barrier()
    state = model.state_dict()
    tensors = {in_file: state[name].to(files[in_file].dtype) for in_file, name in names.items()}
    numbers = {in_file: files[in_file].file for in_file in names}
    sharded = str(unfinished / "sharded")
    writer = dcp.HuggingFaceStorageWriter(sharded, fqn_to_index_mapping=numbers, save_distributed=True)
    try:
        dcp.save(tensors, storage_writer=writer, process_group=group)
    except (dcp.api.CheckpointException, OSError) as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        refuse(
            f"the model can't be written ({cause_of(error)}); the newest checkpoint is {newest_checkpoint(run)}",
            status=1,
        )
    consolidate_safetensors_files_on_every_rank(sharded, str(unfinished), numbers, process_group=group)
    if dist.get_rank() == 0:
        shutil.rmtree(sharded)
        for path in side_files(folder):
            shutil.copy(path, unfinished)
        give_name(unfinished, run / "model")
    dist.barrier()


# ---------------------------------------------------------------- the run


def choose_device(wanted: str) -> torch.device:
    """Return this rank's own GPU if every host has one for each of its ranks, or the CPU if no host has any."""
    num_gpus = 0 if wanted == "cpu" else torch.cuda.device_count()
    hosts = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, (socket.gethostname(), num_gpus, int(os.environ["LOCAL_WORLD_SIZE"])))
    hosts = sorted(set(hosts))
    lacking = [f"{name} (GPUs: {gpus}, ranks: {ranks})" for name, gpus, ranks in hosts if gpus < ranks]
    if not lacking:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        return device
    if wanted == "cuda" or any(gpus for _, gpus, _ in hosts):
        end_together(f"fewer GPUs than ranks on {', '.join(lacking)}; fix that, or use --device cpu", status=2)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # or Adam would touch a GPU, even for CPU tensors
    return torch.device("cpu")


def take(lock: TextIO, run: Path, kind: int, patience_s: float = 0.0) -> None:
    """Keep other runs from writing to `run`: rank 0 takes the lock, then all ranks share it until the last exits."""
    deadline_s = time.monotonic() + patience_s  # the ranks of a killed run may need a moment to end
    while True:
        try:
            return fcntl.flock(lock, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                refuse(f"another run is writing to {run}; wait until it ends, or use a new --out")
        time.sleep(0.1)


def join(run: Path, wanted: str) -> tuple[TextIO, torch.device]:
    """Form the group of ranks, unless another run is using the folder. Return the lock, which all ranks hold.

    Also return this rank's device, on which all hosts have agreed over the CPU.
    """
    lock = (run / ".lock").open("a+")  # "+", because NFS refuses a shared lock on a file that can't be read
    if os.environ["RANK"] == "0":
        take(lock, run, fcntl.LOCK_EX, patience_s=5)  # before the group forms, where the others wait for rank 0
        for leftover in [*run.glob("unfinished-step-*"), *run.glob("unfinished-removal-of-*")]:
            shutil.rmtree(leftover, ignore_errors=True)  # left by a killed run, each as large as a checkpoint
    store, rank, world_size = next(dist.rendezvous("env://"))
    place = {"rank": rank, "world_size": world_size}
    dist.init_process_group("gloo", store=dist.PrefixStore("cpu", store), **place)
    device = choose_device(wanted)
    if device.type == "cuda":
        dist.destroy_process_group()
        dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.PrefixStore("cuda", store), **place)
    if rank == 0:
        take(lock, run, fcntl.LOCK_SH)
    dist.barrier()
    take(lock, run, fcntl.LOCK_SH)
    return lock, device


def learning_rate(step: int, arguments: argparse.Namespace) -> float:
    """Return a step's learning rate: a linear rise, then half a cosine down to a tenth of the peak."""
    if step < arguments.warmup:
        return arguments.lr * (step + 1) / arguments.warmup
    done = (step - arguments.warmup) / max(1, arguments.steps - arguments.warmup)
    return arguments.lr * (0.1 + 0.9 * (1 + math.cos(math.pi * min(1.0, done))) / 2)


def make_optimizer(loss: TokenLoss, arguments: argparse.Namespace) -> torch.optim.Optimizer:
    """Return AdamW for the trained parameters, without weight decay on vectors (norms and biases)."""
    trained = [parameter for parameter in loss.parameters() if parameter.requires_grad]
    groups = [
        {"params": [one for one in trained if one.dim() > 1], "weight_decay": arguments.decay},
        {"params": [one for one in trained if one.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=arguments.lr, fused=True)


def backward(loss: TokenLoss, rows: Rows, batch: list[list[int]], size: int, device: torch.device) -> Tensor:
    """Accumulate the gradient of the batch's mean loss per target token. Return this rank's part of it, a scalar.

    Gradients are reduced after each micro-batch; otherwise, ranks would hold full gradients until the last one.
    """
    num_learned = rows.num_learned(batch)
    total = torch.zeros((), device=device)
    for micro_batch in rows.micro_batches(batch, size, device):
        part = loss(*micro_batch) / num_learned
        (part * dist.get_world_size()).backward()  # undo FSDP's division by the number of ranks; we divide by tokens
        total += part.detach()
    return total


@torch.no_grad()
def held_out_loss(loss: TokenLoss, rows: Rows, size: int, device: torch.device) -> float:
    """Return the mean loss per target token on the held-out documents."""
    loss.eval()
    total = sum(loss(*micro_batch) for micro_batch in rows.micro_batches(rows.held_out, size, device))
    dist.all_reduce(total)
    loss.train()
    loss.reshard()  # the root stays unsharded after a forward pass without a backward pass
    return total.item() / rows.num_learned(rows.held_out)


def train(
    loss: TokenLoss,
    optimizer: torch.optim.Optimizer,
    rows: Rows,
    checkpoints: Checkpoints,
    arguments: argparse.Namespace,
    device: torch.device,
    first: int,
) -> bool:
    """Take the remaining steps, starting with `first`. Return False if a signal ended the run early."""
    signals = []  # SIGTERM comes before the time limit; we note it here and complete the step first
    signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
    is_asked = False
    for step in range(first, arguments.steps):
        began_s = time.monotonic()
        torch.manual_seed((arguments.seed * 1_000_003 + step) * 10_007 + dist.get_rank())  # for dropout
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, arguments)
        batch = rows.of_step(step, arguments.batch)
        mean = backward(loss, rows, batch, arguments.micro_batch, device)
        norm = nn.utils.clip_grad_norm_(loss.parameters(), MAX_NORM).full_tensor().item()
        flags = [len(signals), checkpoints.is_due(step + 1), not checkpoints.is_written]
        sums = torch.tensor([mean.item(), *flags], dtype=torch.float64)
        dist.all_reduce(sums)  # if one rank has to stop or save, all ranks do, after the same step
        mean, num_asked, num_due, num_writing = sums.tolist()
        if not math.isfinite(mean + norm):  # the same on all ranks; nothing is changed or saved yet
            refuse_values(
                f"step {step + 1}: the loss is {mean:.7g}, and the gradient's norm is {norm:.7g}", checkpoints
            )
        optimizer.step()
        optimizer.zero_grad()

        is_asked = num_asked > 0
        is_last = step + 1 == arguments.steps
        note = {"step": step + 1, "loss": mean, "lr": optimizer.param_groups[0]["lr"], "gradient_norm": norm}
        note["tokens_per_s"] = sum(map(rows.num_tokens, batch)) / (time.monotonic() - began_s)
        if rows.held_out and ((step + 1) % arguments.test_every == 0 or is_last):
            note["held_out_loss"] = held_out_loss(loss, rows, arguments.micro_batch, device)
            if not math.isfinite(note["held_out_loss"]):
                refuse_values(f"step {step + 1}: the held-out loss is {note['held_out_loss']:.7g}", checkpoints)
        write_note(note | {"peak_bytes": peak_bytes(device)}, arguments.out)
        if num_writing == 0:
            checkpoints.finish()
        if is_last or is_asked or num_due > 0:
            checkpoints.begin(loss, optimizer, step + 1)
        if is_asked:
            break
    checkpoints.finish()
    dist.barrier()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # everything is saved, and an export can be repeated
    return not is_asked


def refuse_values(found: str, checkpoints: Checkpoints) -> None:
    """End the run because of a value that isn't finite, once a save under way is complete."""
    checkpoints.finish()
    end_together(f"{found}; the newest good checkpoint is {newest_checkpoint(checkpoints.run)}", status=1)


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory so far in bytes: tensor memory on a GPU, or process memory on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def write_note(note: dict, run: Path) -> None:
    """Print a step's numbers and add them to log.jsonl. Steps that are repeated after a kill are written again."""
    if dist.get_rank() == 0:
        with (run / "log.jsonl").open("a") as file:
            file.write(json.dumps(note) + "\n")
        words = [f"{name} {value:.7g}" for name, value in note.items() if name not in ("step", "peak_bytes")]
        print(f"step {note['step']}  {'  '.join(words)}  peak {note['peak_bytes'] / 1e9:.2f} GB", flush=True)


def describe(loss: TokenLoss, units: dict[str, nn.Module]) -> None:
    """Print a summary of the run before it starts."""
    own = [(one.to_local(), one.requires_grad) for one in loss.parameters()]
    own_bytes = sum(shard.nbytes + trained * 3 * shard.nbytes for shard, trained in own)
    num_all = sum(one.numel() for one in loss.parameters())
    num_trained = sum(one.numel() for one in loss.parameters() if one.requires_grad)
    kept = " and ".join(sorted({str(shard.dtype).removeprefix("torch.") for shard, _ in own}))
    say(f"{type(loss.model).__name__}: {num_all:,} parameters, {num_trained:,} trained")
    kinds = sorted({type(unit).__name__.removeprefix("FSDP") for unit in units.values()})
    say(f"{len(units) + 1} units: {len(units)} of {', '.join(kinds)}, and the root")
    say(f"rank 0 keeps {own_bytes / 1e6:,.2f} MB of parameters, gradients and moments; shards in {kept}")


def main(arguments: argparse.Namespace) -> torch.device:
    transformers.logging.set_verbosity_error()
    if not arguments.data.is_file():
        refuse(f"{arguments.data} isn't a file; give a text file, or JSON lines")
    config = read_config(arguments.model)
    text_config = config.get_text_config()
    context = getattr(text_config, "max_position_embeddings", None) or 4096
    arguments.length = arguments.length or min(4096, context)
    if arguments.length > context:
        refuse(f"--length {arguments.length} is longer than the model's context of {context} tokens")
    tokenizer = read_tokenizer(arguments.model, text_config.vocab_size)
    files = tensors_in_files(arguments.model)
    model = build(config, arguments)
    names = match_files(model, arguments.model, files)
    units = find_units(model, arguments.unit)
    adapted = []
    if arguments.lora_rank:
        is_bf16 = all(one.dtype == torch.bfloat16 for one in files.values())
        adapted = add_adapters(model, units, arguments.lora_rank, torch.bfloat16 if is_bf16 else torch.float32)

    arguments.out.mkdir(parents=True, exist_ok=True)
    lock, device = join(arguments.out, arguments.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    computing = str(compute_dtype(device)).removeprefix("torch.")
    say(f"{dist.get_world_size()} ranks on {name}, computing in {computing}")
    if arguments.offload and device.type == "cpu":
        end_together("--offload moves shards to host memory, where CPU ranks keep them anyway", status=2)
    background = dist.new_group(backend="gloo", timeout=timedelta(hours=6))
    arguments.digest = from_rank_0(lambda: digest_of(arguments))
    if dist.get_rank() == 0:
        tokenize_once(arguments, tokenizer, text_config.vocab_size)
    dist.barrier(group=background)  # tokenizing may take longer than the other group's timeout

    loss = TokenLoss(model)
    shard(loss, units, device, arguments)
    load(loss, arguments.model, names, device, arguments.offload)
    draw_adapters(model, adapted, arguments.seed)
    describe(loss, units)
    check_model(loss, device)
    arguments.packed = documents_are_apart(loss, device, arguments.micro_batch)
    rows = Rows(arguments)
    kind = "packed" if arguments.packed else "padded"
    say(f"{len(rows.learned)} rows to train on, {len(rows.held_out)} held out, {kind}")
    arguments.steps = arguments.steps or math.ceil(arguments.epochs * len(rows.learned) / arguments.batch)
    check_resumed(arguments)

    optimizer = make_optimizer(loss, arguments)
    first = load_newest(loss, optimizer, arguments.out)
    if first >= arguments.steps:
        say(f"{first} of {arguments.steps} steps are already done")
    elif first:
        say(f"continuing after step {first}")
    checkpoints = Checkpoints(arguments, background)
    if not train(loss, optimizer, rows, checkpoints, arguments, device, first):
        say(f"ended by a signal; the same command continues from {newest_checkpoint(arguments.out)}")
    elif adapted:
        export_adapters(model, adapted, arguments)
        say(f"the adapter is in {arguments.out / 'adapter'}")
    else:
        export(model, arguments.model, files, names, arguments.out, background)
        say(f"the model is in {arguments.out / 'model'}")
    dist.destroy_process_group()
    lock.close()
    return device


if __name__ == "__main__":
    chosen_arguments = read_arguments()
    if "LOCAL_RANK" not in os.environ:
        refuse("start it with `torchrun --nproc-per-node 8 finetune_hf.py ...`")
    try:
        chosen = main(chosen_arguments)
    except UnicodeDecodeError as error:
        sys.exit(f"finetune_hf.py: {chosen_arguments.data} isn't UTF-8: {error}")
    except (OSError, SafetensorError) as error:  # only this rank has the error, so this rank prints it
        place = getattr(error, "filename", None) or chosen_arguments.out
        cause = getattr(error, "strerror", None) or error
        sys.exit(f"finetune_hf.py: {cause} ({place}); everything saved so far is kept")
    except RuntimeError as error:
        if "by peer" not in str(error):
            raise
        sys.exit(1)  # the connection was closed because another rank exited after printing why
    if chosen.type == "cpu":
        os._exit(0)  # a leftover gloo thread can abort Python's cleanup; this skips it, `atexit` included
