"""What a rank notes while it runs a script: findings, and values that are compared with the other ranks' at the end.

Nothing is sent during the run, nothing is drawn from a random generator, and no tensor of the script is changed.
"""

import functools
import hashlib
import math
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fsdp_helpers.ranks.stacks import LIBRARY, PACKAGE


class Enough(BaseException):
    """Ends a script that has been watched for enough steps; not an Exception, which it might catch."""


@dataclass(frozen=True)
class Note:
    """What a rank has to say, the line of the script that it ran at the time, and a value to compare."""

    text: str
    line: str
    value: Any


@dataclass
class Record:
    """All that one rank noted."""

    notes: dict[tuple, Note] = field(default_factory=dict)  # by kind (see `Watch.note`), card and key
    seen: set[str] = field(default_factory=set)  # subjects that there was something to look at
    troubles: dict[str, str] = field(default_factory=dict)  # probes that failed, which isn't the script's fault
    num_steps: int = 0  # of all optimizers
    end: str = ""  # how the script ended, if it didn't end well
    status: int = 0  # the script's own


class Watch:
    """Tells probes what the script does, and keeps what they note."""

    def __init__(self, steps: float = math.inf) -> None:
        """Watch until an optimizer would begin another step after `steps` ones."""
        self.steps, self.record = steps, Record()
        self.listeners, self.counts = defaultdict(list), Counter()
        self.kept: dict[Any, Any] = {}  # by probes, from one event to another
        self.models: list[nn.Module] = []  # modules that were sharded, wrapped or called by the script
        self.is_wrapped, self.is_data_parallel = False, True
        self.depth, self.in_backward, self.looking, self.with_grad = 0, False, False, True
        self.around(nn.Module, "__call__", self._call)
        self.around(torch.autograd, "backward", self._backward)
        self.around(torch.distributed.fsdp, "fully_shard", self._fully_shard)
        for wrapper in (nn.parallel.DistributedDataParallel, torch.distributed.fsdp.FullyShardedDataParallel):
            self.around(wrapper, "__init__", self._wrap)
        register_optimizer_step_pre_hook(self._step)
        register_optimizer_step_post_hook(lambda optimizer, *_: self.tell("stepped", optimizer))

    def around(self, owner: Any, name: str, replacement: Callable) -> None:
        """Call `replacement(original, ...)` instead, except inside compiled code and inside probes."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or self.looking:
                return original(*args, **kwargs)
            return replacement(original, *args, **kwargs)

        setattr(owner, name, call)

    def before(self, owner: Any, name: str, probe: Callable) -> None:
        """From now on, call `probe(watch, ...)` with each call's arguments first."""

        def replacement(original: Callable, *args: Any, **kwargs: Any) -> Any:
            self.look(probe, *args, **kwargs)
            return original(*args, **kwargs)

        self.around(owner, name, replacement)

    def tell(self, event: str, *args: Any) -> None:
        """Call the listeners `probe(watch, ...)` when the script does something.

        "shard" and "sharded" (by FSDP2), "call" (of any module), "forward" (of the outermost module, outside
        backward), "backward", "step" and "stepped", and "end".
        """
        self.counts[event] += 1
        for probe in self.listeners[event]:
            self.look(probe, *args)

    def look(self, probe: Callable, *args: Any, **kwargs: Any) -> None:
        """Run a probe. If it fails, the script goes on, and the report says so."""
        if self.looking:
            return
        self.looking, self.with_grad = True, torch.is_grad_enabled()
        try:
            with torch.no_grad():
                probe(self, *args, **kwargs)
        except Exception as error:
            self.record.troubles[probe.__name__] = f"{type(error).__name__}: {error}"
        finally:
            self.looking = False

    def note(self, kind: str, card: str, text: str, value: Any = None, key: Any = None, line: str = "") -> None:
        """Note a "finding"; or a value that all ranks that note it must have ("same"), or mustn't ("different").

        Values are compared that have the same key, which is the number of the note for this card unless you give one.
        """
        self.counts[card] += 1
        key = "first" if kind == "finding" else key or self.counts[card]
        self.record.notes.setdefault((kind, card, key), Note(text, line or place(), value))

    # Following the script

    def _call(self, original: Callable, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.depth == 0 and not self.in_backward:
            self._add_model(module)
            self.tell("forward", module, (args, kwargs))
        self.tell("call", module)
        self.depth += 1
        try:
            return original(module, *args, **kwargs)
        finally:
            self.depth -= 1

    def _backward(self, original: Callable, tensors: Any, *args: Any, **kwargs: Any) -> None:
        if self.in_backward:  # of recomputation
            return original(tensors, *args, **kwargs)
        self.tell("backward", tensors)
        self.in_backward = True
        try:
            return original(tensors, *args, **kwargs)
        finally:
            self.in_backward = False

    def _wrap(self, original: Callable, wrapper: nn.Module, *args: Any, **options: Any) -> None:
        original(wrapper, *args, **options)
        self._follow(wrapper, options.get("process_group") or options.get("device_mesh"))

    def _fully_shard(self, original: Callable, modules: Any, *args: Any, **options: Any) -> Any:
        each = modules if isinstance(modules, list) else [modules]
        self.tell("shard", each)
        result = original(modules, *args, **options)
        self.tell("sharded")
        for module in each:
            self._follow(module, options.get("mesh"))
        return result

    def _follow(self, wrapper: nn.Module, over: Any) -> None:
        """Follow a wrapper or unit; `over` is its mesh or group, None for all ranks."""
        self.is_wrapped = True
        self.is_data_parallel &= not hasattr(over, "size") or over.size() == dist.get_world_size()
        self._add_model(wrapper)

    def _step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self.record.num_steps == self.steps:  # before the same step on every rank
            raise Enough
        self.record.num_steps += 1
        self.tell("step", optimizer)

    def _add_model(self, module: nn.Module) -> None:
        if not any(one is module for one in self.models):
            self.models.append(module)

    @property
    def several(self) -> bool:
        """Return True if all ranks train one model on different data."""
        return dist.is_initialized() and dist.get_world_size() > 1 and self.is_wrapped and self.is_data_parallel

    def parameters(self) -> dict[int, str]:
        """Return the name of each of the models' parameters by the parameter's id."""
        return {id(p): name for module in self.models for name, p in module.named_parameters()}


def place() -> str:
    """Return the line that the script itself runs now, such as "train.py line 12"."""
    frame = sys._getframe()
    while frame:
        path = frame.f_code.co_filename
        if not (LIBRARY.search(path) or PACKAGE.search(path) or path.startswith("<")):
            return f"{os.path.basename(path)} line {frame.f_lineno}"
        frame = frame.f_back
    return ""


def local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def digest(tensors: Iterable[Tensor]) -> str:
    """Return a hash of the tensors' shapes and of every bit of this rank's values.

    It's computed from copies, because torch doesn't resize a storage anymore that NumPy has seen.
    """
    total = hashlib.blake2b(digest_size=8)
    for tensor in map(local, tensors):
        total.update(str((tuple(tensor.shape), tensor.dtype)).encode())
        total.update(tensor.cpu().flatten().clone().view(torch.uint8).numpy())
    return total.hexdigest()
