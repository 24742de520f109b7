"""Fine-tune any causal language model in `transformers` with FSDP2.

This script needs torch, transformers, and prepare_text.py next to it. Run it with `torchrun --nproc-per-node 8 finetune_hf.py MODEL DATA --out RUN`. It uses GPUs if every host has one for
each of its ranks, or the CPU if no host has any. A loss or gradient that isn't finite ends the run, and harms nothing.
On several nodes, start the same command on each with torchrun's --nnodes, --rdzv-backend and --rdzv-endpoint; MODEL,
DATA and RUN have to be on a disk that all nodes share. --replicas N (nodes) shards within nodes only.

MODEL is a folder with config.json, safetensors files and a tokenizer. transformers loads it into shards, and names its
units. (If it has no tokenizer and a vocabulary of 256, tokens are bytes.) DATA is a file that prepare_text.py can read
(its docstring has the formats), or the folder that it wrote. As many documents as fit are packed into a row, unless the
model's attention would mix them; for long packed rows, --attention flash_attention_2 needs no length x length mask.
Checkpoints and log.jsonl go in RUN, and so does the finished model (or the adapter), in its own folder. For the weights
of a checkpoint while the run goes on, copy the command with a new --out, copy the newest step-* folder there, and use
its step as --steps: it exports, and trains no more.

Refused in one line: models that aren't causal (BERT's family), that need an encoder's output (T5, BART), that are
quantized, whose experts are separate modules, or whose loss differs when it's computed in chunks. A mixture of experts
trains without its routers' extra loss.

Run the same command again to continue from the newest checkpoint, on any number of ranks. Between two runs, you may
change --lr, --warmup, --steps, --epochs, and anything that doesn't affect the result. A different --batch, --length,
--seed, --held-out, data or kind of training is refused; use a new RUN for those.
"""

import argparse
import bisect
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
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TextIO

import prepare_text

if __name__ == "__main__":
    prepare_text.end_with_parent()  # before the imports below, which take seconds

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

try:
    import transformers
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.distributed import DistributedConfig
except ImportError:
    sys.exit("finetune_hf.py needs transformers, 5.23 or newer: pip install transformers")

IGNORED = -100  # the target of a token that has no loss, such as padding or part of the prompt
CHUNK = 1024  # number of tokens whose logits exist at the same time
MAX_NORM = 1.0  # the largest gradient norm; larger gradients are scaled down to it
FILE_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
DIGEST = "digest"
SAMPLES, SAMPLE_BYTES = 64, 65_536  # of each file of weights
IN_PROCESS_BYTES = 4_000_000  # data up to this size are tokenized without workers, which take seconds to start
# FIXED settings can't change when a run resumes; OBEYED ones can. The others don't affect the result.
FIXED = ("batch", "length", "seed", "held_out", "lora_rank", "lora_alpha", "lora_targets", "packed", DIGEST)
OBEYED = ("lr", "warmup", "steps", "decay")
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
    sys.exit(status)


def from_rank_0(find: Callable, group: dist.ProcessGroup | None = None):
    """Return what `find` returns on rank 0: hosts may see a shared folder as it was up to a minute ago."""
    found = [find() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found, group=group)
    return found[0]


def agree(problem: str | None) -> None:
    """End the run if any rank has a problem, which may have come to that rank alone."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, problem)
    if problems := [one for one in found if one]:
        end_together(problems[0], status=2)


# ---------------------------------------------------------------- settings


def read_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", type=Path, help="a folder with config.json, safetensors files and a tokenizer")
    add("data", type=Path, help="a text file, JSON lines, a JSON array, or a folder from prepare_text.py")
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
    add("--skip-bad-lines", action="store_true", help="leave bad entries of DATA out, and count them")
    add("--lora-rank", type=int, default=0, metavar="R", help="freeze the model and train adapters of rank R")
    add("--lora-alpha", type=float, help="the adapters' output is multiplied by this divided by the rank (2 R)")
    add("--lora-targets", metavar="NAMES", help="linear layers to adapt, such as q_proj,v_proj (all in the units)")
    add("--replicas", type=int, default=1, help="shard over 1/N of the ranks, and keep N copies (1)")
    add("--log", type=Path, metavar="FILE", help="each step's numbers as JSON lines (RUN/log.jsonl)")
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
    for name in ("batch", "micro_batch", "length", "keep", "test_every", "steps", "epochs", "replicas"):
        value = getattr(arguments, name)
        if value is not None and value <= 0:
            parser.error(f"--{name.replace('_', '-')} is {value}, but it has to be greater than 0")
    if not 0 <= arguments.held_out < 1:
        parser.error(f"--held-out is {arguments.held_out}, but it has to be a fraction, at least 0 and less than 1")
    if arguments.lora_rank < 0 or arguments.warmup < 0:
        parser.error("--lora-rank and --warmup can't be negative")
    if not arguments.lora_rank and (arguments.lora_alpha or arguments.lora_targets):
        parser.error("--lora-alpha and --lora-targets need a --lora-rank")
    arguments.lora_alpha = arguments.lora_alpha or 2.0 * arguments.lora_rank
    arguments.log = arguments.log or arguments.out / "log.jsonl"
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


# ---------------------------------------------------------------- rows and batches


def prepared_by_rank_0(arguments: argparse.Namespace) -> Path | str:
    """Return the folder of tokens. If they can't be made, return why, or an empty text if that's been printed."""
    folder = arguments.data if arguments.data.is_dir() else arguments.out / "tokens"
    words = {"length": arguments.length, "skip_bad": arguments.skip_bad_lines}
    try:
        if arguments.data.is_dir():
            prepare_text.check_prepared(arguments.model, folder, arguments.length)
        elif arguments.data.stat().st_size <= IN_PROCESS_BYTES:
            prepare_text.prepare(arguments.model, arguments.data, folder, **words)
        else:
            program = [sys.executable, prepare_text.__file__, arguments.model, arguments.data, folder]
            flags = ["--length", str(arguments.length), *(["--skip-bad-lines"] if arguments.skip_bad_lines else ())]
            return folder if subprocess.run([*program, *flags]).returncode == 0 else ""
    except prepare_text.BadData as error:
        return str(error)
    return folder


def digest_of(arguments: argparse.Namespace, tokens: Path) -> str:
    """Return a 16-digit digest of the tokenizer and data; for adapters, also of a sample of the model's weights.

    A checkpoint of adapters fits only the weights that they were trained on; other checkpoints have all weights.
    """
    found = hashlib.sha256((tokens / "prepared.json").read_bytes())
    found.update((arguments.model / "config.json").read_bytes())
    for path in sorted(arguments.model.glob("*.safetensors")) if arguments.lora_rank else ():
        size = path.stat().st_size
        found.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for part in range(SAMPLES):
                file.seek(size * part // SAMPLES)
                found.update(file.read(SAMPLE_BYTES))
    return found.hexdigest()[:16]


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
    """The pieces of documents in a folder of tokens, arranged in rows: some for training, some held out.

    The files are mapped into memory, not read. Whole documents are held out, with all of their pieces.
    """

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        ends, firsts = (mapped(folder, name) for name in ("ends.bin", "firsts.bin"))
        self.tokens, self.is_learned = (mapped(folder, name) for name in ("tokens.bin", "learned.bin"))
        self.ends = [0, *ends.tolist()]
        self.seed = arguments.seed
        document_of = (firsts.cumsum(0) - 1).tolist()
        num_documents = document_of[-1] + 1
        order = torch.randperm(num_documents, generator=torch.Generator().manual_seed(self.seed)).tolist()
        num_held_out = min(math.ceil(arguments.held_out * num_documents), num_documents - 1)
        held_out = set(order[:num_held_out])
        pieces = range(len(document_of))
        self.held_out = self.in_rows([one for one in pieces if document_of[one] in held_out], arguments)
        self.learned = self.in_rows([one for one in pieces if document_of[one] not in held_out], arguments)

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
        """Return a row's tokens, each token's position in its document, and the targets, as three vectors."""
        tokens, positions, targets = [], [], []
        for document in row:
            first, last = self.ends[document], self.ends[document + 1]
            own = self.tokens[first:last].long()
            learned = self.is_learned[first:last].bool()
            tokens.append(own[:-1])
            positions.append(torch.arange(last - first - 1))
            targets.append(own[1:].where(learned[1:], IGNORED))
        return torch.cat(tokens), torch.cat(positions), torch.cat(targets)

    def num_tokens(self, row: list[int]) -> int:
        return sum(self.ends[document + 1] - self.ends[document] - 1 for document in row)

    def num_learned(self, rows: list[list[int]]) -> int:
        documents = [document for row in rows for document in row]
        return sum(self.is_learned[self.ends[one] + 1 : self.ends[one + 1]].sum().item() for one in documents)

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


def mapped(folder: Path, name: str) -> Tensor:
    """Return a file of prepare_text.py's as a vector that the system reads when it's used."""
    dtype = {"tokens.bin": torch.int32, "ends.bin": torch.int64}.get(name, torch.uint8)
    path = folder / name
    return torch.from_file(str(path), size=path.stat().st_size // dtype.itemsize, dtype=dtype)


# ---------------------------------------------------------------- the model


class TokenLoss:
    """Takes the place of a model's `forward`: returns the sum of its tokens' losses, computing logits in chunks.

    It runs inside the model's call, where FSDP has the shards that it needs.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.decoder, self.plain = model, model.get_decoder(), model.forward
        self.has_positions = "position_ids" in inspect.signature(self.decoder.forward).parameters
        model.forward = self

    def __call__(self, tokens: Tensor, positions: Tensor | None, targets: Tensor | None = None) -> Tensor:
        """Return the summed loss or, without targets, the last hidden states; without positions, the model's logits.

        All inputs have shape (rows, length). A position of 0 begins a new document.
        """
        if positions is None:
            return self.plain(input_ids=tokens, use_cache=False).logits
        places = {"position_ids": positions} if self.has_positions else {}
        output = self.decoder(input_ids=tokens, use_cache=False, **places)
        hidden = output.last_hidden_state
        if targets is None:
            return hidden
        total = torch.zeros((), device=hidden.device)
        chunks = zip(hidden.flatten(0, 1).split(CHUNK), targets.flatten().split(CHUNK), strict=True)
        for part, wanted in chunks:
            total = total + checkpoint(self.loss_of, type(output), part, wanted, use_reentrant=False)
        return total

    def loss_of(self, output: type, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return a chunk's summed loss. The model's `forward` computes logits, since some models scale or cap them."""
        self.decoder.forward = lambda *_, **__: output(last_hidden_state=hidden[None])
        try:
            logits = self.plain(inputs_embeds=hidden[None], use_cache=False).logits[0]
        finally:
            del self.decoder.forward
        return F.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="sum")


def read_config(folder: Path) -> transformers.PretrainedConfig:
    if not (folder / "config.json").exists():
        refuse(f"{folder} has no config.json; give the folder of a model in Hugging Face format")
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except ValueError as error:  # a model that this version doesn't know, or whose code is in its own folder
        refuse(f"{folder}: {one_line(error)}")
    if type(config) not in transformers.AutoModelForCausalLM._model_mapping:
        refuse(f"{folder}: AutoModelForCausalLM doesn't support the model type {config.model_type}")
    if getattr(config, "quantization_config", None):
        refuse(f"{folder} is quantized; this script can't train quantized models")
    return config


def dtypes_in_files(folder: Path) -> dict[str, tuple[int, torch.dtype]]:
    """Return each tensor's file (counted from 1) and dtype, for the files that transformers would load."""
    index, found = folder / "model.safetensors.index.json", {}
    single = ["model.safetensors"] if (folder / "model.safetensors").exists() else []
    listed = single or sorted(set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else ())
    if not listed:
        refuse(f"{folder} has no model.safetensors, and no model.safetensors.index.json that lists other files")
    for number, name in enumerate(listed, start=1):
        with safe_open(folder / name, "pt") as file:
            for key in file.keys():
                if key in found:
                    refuse(f"{folder}: {key} is in {name} and in another file; which one is right?")
                if (kind := file.get_slice(key).get_dtype()) not in FILE_DTYPES:
                    refuse(f"{folder / name}: {key} is {kind}; this script can't train quantized models")
                found[key] = (number, FILE_DTYPES[kind])
    return found


def one_line(error: BaseException) -> str:
    said = [line.strip() for line in str(error).splitlines() if line.strip()]
    return said[0] if said else type(error).__name__


def build(config: transformers.PretrainedConfig, arguments: argparse.Namespace) -> nn.Module:
    """Return the model on the meta device, where tensors have shapes but no memory. Refuse what can't be trained."""
    try:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=arguments.attention)
        decoder, head = model.get_decoder(), model.get_output_embeddings()
    except Exception as error:  # of the model's own code, or a wrong --attention
        refuse(f"{arguments.model}: {one_line(error)}")
    if decoder is model or head is None:
        refuse(f"{type(model).__name__} has no decoder below its head")
    if getattr(config, "is_encoder_decoder", False):
        refuse(f"{type(model).__name__} needs an encoder's output, which this script doesn't have")
    experts = [
        name for name, one in model.named_modules() if name.endswith("experts") and isinstance(one, nn.ModuleList)
    ]
    if experts:  # a rank that doesn't use an expert would have no gradient for it, and sum the others in a wrong order
        refuse(
            f"{type(model).__name__} keeps its experts as separate modules ({experts[0]}), which can't be sharded here"
        )
    return model


def units_of(model: nn.Module, class_name: str | None) -> dict[str, str]:
    """Return the rules for units that transformers gets: the embedding, each layer of the decoder, and its own norm.

    The head stays in the root. As a unit, it would run once for each chunk of the loss, and ranks may have different
    numbers of chunks; then their collectives don't match.
    """
    modules, decoder = dict(model.named_modules()), model.get_decoder()
    names = {module: name for name, module in modules.items()}
    if class_name:
        layers = {pattern_of(name) for name, module in modules.items() if type(module).__name__ == class_name}
        known = sorted({type(module).__name__ for module in modules.values()})
        if not layers:
            refuse(f"--unit {class_name}: the model has no such class; it has {', '.join(known)}")
    else:
        lists = [name for name, one in decoder.named_modules(prefix=names[decoder]) if isinstance(one, nn.ModuleList)]
        outermost = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
        if not outermost:
            refuse("the model has no list of layers; give the class of its layers with --unit")
        layers = {max(outermost, key=lambda name: sum(one.numel() for one in modules[name].parameters())) + ".*"}
    type(model)._fsdp_plan = {}  # transformers' rule for the head
    return dict.fromkeys([names[model.get_input_embeddings()], *sorted(layers)], "free_full_weight")


def pattern_of(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def load(arguments: argparse.Namespace, units: dict[str, str], dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Return the model with each rank's shards, which transformers reads from the files."""
    world_size = dist.get_world_size()
    mesh = DistributedConfig(
        fsdp_size=world_size // arguments.replicas,
        dp_replicate_size=arguments.replicas,
        fsdp_plan=units,
        fsdp_cpu_offload=arguments.offload,
        fsdp_mixed_precision=compute_dtype(device) == torch.bfloat16,
    )
    settings = {"attn_implementation": arguments.attention, "dtype": dtype, "local_files_only": True}
    problem = None
    try:
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            arguments.model, distributed_config=mesh, output_loading_info=True, ignore_mismatched_sizes=True, **settings
        )
        wrong = {"lack": report["missing_keys"], "have, unlike the model,": report["unexpected_keys"]}
        wrong["have in another shape"] = {name for name, *_ in report["mismatched_keys"]}
        said = [f"{what} {first_of(names)}" for what, names in wrong.items() if names]
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        if said:
            problem = f"{arguments.model} doesn't fit {kind_of(model)}: its files {'; they '.join(said)}"
        elif model.config.get_text_config().tie_word_embeddings and head.weight is not embedding.weight:
            problem = f"{arguments.model}: config.json ties the head and the embedding, but they differ in the files"
    except Exception as error:  # of the model's own code
        problem = f"{arguments.model} can't be loaded: {one_line(error)}"
    agree(problem)
    layers = [unit for name, unit in model.named_modules() if is_layer(name, units)]
    if world_size == 1:
        shard_alone(model, layers, device, arguments.offload)
    own(model, arguments.offload)
    for layer in layers:  # recomputed in backward
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        if arguments.compile:
            layer.forward = torch.compile(layer.forward)
    TokenLoss(model)
    return model


def own(model: nn.Module, offload: bool) -> None:
    """Copy the shards out of the mapped files, since saves in the background can't copy those; or to host memory."""
    copies = {}  # a tied parameter has one
    for module in model.modules():
        for name, one in module.named_parameters(recurse=False):
            if one not in copies:
                copy = one.detach().cpu() if offload else one.detach().clone()
                copies[one] = nn.Parameter(copy, requires_grad=one.requires_grad)
            setattr(module, name, copies[one])


def is_layer(name: str, units: dict[str, str]) -> bool:
    return pattern_of(name) != name and pattern_of(name) in units


def shard_alone(model: nn.Module, layers: list[nn.Module], device: torch.device, offload: bool) -> None:
    """Make units for a single rank, where transformers makes none, so that it computes as several ranks do."""
    settings = {
        "mesh": dist.init_device_mesh(device.type, (1,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=compute_dtype(device), reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy() if offload else OffloadPolicy(),
    }
    for unit in [*layers, model]:
        fully_shard(unit, **settings)


def compute_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "cpu" else torch.bfloat16  # CPU ranks emulate bf16, slowly


def kind_of(module: nn.Module) -> str:
    return type(module).__name__.removeprefix("FSDP")


def first_of(names: set[str]) -> str:
    return f"{len(names)} tensors ({', '.join(sorted(names)[:3])}{', ...' if len(names) > 3 else ''})"


def reshard(model: nn.Module) -> None:
    """Free what stays full after a forward pass without a backward pass, such as the head."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def try_out(model: nn.Module, device: torch.device, num_rows: int) -> bool:
    """Compare the loss with the model's own, refuse what differs, and return whether a row can have several documents.

    A row's second document has to get the same outputs when the first one changes. We try `num_rows` equal rows at a
    time, as in training: with flash attention, transformers keeps documents apart only in a single row.
    """
    problem, is_apart = None, False
    row = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8], device=device) % model.config.get_text_config().vocab_size
    other, last = row.clone(), row.clone()
    other[:4] = row[4:]
    last[-1] = row[0]
    straight = torch.arange(8, device=device)[None]
    split = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]] * num_rows, device=device)
    model.eval()
    try:
        logits = model(row[None], None)[0].float()
        own = model(row[None, :-1], straight[:, :-1], row[None, 1:]).item()
        right = F.cross_entropy(logits[:-1], row[1:], reduction="sum").item()
        hidden = [model(one[None], straight)[:, :-1].float() for one in (row, last)]
        tolerance = 1e-5 if compute_dtype(device) == torch.float32 else 1e-2
        if not torch.allclose(*hidden, rtol=tolerance, atol=tolerance):
            problem = f"{kind_of(model)} isn't causal: a token's output depends on later tokens"
        elif not math.isclose(own, right, rel_tol=tolerance):
            problem = f"{kind_of(model)}: the loss in chunks is {own:.6f}, but that of its own logits is {right:.6f}"
        pair = [model(one.repeat(num_rows, 1), split)[:, 4:] for one in (row, other)]
        is_apart = torch.equal(*pair)
    except Exception as error:  # of the model's own code
        problem = problem or f"{kind_of(model)} can't be trained by this script: {one_line(error)}"
    agree(problem)
    model.train()
    reshard(model)
    answer = torch.tensor(int(is_apart and model.forward.has_positions))
    dist.all_reduce(answer, dist.ReduceOp.MIN)  # one answer for all ranks
    return bool(answer)


# ---------------------------------------------------------------- adapters


def add_adapters(
    model: nn.Module, units: dict[str, str], arguments: argparse.Namespace, device: torch.device
) -> list[str]:
    """Freeze the model, and add two thin fp32 matrices to projections in its layers. Return the projections' names.

    Hu et al. 2021, arXiv:2106.09685. lora_alpha / lora_rank * B A input is added to a projection's output. Each rank
    has all adapters, whose gradients are summed over ranks: 16 bytes per parameter. A is drawn with the same values on
    any number of ranks; B is zero, so that no output changes at first.
    """
    model.requires_grad_(False)
    kinds = (nn.Linear, transformers.pytorch_utils.Conv1D)
    layers = [name for name, _ in model.named_modules() if is_layer(name, units)]
    known = [
        name
        for name, one in model.named_modules()
        if isinstance(one, kinds) and any(name.startswith(f"{layer}.") for layer in layers)
    ]
    wanted = arguments.lora_targets.split(",") if arguments.lora_targets else {name.split(".")[-1] for name in known}
    ends = sorted({name.split(".")[-1] for name in known})
    if odd := sorted(set(wanted) - set(ends)) or not known:
        end_together(f"--lora-targets: the layers have no linear {odd}; they have {', '.join(ends)}", status=2)
    adapted = [name for name in known if name.split(".")[-1] in wanted]
    random = torch.Generator().manual_seed(arguments.seed)
    for name in adapted:
        projection = model.get_submodule(name)
        num_inputs, num_outputs = inputs_and_outputs(projection)
        drawn = nn.init.kaiming_uniform_(torch.empty(arguments.lora_rank, num_inputs), a=math.sqrt(5), generator=random)
        projection.lora_A = nn.Parameter(drawn.to(device))
        projection.lora_B = nn.Parameter(torch.zeros(num_outputs, arguments.lora_rank, device=device))
        projection.register_forward_hook(partial(add_low_rank, arguments.lora_alpha / arguments.lora_rank))
    return adapted


def inputs_and_outputs(projection: nn.Module) -> tuple[int, int]:
    """Return a projection's input and output widths; GPT-2's Conv1D stores its weight transposed."""
    first, second = projection.weight.shape
    return (second, first) if isinstance(projection, nn.Linear) else (first, second)


def add_low_rank(scale: float, projection: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    low = F.linear(inputs[0], projection.lora_A.to(output.dtype))
    return output + scale * F.linear(low, projection.lora_B.to(output.dtype))


def sum_gradients(model: nn.Module) -> None:
    """Sum the adapters' gradients over all ranks, in one collective."""
    gradients = [one.grad for one in model.parameters() if one.requires_grad]
    flat = torch.cat([one.flatten() for one in gradients])
    dist.all_reduce(flat)
    for one, part in zip(gradients, flat.split([one.numel() for one in gradients]), strict=True):
        one.copy_(part.view_as(one))


def export_adapters(model: nn.Module, adapted: list[str], arguments: argparse.Namespace) -> None:
    """Write the adapters as a folder that `peft` loads: adapter_config.json and adapter_model.safetensors."""
    tensors = {}
    for name in adapted:
        projection = model.get_submodule(name)
        for matrix in ("lora_A", "lora_B"):
            tensors[f"base_model.model.{name}.{matrix}.weight"] = getattr(projection, matrix).detach().cpu()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": hub_name(arguments.model) or str(arguments.model.resolve()),
        "r": arguments.lora_rank,
        "lora_alpha": arguments.lora_alpha,
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


def hub_name(folder: Path) -> str | None:
    """Return the hub's name of a model in its cache, which has models--OWNER--NAME/snapshots/COMMIT."""
    found = re.search(r"models--([^/]+)--([^/]+)/snapshots/", f"{folder.absolute()}/")
    return f"{found[1]}/{found[2]}" if found else None


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

    def begin(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Save the state, in the background unless it's offloaded. All ranks call this."""
        self.finish()
        self.step = step
        if dist.get_rank() == 0:
            shutil.rmtree(self.unfinished, ignore_errors=True)
        dist.barrier(group=self.group)  # rank 0 has to remove the old folder before any rank creates a new one
        self.begun_s = time.monotonic()
        state = state_of(model, optimizer)[0]
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


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict, dict]:
    """Return a checkpoint's tensors (except frozen tensors) and the optimizer's complete state dict."""
    parameters = {name: one for name, one in model.named_parameters() if one.requires_grad}
    moments = get_optimizer_state_dict(model, optimizer)
    return {"model": parameters, "optimizer": moments["state"]}, moments


def load_newest(model: nn.Module, optimizer: torch.optim.Optimizer, run: Path) -> int:
    """Load the newest checkpoint, saved on any number of ranks. Return the number of steps already taken."""
    newest = from_rank_0(lambda: newest_checkpoint(run))
    if newest is None:
        return 0
    state, moments = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=newest)  # into this rank's shards
    set_optimizer_state_dict(model, optimizer, optim_state_dict=moments | {"state": state["optimizer"]})
    return int(newest.name.removeprefix("step-"))


def side_files(folder: Path) -> list[Path]:
    """Return all files that don't hold weights, such as the configuration, tokenizer and chat template."""
    return sorted(path for path in folder.iterdir() if path.is_file() and not path.name.endswith(WEIGHTS))


def export(model: nn.Module, folder: Path, files: dict[str, tuple[int, torch.dtype]], run: Path, group) -> None:
    """Write the model to a folder like the one it came from: transformers' names, and the files' dtypes.

    The ranks share the files. For each tensor, all ranks gather it, and the one whose file it's in writes it, while the
    next one is gathered; so no rank has more than a few of them. That may take long, but not longer than `group` waits.
    """
    unfinished = run / "unfinished-model"
    if dist.get_rank() == 0:
        empty_folder(unfinished)
    dist.barrier(group=group)
    kept = model.state_dict()
    names = [name for name, _ in model.named_parameters()] + [name for name, _ in model.named_buffers() if name in kept]
    prefix, common = f"{model.base_model_prefix}.", Counter(dtype for _, dtype in files.values()).most_common(1)[0][0]
    empty = {name: torch.empty(kept[name].shape, device="meta") for name in names}
    written = {}
    parts = parts_of(model, empty)
    for part in parts:
        for name, tensor in revert_weight_conversion(model, {name: empty[name] for name in part}).items():
            number, dtype = files.get(name) or files.get(name.removeprefix(prefix)) or (1, common)
            written[name] = (number, dtype, tuple(tensor.shape))
    numbers = sorted({number for number, *_ in written.values()})
    names_of = {number: f"model-{number:05d}-of-{numbers[-1]:05d}.safetensors" for number in numbers}
    names_of = names_of if len(numbers) > 1 else {numbers[0]: "model.safetensors"}
    writers = {}
    for number in numbers[dist.get_rank() :: dist.get_world_size()]:
        tensors = {name: kind for name, (of, *kind) in written.items() if of == number}
        writers[number] = FileWriter(unfinished / names_of[number], tensors)
    with ThreadPoolExecutor(1) as thread:
        writing = None
        for part in parts:
            full = {name: whole(kept[name].detach()) for name in part}
            for name, tensor in revert_weight_conversion(model, full).items():
                number, dtype, _ = written[name]
                if number in writers:
                    data = tensor.to(dtype).contiguous().cpu()
                    _ = writing and writing.result()
                    writing = thread.submit(writers[number].write, name, data)
        _ = writing and writing.result()
    for writer in writers.values():
        writer.close()
    dist.barrier(group=group)
    if dist.get_rank() == 0:
        for path in side_files(folder):
            shutil.copy(path, unfinished)
        if len(numbers) > 1:
            sizes = [dtype.itemsize * math.prod(shape) for _, dtype, shape in written.values()]
            index = {"metadata": {"total_size": sum(sizes)}}
            index["weight_map"] = {name: names_of[number] for name, (number, *_) in sorted(written.items())}
            (unfinished / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
        give_name(unfinished, run / "model")
    dist.barrier(group=group)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def parts_of(model: nn.Module, empty: dict[str, Tensor]) -> list[list[str]]:
    """Return the names of the tensors that are gathered at a time: one, or all that transformers converts in a layer.

    It does so when it loads and saves, for example with experts, which have a tensor each in the files.
    """
    renamed = {id(tensor) for tensor in revert_weight_conversion(model, dict(empty)).values()}
    parts = {}
    for name, tensor in empty.items():
        layer = re.match(r".*?\.\d+\.", name)
        parts.setdefault(name if id(tensor) in renamed or not layer else layer[0], []).append(name)
    return list(parts.values())


class FileWriter:
    """Writes a safetensors file, one tensor at a time. The header has the metadata that older readers want."""

    def __init__(self, path: Path, tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        kinds = {dtype: kind for kind, dtype in FILE_DTYPES.items()}
        header, self.places, place = {"__metadata__": {"format": "pt"}}, {}, 0
        for name, (dtype, shape) in sorted(tensors.items()):
            self.places[name] = place
            place += dtype.itemsize * math.prod(shape)
            offsets = [self.places[name], place]
            header[name] = {"dtype": kinds[dtype], "shape": shape, "data_offsets": offsets}
        words = json.dumps(header).encode()
        words += b" " * (-len(words) % 8)
        self.first = 8 + len(words)
        self.file = path.open("wb")
        self.file.write(len(words).to_bytes(8, "little") + words)

    def write(self, name: str, tensor: Tensor) -> None:
        self.file.seek(self.first + self.places[name])
        self.file.write(tensor.flatten().view(torch.uint8).numpy())

    def close(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()


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


def make_optimizer(model: nn.Module, arguments: argparse.Namespace) -> torch.optim.Optimizer:
    """Return AdamW for the trained parameters, without weight decay on vectors (norms and biases)."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [one for one in trained if one.dim() > 1], "weight_decay": arguments.decay},
        {"params": [one for one in trained if one.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=arguments.lr, fused=True)


def backward(model: nn.Module, rows: Rows, batch: list[list[int]], size: int, device: torch.device) -> Tensor:
    """Accumulate the gradient of the batch's mean loss per target token. Return this rank's part of that loss.

    Gradients are reduced after each micro-batch; otherwise, ranks would hold full gradients until the last one.
    """
    num_learned = rows.num_learned(batch)
    total = torch.zeros((), device=device)
    has_adapters = not any(isinstance(one, DTensor) and one.requires_grad for one in model.parameters())
    factor = 1 if has_adapters else dist.get_world_size()  # FSDP divides by the number of ranks; we divide by tokens
    for micro_batch in rows.micro_batches(batch, size, device):
        part = model(*micro_batch) / num_learned
        (part * factor).backward()
        total += part.detach()
    if has_adapters:
        sum_gradients(model)
    return total


@torch.no_grad()
def held_out_loss(model: nn.Module, rows: Rows, size: int, device: torch.device) -> float:
    """Return the mean loss per target token on the held-out documents."""
    model.eval()
    total = sum(model(*micro_batch) for micro_batch in rows.micro_batches(rows.held_out, size, device))
    dist.all_reduce(total)
    model.train()
    reshard(model)
    return total.item() / rows.num_learned(rows.held_out)


def train(
    model: nn.Module,
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
        mean = backward(model, rows, batch, arguments.micro_batch, device)
        norm = whole(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)).item()
        flags = [len(signals), checkpoints.is_due(step + 1), not checkpoints.is_written]
        sums = torch.tensor([mean.item(), norm / dist.get_world_size(), *flags], dtype=torch.float64)
        dist.all_reduce(sums)  # if one rank has to stop or save, all ranks do, after the same step
        mean, norm, num_asked, num_due, num_writing = sums.tolist()
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
            note["held_out_loss"] = held_out_loss(model, rows, arguments.micro_batch, device)
            if not math.isfinite(note["held_out_loss"]):
                refuse_values(f"step {step + 1}: the held-out loss is {note['held_out_loss']:.7g}", checkpoints)
        write_note(note | {"peak_bytes": peak_bytes(device)}, arguments.log)
        if num_writing == 0:
            checkpoints.finish()
        if is_last or is_asked or num_due > 0:
            checkpoints.begin(model, optimizer, step + 1)
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


def write_note(note: dict, log: Path) -> None:
    """Print a step's numbers and add them to the log. Steps that are repeated after a kill are written again."""
    if dist.get_rank() == 0:
        with log.open("a") as file:
            file.write(json.dumps(note) + "\n")
        words = [f"{name} {value:.7g}" for name, value in note.items() if name not in ("step", "peak_bytes")]
        print(f"step {note['step']}  {'  '.join(words)}  peak {note['peak_bytes'] / 1e9:.2f} GB", flush=True)


def describe(model: nn.Module) -> None:
    """Print a summary of the run before it starts."""
    own = [(one.to_local() if isinstance(one, DTensor) else one, one.requires_grad) for one in model.parameters()]
    own_bytes = sum(shard.nbytes + trained * 3 * shard.nbytes for shard, trained in own)
    num_all = sum(one.numel() for one in model.parameters())
    num_trained = sum(one.numel() for one in model.parameters() if one.requires_grad)
    kept = " and ".join(sorted({str(shard.dtype).removeprefix("torch.") for shard, _ in own}))
    units = Counter(kind_of(one) for one in model.modules() if isinstance(one, FSDPModule) and one is not model)
    say(f"{kind_of(model)}: {num_all:,} parameters, {num_trained:,} trained")
    say(f"units: {', '.join(f'{count} {name}' for name, count in units.items())}, and the root")
    say(f"rank 0 keeps {own_bytes / 1e6:,.2f} MB of parameters, gradients and moments; shards in {kept}")


def main(arguments: argparse.Namespace) -> torch.device:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if not arguments.data.exists():
        refuse(f"{arguments.data} isn't there; give a text file, JSON lines, or a folder from prepare_text.py")
    config = read_config(arguments.model)
    context = getattr(config.get_text_config(), "max_position_embeddings", None) or 4096
    arguments.length = arguments.length or min(4096, context)
    if arguments.length > context:
        refuse(f"--length {arguments.length} is longer than the model's context of {context} tokens")
    files = dtypes_in_files(arguments.model)
    empty = build(config, arguments)
    units = units_of(empty, arguments.unit)

    arguments.out.mkdir(parents=True, exist_ok=True)
    lock, device = join(arguments.out, arguments.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    computing = str(compute_dtype(device)).removeprefix("torch.")
    say(f"{dist.get_world_size()} ranks on {name}, computing in {computing}")
    if arguments.offload and device.type == "cpu":
        end_together("--offload moves shards to host memory, where CPU ranks keep them anyway", status=2)
    if dist.get_world_size() % arguments.replicas:
        end_together(f"--replicas {arguments.replicas} doesn't divide {dist.get_world_size()} ranks", status=2)
    num_experts = {one.shape[0] for one in empty.parameters() if one.dim() == 3}
    if any(number % (dist.get_world_size() // arguments.replicas) for number in num_experts):
        end_together(f"{sorted(num_experts)} experts can't be shared by {dist.get_world_size()} ranks", status=2)
    background = dist.new_group(backend="gloo", timeout=timedelta(hours=6))
    is_bf16 = arguments.lora_rank and all(dtype == torch.bfloat16 for _, dtype in files.values())
    model = load(arguments, units, compute_dtype(device) if is_bf16 else torch.float32, device)
    arguments.packed = try_out(model, device, arguments.micro_batch)
    adapted = add_adapters(model, units, arguments, device) if arguments.lora_rank else []
    describe(model)

    tokens = from_rank_0(lambda: prepared_by_rank_0(arguments), background)  # which may take hours
    if isinstance(tokens, str):
        end_together(tokens, status=2)
    arguments.digest = from_rank_0(lambda: digest_of(arguments, tokens))
    rows = Rows(arguments, tokens)
    kind = "packed" if arguments.packed else "padded"
    say(f"{len(rows.learned)} rows to train on, {len(rows.held_out)} held out, {kind}")
    arguments.steps = arguments.steps or math.ceil(arguments.epochs * len(rows.learned) / arguments.batch)
    check_resumed(arguments)

    optimizer = make_optimizer(model, arguments)
    first = load_newest(model, optimizer, arguments.out)
    if first >= arguments.steps:
        say(f"{first} of {arguments.steps} steps are already done")
    elif first:
        say(f"continuing after step {first}")
    checkpoints = Checkpoints(arguments, background)
    if not train(model, optimizer, rows, checkpoints, arguments, device, first):
        say(f"ended by a signal; the same command continues from {newest_checkpoint(arguments.out)}")
    elif adapted:
        export_adapters(model, adapted, arguments)
        say(f"the adapter is in {arguments.out / 'adapter'}")
    else:
        export(model, arguments.model, files, arguments.out, background)
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
