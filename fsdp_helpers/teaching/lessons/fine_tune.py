"""One worker with everything: a pretrained language model, fine-tuned, killed, and resumed on more ranks. Notebook 13."""

import math
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from fsdp_helpers.checkpointing.checkpoint import load, save
from fsdp_helpers.checkpointing.folder import checkpoint_name, find_newest
from fsdp_helpers.checkpointing.hugging_face import load_hugging_face, read_config, save_hugging_face
from fsdp_helpers.models.llama import Llama
from fsdp_helpers.models.shapes import llama_from_config
from fsdp_helpers.ranks.group import rank_device
from fsdp_helpers.teaching.lessons.language import backward_by_tokens, rank_parts
from fsdp_helpers.teaching.lessons.language_memory import chunked_loss
from fsdp_helpers.teaching.lessons.starts import fill_buffers


@dataclass(frozen=True, kw_only=True)
class FineTune:
    """The settings of a fine-tuning run."""

    folder: str  # of the pretrained model
    documents: Sequence[str] = field(repr=False)
    steps: int = 24
    batch: int = 24  # documents per step, over all ranks
    parts: int = 2  # micro-batches of a rank
    learning_rate: float = 5e-4
    warm_up: int = 4  # steps
    max_norm: float = 1.0
    precision: str = "bf16"  # that units are gathered and computed in; "fp32" to compare numbers of ranks
    run: str | None = None  # the folder of the run's checkpoints
    save_every: int = 8  # steps
    kill_after: int | None = None  # steps: rank 0 then kills itself, as a node that fails
    out: str | None = None  # where the model is written in the end


class Documents:
    """Batches of documents in an order that depends on the seed alone, with a position that can be saved."""

    def __init__(self, documents: Sequence[str], batch: int) -> None:
        self.documents, self.batch, self.position = documents, batch, 0

    def __next__(self) -> list[str]:
        epoch, first = divmod(self.position * self.batch, len(self.documents) // self.batch * self.batch)
        order = torch.randperm(len(self.documents), generator=torch.Generator().manual_seed(epoch))
        self.position += 1
        return [self.documents[index] for index in order[first : first + self.batch]]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def learning_rate_at(run: FineTune, step: int) -> float:
    """Return the factor of the learning rate: a line up, then half a cosine down to a tenth."""
    if step < run.warm_up:
        return (step + 1) / run.warm_up
    done = (step - run.warm_up) / max(1, run.steps - run.warm_up)
    return 0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2


def recompute(layer: nn.Module) -> nn.Module:
    """Let a layer keep only its input, and recompute the rest in backward."""
    forward = layer.forward
    layer.forward = lambda *inputs: checkpoint(forward, *inputs, use_reentrant=False)
    return layer


def start(run: FineTune, world_size: int) -> Llama:
    mesh = init_device_mesh(rank_device().type, (world_size,))
    dtype = torch.bfloat16 if run.precision == "bf16" else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)  # rows stay fp32
    with torch.device("meta"):
        model = Llama(llama_from_config(read_config(run.folder)))
    for layer in model.model.layers:
        fully_shard(recompute(layer), mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy).to_empty(device=rank_device())
    load_hugging_face(model, run.folder)
    fill_buffers(model)
    return model


def fine_tune(rank: int, world_size: int, run: FineTune) -> list[tuple[int, float]]:
    """Fine-tune, or go on from the newest checkpoint of the run; return step and loss of each step taken here."""
    model = start(run, world_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.learning_rate, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_at(run, step))
    documents, saving, losses = Documents(run.documents, run.batch), None, []
    background = dist.new_group(backend="gloo")  # for saving, so that its messages are not taken for a step's
    if run.run and find_newest(Path(run.run)):
        extra = load(run.run, model, optimizer)
        documents.load_state_dict(extra["documents"])
        schedule.load_state_dict(extra["schedule"])
    while documents.position < run.steps:
        optimizer.zero_grad()
        loss = backward_by_tokens(model, rank_parts(next(documents), run.parts, rank, world_size), chunked_loss)
        nn.utils.clip_grad_norm_(model.parameters(), run.max_norm)
        optimizer.step()
        schedule.step()
        losses.append((documents.position, loss.item()))
        if run.run and documents.position % run.save_every == 0:
            if saving:
                saving.result()  # at most one at a time
            extra = {"documents": documents.state_dict(), "schedule": schedule.state_dict()}
            name = Path(run.run, checkpoint_name(documents.position))
            saving = save(name, model, optimizer, extra=extra, wait=False, group=background)
        if documents.position == run.kill_after and rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    if saving:
        saving.result()
    if run.out:
        save_hugging_face(model, run.out, read_config(run.folder))
    return losses
