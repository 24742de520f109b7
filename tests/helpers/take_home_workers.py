"""The take-home scripts, and their models and batches trained by the package. Every rank imports this module."""

import contextlib
import importlib.util
import io
import os
import shutil
import signal
import time
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_helpers.measuring.collectives import count_collectives, trace_collectives
from fsdp_helpers.sharding.recompute import is_checkpointed
from fsdp_helpers.sharding.strategies import unit_names

FOLDER = Path(__file__).resolve().parents[2] / "notebooks" / "take_home"
SMALL_NORM = 0.1  # for levers.py, whose norms are about 0.8


def load_script(name: str | Path) -> ModuleType:
    """A take-home script, or one at another path, as a module; nothing in it runs."""
    spec = importlib.util.spec_from_file_location(Path(name).stem, FOLDER / name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_main(rank, world_size, name, port, arguments) -> str:
    """The `main` of a script in a rank that stands as under torchrun, on the CPU; what it prints.

    The store of the meeting point is the agent's there, and the test's here.
    """
    return main_on_cpu(load_script(name), port, arguments)


def ask_one_rank_to_end(rank, world_size, port, arguments, asked: int, at_step: int) -> str:
    """checkpoint.py, in which rank `asked` alone receives SIGTERM, while it does step `at_step`."""
    script = load_script("checkpoint.py")
    load_batch = script.load_batch

    def interrupted(step: int):
        if (rank, step) == (asked, at_step):
            os.kill(os.getpid(), signal.SIGTERM)
        return load_batch(step)

    script.load_batch = interrupted
    return main_on_cpu(script, port, arguments)


def save_steps_of(rank, world_size, port, arguments) -> list[int]:
    """The steps after which checkpoint.py saves."""
    script, steps = load_script("checkpoint.py"), []
    script.save_checkpoint = lambda folder, state: steps.append(state["step"])
    main_on_cpu(script, port, arguments)
    return steps


def main_on_cpu(script: ModuleType, port: int, arguments) -> str:
    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        script.main(torch.device("cpu"), *arguments)
    return printed.getvalue()


def shard_each(rank, world_size, runs: dict[str, tuple]) -> dict[str, tuple[list[str], list[dict]]]:
    """Scripts and their arguments -> the units of each one's model, and how it asks for each unit.

    All of them in the group of this launch, which no script makes or ends.
    """
    dist.init_process_group = dist.destroy_process_group = lambda *_: None
    return {name: units_and_settings(load_script(name), arguments) for name, arguments in runs.items()}


def units_and_settings(script: ModuleType, arguments: tuple) -> tuple[list[str], list[dict]]:
    api = "fully_shard" if hasattr(script, "fully_shard") else "FullyShardedDataParallel"
    shard, made, settings = getattr(script, api), [], []

    def note(module, **chosen):
        made.append(shard(module, **chosen))
        settings.append({name: chosen[name] for name in ("mp_policy", "offload_policy") if name in chosen})
        settings[-1] |= {"recomputed": True} if is_checkpointed(module) else {}
        return made[-1]

    def refuse(module, *_):
        raise AssertionError(f"{script.__name__} moves a whole {type(module).__name__}, which is to be sharded")

    setattr(script, api, note)
    script.STEPS = 1
    with contextlib.redirect_stdout(io.StringIO()), patch.object(nn.Module, "to", refuse):
        script.main(torch.device("cpu"), *arguments)
    return unit_names(made[-1]), settings


def train_alone(name: str, steps: int = 6, seed: int = 0, norms: list[float] | None = None) -> list[float]:
    """The losses of the script's model in a loop of plain torch: one process, whole batches, nothing saved or loaded.

    With a list for `norms`, gradients are clipped to SMALL_NORM, and their norms are added to the list.
    """
    script = load_script(name)
    torch.manual_seed(seed)
    model = script.ViT() if name == "vit.py" else script.build_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    losses = []
    for step in range(steps):
        inputs, labels = script.load_batch(step)
        loss = F.cross_entropy(model(inputs).flatten(0, -2), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        if norms is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), SMALL_NORM).item())
        optimizer.step()
        if name == "checkpoint.py":
            schedule.step()
        losses.append(loss.item())
    return losses


def run_each(rank, world_size, runs: dict[str, tuple]) -> dict[str, str]:
    """Scripts and their arguments -> what each prints, in the group of this launch, which no script makes or ends.

    Each finds another state of the random numbers on each rank. levers.py computes in fp32, so that losses can be equal,
    and clips to a norm that matters.
    """
    dist.init_process_group = dist.destroy_process_group = lambda *_: None
    printed = {}
    for name, arguments in runs.items():
        script = load_script(name)
        if name == "levers.py":
            script.MixedPrecisionPolicy = lambda **_: MixedPrecisionPolicy()
            script.MAX_NORM = SMALL_NORM
        torch.manual_seed(100 + rank)
        with contextlib.redirect_stdout(io.StringIO()) as output:
            script.main(torch.device("cpu"), *arguments)
        printed[name] = output.getvalue()
    return printed


def ddp_job_that_saves(folder: Path, steps: int) -> tuple[Path, Path]:
    """ddp.py with the lines from from_ddp.py's docstring, as a job of so many steps; its path, and the file's."""
    shown = [line for line in load_script("from_ddp.py").__doc__.splitlines() if line.startswith("    ")]
    assert len(shown) == 4
    end = "    dist.destroy_process_group()\n"
    text = (FOLDER / "ddp.py").read_text()
    assert text.count(end) == text.count("\nSTEPS = 6\n") == 1
    text = text.replace("\nSTEPS = 6\n", f"\nSTEPS = {steps}\n").replace(end, "\n".join([*shown, end]))
    job, file = folder / "ddp_job.py", folder / "ddp.pt"
    job.write_text(text.replace('"FILE"', repr(str(file))))
    return job, file


def levers_of_a_step(rank, world_size) -> tuple[dict[str, int], set[torch.dtype]]:
    """How many collectives of each kind levers.py makes in its only step, in the group of this launch; dtypes of its loss."""
    dist.init_process_group = dist.destroy_process_group = lambda *_: None
    script, dtypes, cross_entropy = load_script("levers.py"), set(), F.cross_entropy
    script.STEPS = 1

    def note_dtype(outputs, labels):
        dtypes.add(outputs.dtype)
        return cross_entropy(outputs, labels)

    with (
        contextlib.redirect_stdout(io.StringIO()),
        trace_collectives() as seen,
        patch.object(F, "cross_entropy", note_dtype),
    ):
        script.main(torch.device("cpu"))
    return {counted.op: counted.count for counted in count_collectives(seen)}, dtypes


LEFT_BY_A_KILLED_RUN = ("unfinished-000001", "unfinished-step-1", "unfinished-model")


def save_beside_a_slow_removal(rank, world_size, folder: Path) -> list[bool]:
    """checkpoint.py and finetune.py save where a killed run left a folder, which rank 0 takes its time to remove.

    Whether it was still there when this rank began to write: for each save, and for the export.
    """
    keeping, tuning = load_script("checkpoint.py"), load_script("finetune.py")
    remove, save, found = shutil.rmtree, dcp.save, []
    model, folders = nn.Linear(2, 2), iter(LEFT_BY_A_KILLED_RUN)

    def remove_slowly(path: Path, **settings) -> None:
        time.sleep(0.3)
        remove(path, **settings)

    def look_and_save(*state, **settings) -> None:
        found.append((folder / next(folders) / "left").exists())
        save(*state, **settings)

    with patch.object(shutil, "rmtree", remove_slowly), patch.object(dcp, "save", look_and_save):
        keeping.save = look_and_save
        keeping.save_checkpoint(folder, {"weights": torch.ones(2), "step": 1})
        tuning.save(model, torch.optim.AdamW(model.parameters()), folder / "step-1")
        tuning.tensors_in_files = nn.Module.state_dict
        tuning.export(model, folder / "base", folder / "model")
    return found


def load_beside_an_older_listing(rank, world_size, folder: Path, steps: tuple[int, int]) -> tuple[int, float]:
    """checkpoint.py loads from a folder with two checkpoints, of which rank 1 sees the older one alone, as NFS may have it.

    The step that it returns, and a weight, which was that step when it was saved.
    """
    script = load_script("checkpoint.py")
    mesh = dist.init_device_mesh("cpu", (world_size,))
    model = script.fully_shard(nn.Linear(2, 2), mesh=mesh)
    adam = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, T_max=20)
    for step in steps:
        nn.init.constant_(model.weight, step)
        script.save_checkpoint(folder, script.state_to_keep(model, adam, schedule, step))
        if rank == 0 and step == steps[0]:
            shutil.copytree(folder / f"{step:06}", folder / "kept")
    if rank == 0:
        (folder / "kept").rename(folder / f"{steps[0]:06}")
    dist.barrier()
    nn.init.zeros_(model.weight)
    glob = Path.glob

    def glob_as_this_node(path: Path, pattern: str) -> list[Path]:
        return [found for found in glob(path, pattern) if rank == 0 or found.name == f"{steps[0]:06}"]

    with patch.object(Path, "glob", glob_as_this_node):
        step = script.load_newest(folder, model, adam, schedule)
    return step, model.weight.full_tensor()[1, 1].item()
