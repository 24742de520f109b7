"""What a rank notes while it runs a script: findings, and facts that are compared with the other ranks' at the end.

Nothing is sent during the run, nothing is drawn from a random generator, and no tensor of the script is changed.
"""

import functools
import hashlib
import os
import sys
import weakref
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

MOST_FACTS = 200  # for one card; a script that runs to its end would otherwise send megabytes


class Enough(BaseException):
    """Ends a script that has been watched for enough steps; not an Exception, which it might catch."""


@dataclass(frozen=True)
class Note:
    """What a rank has to say about a card, and the line of the script that it ran at the time."""

    card: str
    text: str
    line: str
    value: Any = None  # compared with the other ranks'


@dataclass
class Record:
    """All that one rank noted."""

    findings: dict[str, Note] = field(default_factory=dict)  # by card; only the first of each
    agree: dict[tuple, Note] = field(default_factory=dict)  # a finding if ranks have different values
    differ: dict[tuple, Note] = field(default_factory=dict)  # a finding if all ranks have the same value
    seen: Counter = field(default_factory=Counter)  # subject -> how often there was something to look at
    troubles: dict[str, str] = field(default_factory=dict)  # probes that failed, which isn't the script's fault
    end: str = ""  # how the script ended, if it didn't end well


class Watch:
    """Tells probes what the script does. `before`, `after` and `on` register them; `say` and the facts are theirs."""

    def __init__(self, must_stop: Callable[[], bool] = lambda: False) -> None:
        self.must_stop, self.first_optimizer = must_stop, None
        self.record, self.listeners, self.counts = Record(), defaultdict(list), Counter()
        self.roots: list[weakref.ref] = []  # models: modules that were sharded, wrapped or called by the script
        self.wrapped: list[weakref.ref] = []  # those that were sharded or wrapped
        self.depth, self.in_backward, self.looking, self.with_grad = 0, False, False, True
        self.is_data_parallel = True
        self.around(nn.Module, "__call__", self._call)
        self.around(torch.autograd, "backward", self._backward)
        self.around(torch.distributed.fsdp, "fully_shard", self._fully_shard)
        for wrapper in (nn.parallel.DistributedDataParallel, torch.distributed.fsdp.FullyShardedDataParallel):
            self.around(wrapper, "__init__", self._wrap)
        register_optimizer_step_pre_hook(self._step)
        register_optimizer_step_post_hook(lambda optimizer, *_: self.tell("stepped", optimizer))

    # Registering

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
        """Call `probe` with each call's arguments first."""

        def replacement(original: Callable, *args: Any, **kwargs: Any) -> Any:
            self.look(probe, *args, **kwargs)
            return original(*args, **kwargs)

        self.around(owner, name, replacement)

    def after(self, owner: Any, name: str, probe: Callable) -> None:
        """Call `probe` with each call's result and arguments afterward."""

        def replacement(original: Callable, *args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self.look(probe, result, *args, **kwargs)
            return result

        self.around(owner, name, replacement)

    def on(self, event: str, probe: Callable) -> None:
        """Call `probe` when the script does something.

        "wrap" and "wrapped" (a model is sharded or wrapped), "call" (any module), "forward" and "output" (the
        outermost module, outside backward), "backward" and "gradients", "step" and "stepped", and "end".
        """
        self.listeners[event].append(probe)

    def tell(self, event: str, *args: Any) -> None:
        for probe in self.listeners[event]:
            self.look(probe, *args)

    def look(self, probe: Callable, *args: Any, **kwargs: Any) -> None:
        """Run a probe. If it fails, the script goes on, and the report says so."""
        if self.looking:
            return
        self.looking, self.with_grad = True, torch.is_grad_enabled()
        try:
            with torch.no_grad():
                probe(*args, **kwargs)
        except Exception as error:
            self.record.troubles[probe.__qualname__.partition(".")[0]] = f"{type(error).__name__}: {error}"
        finally:
            self.looking = False

    # Noting

    def say(self, card: str, text: str, line: str | None = None) -> None:
        """Note a finding; only the first one for a card is kept. `line` is where the script is now, if it's None."""
        self.record.findings.setdefault(card, Note(card, text, place() if line is None else line))

    def agree(self, card: str, key: Any, value: Any, text: str, line: str | None = None) -> None:
        """Note a fact that has to be the same on all ranks that note it."""
        self._compare(self.record.agree, Note(card, text, place() if line is None else line, value), key)

    def differ(self, card: str, key: Any, value: Any, text: str, line: str | None = None) -> None:
        """Note a fact that mustn't be the same on all ranks."""
        self._compare(self.record.differ, Note(card, text, place() if line is None else line, value), key)

    def saw(self, subject: str) -> None:
        self.record.seen[subject] += 1

    def _compare(self, facts: dict[tuple, Note], note: Note, key: Any) -> None:
        self.counts[note.card] += 1
        if self.counts[note.card] <= MOST_FACTS:
            facts[(note.card, key)] = note

    # Following the script

    def _call(self, original: Callable, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        is_outermost = self.depth == 0 and not self.in_backward
        if is_outermost:
            self.add_root(module)
            self.tell("forward", module, args, kwargs)
        self.tell("call", module, args)
        self.depth += 1
        try:
            output = original(module, *args, **kwargs)
        finally:
            self.depth -= 1
        if is_outermost:
            self.tell("output", module, output)
        return output

    def _backward(self, original: Callable, tensors: Any, *args: Any, **kwargs: Any) -> None:
        if self.in_backward:  # of recomputation
            return original(tensors, *args, **kwargs)
        self.tell("backward", tensors)
        self.in_backward, error = True, None
        try:
            return original(tensors, *args, **kwargs)
        except BaseException as raised:
            error = raised
            raise
        finally:
            self.in_backward = False
            self.tell("gradients", tensors, error)

    def _wrap(self, original: Callable, wrapper: nn.Module, module: nn.Module, *args: Any, **options: Any) -> None:
        self.tell("wrap", module, options)
        original(wrapper, module, *args, **options)
        self._wrapped(wrapper)

    def _step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.first_optimizer = self.first_optimizer or weakref.ref(optimizer)
        if self.first_optimizer() is optimizer and self.must_stop():
            raise Enough
        self.tell("step", optimizer)

    def _fully_shard(self, original: Callable, modules: Any, *args: Any, **options: Any) -> Any:
        each = modules if isinstance(modules, list) else [modules]
        for module in each:
            self.tell("wrap", module, options)
        result = original(modules, *args, **options)
        mesh = options.get("mesh")
        self.is_data_parallel &= mesh is None or mesh.size() == dist.get_world_size()
        for module in each:
            self._wrapped(module)
        return result

    def _wrapped(self, wrapper: nn.Module) -> None:
        self.wrapped.append(weakref.ref(wrapper))
        self.add_root(wrapper)
        self.tell("wrapped", wrapper)

    def add_root(self, module: nn.Module) -> None:
        if not any(root() is module for root in self.roots):
            self.roots.append(weakref.ref(module))

    # What probes ask

    @property
    def several(self) -> bool:
        """Return True if all ranks train one model on different data."""
        return dist.is_initialized() and dist.get_world_size() > 1 and bool(self.wrapped) and self.is_data_parallel

    def models(self) -> list[nn.Module]:
        return [module for root in self.roots if (module := root()) is not None]

    def parameters(self) -> dict[int, tuple[str, nn.Parameter]]:
        """Return the models' parameters by their id, with the longest of their names."""
        found: dict[int, tuple[str, nn.Parameter]] = {}
        for module in self.models():
            for name, parameter in module.named_parameters():
                if len(name) > len(found.get(id(parameter), ("", None))[0]):
                    found[id(parameter)] = name, parameter
        return found


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


def listed(names: Iterable[str], most: int = 3) -> str:
    """Return a few names, and how many more there are."""
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
