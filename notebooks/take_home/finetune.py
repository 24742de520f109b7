"""Fine-tune a Llama from Hugging Face files with FSDP2. Ranks read only their rows; the loss is per token.

Run it with `torchrun --nproc-per-node 2 finetune.py FOLDER TEXT RUN STEPS`. FOLDER has config.json and
safetensors files. If it also has tokenizer.json, `pip install tokenizers`; if not, tokens are bytes. TEXT is
a text file with blank lines between documents; only the first LONGEST tokens of each are used. Checkpoints
go in RUN, and the trained model in RUN/model. STEPS is the total: run the command again with more STEPS to
continue from the newest checkpoint, on any number of ranks that divides BATCH. You may also edit the settings
below between two runs; they apply from then on. For a different model or text, use a new RUN. All parameters
are trained. A loss or gradient that isn't finite ends the run before it changes the model. (finetune_hf.py
does the same for any causal language model of `transformers`.)
"""

import ctypes
import fcntl
import json
import math
import os
import shutil
import signal
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import _consolidate_hf_safetensors as files_of_ranks
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

DEVICE = "auto"  # a GPU per rank, or the CPU if no host has GPUs; "cuda" refuses the CPU, "cpu" ignores GPUs
BATCH = 24  # documents per step, across all ranks; it splits evenly over 2, 3, 4, 6, 8, 12 or 24 of them
LONGEST = 256  # the most tokens of a document that we use; the rest is left out
CHUNKS = 4  # we compute the logits of a quarter of the tokens at a time
LEARNING_RATE = 3e-4
WARM_UP = 4  # steps over which the learning rate rises
MAX_NORM = 1.0
SAVE_EVERY = 4  # steps between two saves; a kill loses at most this many
KEEP = 2  # how many checkpoints we keep
IGNORED = -100  # the target of a token that has no loss


def refuse(message: str) -> None:
    """End the run, since all ranks of a host find a problem in its input; the first of them says so."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"finetune.py: {message}", file=sys.stderr, flush=True)
    else:
        time.sleep(60)  # torchrun stops this rank once the first one has ended
    sys.exit(2)


def end_together(message: str, status: int) -> None:
    """End the run for a reason that all ranks have; rank 0 prints one line before torchrun can stop it."""
    if dist.get_rank() == 0:
        print(f"finetune.py: {message}", file=sys.stderr, flush=True)
    dist.barrier()
    os._exit(status)  # a leftover gloo thread can abort Python's cleanup, and then the status is another one


class Attention(nn.Module):
    """Tokens (N, length, width) -> the same; cosines and sines are (length, head_width)."""

    def __init__(self, config: dict) -> None:
        super().__init__()
        width = config["hidden_size"]
        self.head_width = width // config["num_attention_heads"]
        kv_width = self.head_width * config["num_key_value_heads"]
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, kv_width, bias=False)
        self.v_proj = nn.Linear(width, kv_width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, tokens: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        projected = [self.q_proj(tokens), self.k_proj(tokens), self.v_proj(tokens)]
        heads = [one.unflatten(-1, (-1, self.head_width)).transpose(1, 2) for one in projected]
        queries, keys, values = heads
        queries = rotate(queries, cosines, sines)
        keys = rotate(keys, cosines, sines)
        seen = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        return self.o_proj(seen.transpose(1, 2).flatten(2))


def rotate(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate heads (N, heads, length, head_width) by the angles of cosines and sines (length, head_width)."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cosines + torch.cat([-second, first], dim=-1) * sines


class MLP(nn.Module):
    """Tokens (N, length, width) -> the same."""

    def __init__(self, config: dict) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config["hidden_size"], config["intermediate_size"], bias=False)
        self.up_proj = nn.Linear(config["hidden_size"], config["intermediate_size"], bias=False)
        self.down_proj = nn.Linear(config["intermediate_size"], config["hidden_size"], bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(tokens)) * self.up_proj(tokens))


class Layer(nn.Module):
    """Tokens (N, length, width) -> the same; cosines and sines are (length, head_width)."""

    def __init__(self, config: dict) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config["hidden_size"], eps=config["rms_norm_eps"])
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config["hidden_size"], eps=config["rms_norm_eps"])
        self.mlp = MLP(config)

    def forward(self, tokens: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        tokens = tokens + self.self_attn(self.input_layernorm(tokens), cosines, sines)
        return tokens + self.mlp(self.post_attention_layernorm(tokens))


class Decoder(nn.Module):
    """Token IDs (N, length) -> hidden states (N, length, width)."""

    def __init__(self, config: dict) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))
        self.norm = nn.RMSNorm(config["hidden_size"], eps=config["rms_norm_eps"])
        num_pairs = config["hidden_size"] // config["num_attention_heads"] // 2
        self.register_buffer("inv_freq", torch.empty(num_pairs), persistent=False)  # `start` fills it

    def forward(self, numbers: Tensor) -> Tensor:
        positions = torch.arange(numbers.shape[1], device=numbers.device)
        angles = torch.outer(positions, self.inv_freq).repeat(1, 2)
        tokens = self.embed_tokens(numbers)
        # FSDP casts a layer's inputs to bf16, but PyTorch 2.11 doesn't when backward recomputes it
        cosines = angles.cos().to(tokens.dtype)
        sines = angles.sin().to(tokens.dtype)
        for layer in self.layers:  # keep only each layer's input; backward recomputes the rest
            tokens = checkpoint(layer, tokens, cosines, sines, use_reentrant=False)
        return self.norm(tokens)


class Llama(nn.Module):
    """A Llama with Hugging Face's names and arithmetic. IDs and targets (N, length) -> the summed loss."""

    def __init__(self, config: dict) -> None:
        super().__init__()
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config["hidden_size"], config["vocab_size"], bias=False)
        if config["tie_word_embeddings"]:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, numbers: Tensor, targets: Tensor) -> Tensor:
        hidden = self.model(numbers).flatten(0, 1)
        total = torch.zeros((), device=hidden.device)
        for part, wanted in zip(hidden.chunk(CHUNKS), targets.flatten().chunk(CHUNKS), strict=True):
            total = total + checkpoint(self.loss_of, part, wanted, use_reentrant=False)
        return total

    def loss_of(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the summed loss of a chunk: hidden states (tokens, width), and targets (tokens,)."""
        return F.cross_entropy(self.lm_head(hidden).float(), targets, ignore_index=IGNORED, reduction="sum")


def read_config(folder: Path) -> dict:
    """Return config.json with defaults filled in; refuse settings that this model doesn't support."""
    config = json.loads((folder / "config.json").read_text())
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {"rope_type": "default"}
    rope = {"rope_type": rope.get("type", "default")} | rope  # older files call it "type"
    if config["model_type"] != "llama" or rope["rope_type"] not in ("default", "llama3"):
        refuse(f"{folder}: this supports only Llamas with plain or Llama 3.1 positions; change the model")
    head_width = config["hidden_size"] // config["num_attention_heads"]
    if (config.get("head_dim") or head_width) != head_width:
        refuse(f"{folder}: head_dim has to be hidden_size / num_attention_heads here, {head_width}")
    if not any(folder.glob("*.safetensors")):
        refuse(f"{folder}: no safetensors files")
    index = folder / "model.safetensors.index.json"
    if index.exists():
        listed = json.loads(index.read_text())["weight_map"].values()
        for path in folder.glob("*.safetensors"):
            if path.name not in listed:  # torch reads all of them, and one tensor's last copy wins
                refuse(f"{path} isn't in the index, but torch would read it; move it out of the folder")
    if config.get("attention_bias") or config.get("mlp_bias"):
        refuse(f"{folder}: its layers have biases, which this script's model lacks; add them")
    config["num_key_value_heads"] = config.get("num_key_value_heads") or config["num_attention_heads"]
    config.setdefault("tie_word_embeddings", False)
    config["rope"] = {"rope_theta": config.get("rope_theta", 10_000.0)} | rope
    return config


def rotary_frequencies(config: dict, num_pairs: int, device: torch.device) -> Tensor:
    """Return how far each pair of values rotates from one token to the next, in radians: (num_pairs,)."""
    rope = config["rope"]
    frequencies = 1 / rope["rope_theta"] ** (torch.arange(num_pairs, device=device) / num_pairs)
    if rope["rope_type"] == "default":
        return frequencies
    # Llama 3.1: pairs that turn only a few times within the original, shorter context turn more slowly,
    # by `factor`.
    turns = frequencies * rope["original_max_position_embeddings"] / (2 * math.pi)
    kept = (turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
    kept = kept.clamp(0, 1)
    return frequencies * (kept + (1 - kept) / rope["factor"])


def read_documents(folder: Path, text: Path, vocabulary: int) -> list[Tensor]:
    """Return documents as token IDs (length,), from the folder's tokenizer or, without one, as bytes."""
    documents = [document for document in text.read_text().split("\n\n") if len(document) > 1]
    if not documents:
        refuse(f"{text} has no text to train on")
    if (folder / "tokenizer.json").exists():
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokens = [tokenizer.encode(document).ids for document in documents]
    elif vocabulary == 256:
        tokens = [list(document.encode()) for document in documents]
    else:
        refuse(f"{folder}: no tokenizer.json, and a vocabulary of {vocabulary}, which can't be bytes")
    return [torch.tensor(document) for document in tokens]


def load_batch(documents: list[Tensor], step: int) -> tuple[Tensor, Tensor]:
    """Return the token IDs and targets of this step's global batch, both of shape (BATCH, length).

    Each epoch contains every document once, in a new order.
    """
    rows = []
    for index in range(step * BATCH, (step + 1) * BATCH):
        epoch, place = divmod(index, len(documents))
        if not rows or place == 0:
            order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(epoch))
        rows.append(documents[order[place]][:LONGEST])
    numbers = nn.utils.rnn.pad_sequence([row[:-1] for row in rows], batch_first=True)
    targets = nn.utils.rnn.pad_sequence([row[1:] for row in rows], batch_first=True, padding_value=IGNORED)
    return numbers, targets


def tensors_in_files(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's tensors by name, as DTensors of full shape; a tied head isn't in any file."""
    tensors = get_model_state_dict(model)
    if model.lm_head.weight is model.model.embed_tokens.weight:
        del tensors["lm_head.weight"]
    return tensors


def start(config: dict, folder: Path, device: torch.device) -> Llama:
    """Return the sharded model, of which each rank has read only its own rows.

    The head is in the root: as its own unit, it would be all-gathered again for every chunk of the loss.
    """
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    # The shards stay in fp32, because in bf16 most updates would be too small to change a value.
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype(device), reduce_dtype=torch.float32)
    with torch.device("meta"):
        model = Llama(config)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=device)
    dcp.load(tensors_in_files(model), storage_reader=dcp.HuggingFaceStorageReader(str(folder)))
    buffer = model.model.inv_freq
    buffer.copy_(rotary_frequencies(config, len(buffer), device))
    return model


def compute_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "cpu" else torch.bfloat16  # CPU ranks emulate bf16, slowly


def learning_rate(step: int, steps: int) -> float:
    """Return a step's learning rate: a linear rise, then half a cosine down to a tenth of the peak."""
    if step < WARM_UP:
        return LEARNING_RATE * (step + 1) / WARM_UP
    done = (step - WARM_UP) / max(1, steps - WARM_UP)
    return LEARNING_RATE * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)


def save(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Write a checkpoint under a temporary name, then rename it: a killed run never leaves half of one."""
    unfinished = path.with_name(f"unfinished-{path.name}")
    if dist.get_rank() == 0:
        shutil.rmtree(unfinished, ignore_errors=True)  # left by a killed run
    dist.barrier()  # rank 0 has to remove the old folder before any rank creates a new one
    parameters, moments = get_state_dict(model, optimizer)
    dcp.save({"model": parameters, "optimizer": moments}, checkpoint_id=unfinished)
    if dist.get_rank() == 0:
        unfinished.rename(path)
        for older in sorted(path.parent.glob("step-*"))[:-KEEP]:
            remove(older)
    dist.barrier()


def remove(path: Path) -> None:
    """Rename a folder before removing it, so that a killed run never leaves half of one under its name."""
    nameless = path.with_name(f"unfinished-removal-of-{path.name}")
    shutil.rmtree(nameless, ignore_errors=True)
    path.rename(nameless)
    shutil.rmtree(nameless)


def newest_checkpoint(run: Path) -> Path | None:
    return max(run.glob("step-*"), default=None)


def load_newest(model: nn.Module, optimizer: torch.optim.Optimizer, run: Path) -> int:
    """Load the newest checkpoint and return its step, or 0 if there's no checkpoint."""
    found = [newest_checkpoint(run)]
    dist.broadcast_object_list(found)  # rank 0's answer, since other hosts may see an older folder
    newest = found[0]
    if newest is None:
        return 0
    parameters, moments = get_state_dict(model, optimizer)
    dcp.load({"model": parameters, "optimizer": moments}, checkpoint_id=newest)
    set_state_dict(model, optimizer, model_state_dict=parameters, optim_state_dict=moments)
    return int(newest.name.removeprefix("step-"))


def file_numbers(folder: Path, names: list[str]) -> dict[str, int]:
    """Return each tensor's file, counted from 1: as in the folder's index or, without one, all in file 1."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return dict.fromkeys(names, 1)
    listed = json.loads(index.read_text())["weight_map"]
    files = sorted({listed[name] for name in names})
    return {name: files.index(listed[name]) + 1 for name in names}


def export(model: nn.Module, folder: Path, out: Path) -> None:
    """Write the model as a Hugging Face folder: every rank writes its rows, which are then joined.

    The ranks share the files to be joined. That can take longer than the default limit of 30 minutes.
    """
    group = dist.new_group(backend="gloo", timeout=timedelta(hours=6))
    unfinished = out.with_name(f"unfinished-{out.name}")
    if dist.get_rank() == 0:
        shutil.rmtree(unfinished, ignore_errors=True)  # or torch would join a killed run's rows, too
        unfinished.mkdir()
    dist.barrier()
    tensors = tensors_in_files(model)
    files = file_numbers(folder, list(tensors))
    sharded = str(unfinished / "sharded")
    writer = dcp.HuggingFaceStorageWriter(sharded, fqn_to_index_mapping=files, save_distributed=True)
    dcp.save(tensors, storage_writer=writer, process_group=group)
    join_files = files_of_ranks.consolidate_safetensors_files_on_every_rank
    join_files(sharded, str(unfinished), files, process_group=group)
    if dist.get_rank() == 0:
        shutil.rmtree(sharded)
        for path in folder.iterdir():
            if path.is_file() and ".safetensors" not in path.name:
                shutil.copy(path, unfinished)  # tokenizer, chat template, settings for generating ...
        config = json.loads((folder / "config.json").read_text())
        config.pop("torch_dtype", None)  # the older name of "dtype"
        config["dtype"] = "float32"  # the dtype it was trained in
        (unfinished / "config.json").write_text(json.dumps(config, indent=2))
        if out.exists():
            remove(out)
        unfinished.rename(out)
    dist.barrier()


def end_with_torchrun() -> None:
    """Have Linux kill this rank if torchrun is killed; otherwise it could overlap with the next run."""
    if sys.platform == "linux":
        torchrun = os.getppid()
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG
        if os.getppid() != torchrun:
            sys.exit("torchrun was killed")  # it died before the call above


def take(lock, run: Path, kind: int, patience_s: float = 0.0) -> None:
    """Keep other runs from writing to `run`: rank 0 takes the lock, then all ranks share it."""
    deadline_s = time.monotonic() + patience_s  # the ranks of a killed run may need a moment to end
    while True:
        try:
            return fcntl.flock(lock, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                refuse(f"another run is writing to {run}; wait until it ends, or choose another folder")
        time.sleep(0.1)


def choose_device() -> torch.device:
    """Return this rank's own GPU if every host has one for each of its ranks, or the CPU if none has any."""
    num_gpus = 0 if DEVICE == "cpu" else torch.cuda.device_count()
    hosts = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, (socket.gethostname(), num_gpus, int(os.environ["LOCAL_WORLD_SIZE"])))
    hosts = sorted(set(hosts))
    lacking = [f"{name} (GPUs: {gpus}, ranks: {ranks})" for name, gpus, ranks in hosts if gpus < ranks]
    if not lacking:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        return device
    if DEVICE == "cuda" or any(gpus for _, gpus, _ in hosts):
        found = f"fewer GPUs than ranks on {', '.join(lacking)}"
        end_together(f"{found}; fix that, or set DEVICE to 'cpu'", status=2)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # or Adam would touch a GPU, even for CPU tensors
    return torch.device("cpu")


def join() -> torch.device:
    """Form the group of ranks, and return this rank's device, on which all hosts have agreed over the CPU."""
    store, rank, world_size = next(dist.rendezvous("env://"))
    place = {"rank": rank, "world_size": world_size}
    dist.init_process_group("gloo", store=dist.PrefixStore("cpu", store), **place)
    device = choose_device()
    if device.type == "cuda":
        dist.destroy_process_group()
        dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.PrefixStore("cuda", store), **place)
    return device


def main(folder: str, text: str, run: str, steps: str) -> torch.device:
    folder = Path(folder)
    run = Path(run)
    steps = int(steps)
    config = read_config(folder)
    documents = read_documents(folder, Path(text), config["vocab_size"])
    run.mkdir(parents=True, exist_ok=True)
    lock = (run / ".lock").open("a+")  # "+", because NFS refuses a shared lock on a file that can't be read
    if os.environ["RANK"] == "0":
        take(lock, run, fcntl.LOCK_EX, patience_s=5)  # before the group forms, where the others wait
        for leftover in [*run.glob("unfinished-step-*"), *run.glob("unfinished-removal-of-*")]:
            shutil.rmtree(leftover, ignore_errors=True)  # left by a killed run, each as large as a checkpoint
    device = join()
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    if rank == 0:
        take(lock, run, fcntl.LOCK_SH)
    dist.barrier()
    take(lock, run, fcntl.LOCK_SH)
    if rank == 0:
        dtype = str(compute_dtype(device)).removeprefix("torch.")
        num_cut = sum(len(document) > LONGEST for document in documents)
        print(f"{world_size} ranks on {device.type}, computing in {dtype}; shards in float32", flush=True)
        print(f"{len(documents)} documents; {num_cut} of them are cut at {LONGEST} tokens", flush=True)
    model = start(config, folder, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    first = load_newest(model, optimizer, run)
    if rank == 0 and first >= steps:
        print(f"{run} already has {first} steps; STEPS is the total, counted from the beginning", flush=True)

    signals = []  # SIGTERM comes before the time limit; we note it here and complete the step first
    signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
    for step in range(first, steps):
        numbers, targets = load_batch(documents, step)
        num_tokens = (targets != IGNORED).sum()  # of all ranks, since every rank has the global batch here
        numbers = numbers.chunk(world_size)[rank].to(device)
        targets = targets.chunk(world_size)[rank].to(device)
        loss = model(numbers, targets) / num_tokens.to(device)
        optimizer.zero_grad()
        (loss * world_size).backward()  # undo FSDP's division by the number of ranks; we divide by tokens
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).full_tensor().item()
        sums = torch.tensor([loss.item(), len(signals)], dtype=torch.float64)
        dist.all_reduce(sums)  # if any rank got the signal, all of them stop after the same step
        if not math.isfinite(sums[0] + norm):  # the same on all ranks; nothing is changed or saved yet
            found = f"step {step + 1}: the loss is {sums[0]:.7g}, and the gradient's norm is {norm:.7g}"
            end_together(f"{found}; the newest good checkpoint is {newest_checkpoint(run)}", status=1)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        optimizer.step()

        if rank == 0:
            print(f"step {step + 1}  loss {sums[0]:.7f}", flush=True)
        is_asked = sums[1] > 0
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == steps or is_asked:
            save(model, optimizer, run / f"step-{step + 1:08d}")
        if is_asked:
            break
    else:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # everything is saved, and an export can be repeated
        export(model, folder, run / "model")
    dist.destroy_process_group()
    lock.close()
    return device


if __name__ == "__main__":
    if len(sys.argv) != 5 or "LOCAL_RANK" not in os.environ:
        refuse("start it with `torchrun --nproc-per-node 2 finetune.py FOLDER TEXT RUN STEPS`")
    num_ranks = int(os.environ["WORLD_SIZE"])
    if BATCH % num_ranks:
        refuse(f"{num_ranks} ranks can't split {BATCH} documents evenly; change one of the two numbers")
    end_with_torchrun()
    chosen = main(*sys.argv[1:])
    if chosen.type == "cpu":
        os._exit(0)  # a leftover gloo thread can abort Python's cleanup; this skips it, `atexit` included
