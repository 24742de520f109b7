"""Probes of what ranks read and write: files that several of them write, and states that are loaded or saved."""

import hashlib
import os
import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from fsdp_helpers.inspecting.watch import Watch, listed, place
from fsdp_helpers.ranks.stacks import LIBRARY


def written_by_all(watch: Watch) -> None:
    """Note the files that the script opens for writing (an audit hook), and those of `torch.save`.

    Silent about files that libraries open, that are empty at the end, and that aren't on all ranks.
    """

    def opened(event: str, args: tuple) -> None:
        if event != "open" or watch.looking or not isinstance(args[0], str) or not isinstance(args[1], str):
            return
        if set("wax+") & set(args[1]) and is_ours() and not args[0].startswith(("/dev/", "/proc/")):
            note("wrong-every-rank-logs", args[0])

    def saved(result: None, content: Any, target: Any, *_: Any, **__: Any) -> None:
        watch.saw("saving")
        if isinstance(target, (str, os.PathLike)):
            note("save-half-written", os.fspath(target))

    def note(card: str, path: str) -> None:
        is_early = not watch.record.seen["saving"] and not watch.record.seen["losses"]
        files.setdefault(os.path.abspath(path), (card, place(), is_early))

    def at_end() -> None:
        for path, (card, line, is_early) in files.items():
            folder, name = os.path.split(path)
            size = os.path.getsize(path) if os.path.isfile(path) else None
            if size != 0:  # an empty file is a lock, or a mark
                watch.differ(card, path, "written", f"every rank writes {name}", line)
            if size and is_early and os.environ.get("RANK", "0") in name:
                with open(path, "rb") as file:
                    content = hashlib.file_digest(file, "sha256").hexdigest()
                text = f"every rank writes the same {size} bytes to a file of its own, here {name}"
                watch.differ("slow-every-rank-downloads", (folder, line), content, text, line)

    files: dict[str, tuple[str, str, bool]] = {}
    watch.on("end", at_end)
    sys.addaudithook(opened)
    watch.after(torch, "save", saved)


def is_ours() -> bool:
    """Return True if the script itself opens a file, perhaps through Python's own modules."""
    frame = sys._getframe(2)
    while frame and LIBRARY.search(frame.f_code.co_filename) and "-packages" not in frame.f_code.co_filename:
        frame = frame.f_back
    return frame is not None and bool(place()) and "-packages" not in frame.f_code.co_filename


def loading(watch: Watch) -> None:
    """Look at what is given to the functions that load a model's state, and at what they skip.

    Silent about partial states with `strict=False`, if any name matches.
    """
    read: set[int] = set()  # the addresses of tensors from torch.load

    def loaded_file(content: Any, *_: Any, **__: Any) -> None:
        read.update(leaf.data_ptr() for leaf in tree_leaves(content) if isinstance(leaf, Tensor))

    def set_state(model: nn.Module, model_state_dict: Mapping, *, options: Any = None) -> None:
        watch.saw("loading")
        plain = [value for value in model_state_dict.values() if type(value) is Tensor]
        tensors = [value for value in plain if value.data_ptr() in read]
        if options is not None and options.broadcast_from_rank0 and tensors and torch.distributed.get_rank():
            num_bytes = sum(value.nbytes for value in tensors)
            watch.say("memory-every-rank-loads", f"this rank has read {num_bytes} bytes, and gets the same from rank 0")
        wanted = [name.replace("_orig_mod.", "").removeprefix("module.") for name, _ in model.named_parameters()]
        if options is not None and not options.strict and not set(wanted) & set(model_state_dict):
            compare(wanted, model_state_dict)

    def loaded(result: Any, module: nn.Module, state_dict: Mapping, *_: Any, **__: Any) -> None:
        watch.saw("loading")
        wanted = [name for name, _ in module.named_parameters()]
        if wanted and set(getattr(result, "missing_keys", ())) >= set(wanted):
            compare(wanted, state_dict)

    def compare(wanted: list[str], state: Mapping) -> None:
        if state:
            text = f"none of the model's {len(wanted)} names ({listed(wanted, 1)}) is in the state"
            watch.say("save-not-loaded", f"{text}, which has {listed(map(str, state), 1)}")

    watch.after(torch, "load", loaded_file)
    watch.before(states, "set_model_state_dict", set_state)
    watch.after(nn.Module, "load_state_dict", loaded)


def distributed_checkpoints(watch: Watch) -> None:
    """Compare what `dcp.load` fills with the models and with what the checkpoint has.

    Silent once the filled state is given to any function that sets it, and about states without an optimizer.
    """
    filled: list[tuple[int, str, str]] = []

    def load(_: None, state: dict, *args: Any, **options: Any) -> None:
        watch.saw("loading")
        names = {name for model in watch.models() for name, p in model.named_parameters() if isinstance(p, DTensor)}
        plain = [name for name, value in state.items() if isinstance(value, Tensor) and not isinstance(value, DTensor)]
        if names and names <= set(plain):
            filled.append((id(state), listed(plain), place()))
        checkpoint = options.get("checkpoint_id")
        if checkpoint is not None:
            there = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
            compare_optimizers(state, there)

    def compare_optimizers(state: dict, there: Mapping) -> None:
        for name, part in state.items():
            if isinstance(part, dict) and "param_groups" in part and not part.get("state"):
                if moments := [entry for entry in there if entry.startswith(f"{name}.state.")]:
                    text = f"the checkpoint has {len(moments)} entries of the optimizer's state ({listed(moments, 2)})"
                    watch.say("save-plain-optimizer-state", f"{text}, and {name!r} asks for none of them")

    def used(*args: Any, **options: Any) -> None:
        given = {id(value) for value in (*args, *options.values())}
        filled[:] = [entry for entry in filled if entry[0] not in given]

    def check(*_: Any) -> None:
        for _, names, line in filled:
            watch.say("save-not-set", f"dcp.load filled copies of {names}, which were never set in the model", line)
        filled.clear()

    watch.after(dcp, "load", load)
    for owner, name in (
        (states, "set_model_state_dict"),
        (states, "set_state_dict"),
        (nn.Module, "load_state_dict"),
    ):
        watch.before(owner, name, used)
    watch.on("forward", check)
    watch.on("end", check)


def full_states(watch: Watch) -> None:
    """Add up what `get_model_state_dict` gives a rank in full, on its device.

    Silent about states that go to the host's memory on one rank, and about those that every rank loads into a module.
    """
    held: dict[int, tuple[str, str]] = {}

    def got(state: dict, model: nn.Module, *args: Any, options: Any = None, **_: Any) -> None:
        if options is None or not options.full_state_dict or options.cpu_offload:
            return
        shards = sum(p.to_local().nbytes for p in model.parameters() if isinstance(p, DTensor))
        full = sum(value.nbytes for value in state.values() if isinstance(value, Tensor))
        if shards and full > shards and watch.several:
            held[id(state)] = f"a state dict holds {full} bytes on this rank; its shards are {shards}", place()

    def load(module: nn.Module, state_dict: Mapping, *_: Any, **__: Any) -> None:
        held.pop(id(state_dict), None)

    def at_end() -> None:
        for text, line in held.values():
            watch.say("memory-full-state-dict", text, line)

    watch.after(states, "get_model_state_dict", got)
    watch.before(nn.Module, "load_state_dict", load)
    watch.on("end", at_end)


PROBES = [written_by_all, loading, distributed_checkpoints, full_states]
