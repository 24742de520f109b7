"""Track a rank's memory during a step as a sum of named terms, and the step's tasks in order. No torch import."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fsdp_helpers.planning.streams import ARITHMETIC, AT_END, AT_START, COMMUNICATION, COPIES, Task
from fsdp_helpers.planning.traffic import ring_sent_bytes
from fsdp_helpers.records import CollectiveCount

KINDS = ("parameters", "optimizer", "gradients", "gathered", "buffers", "activations")


@dataclass(frozen=True, kw_only=True)
class Term:
    """One term of the sum: `values` times `value_bytes`, divided by the number of ranks that share it."""

    kind: str  # one of KINDS
    name: str
    values: int
    value_bytes: int = 4
    ranks: int = 1

    @property
    def bytes(self) -> int:
        return self.value_bytes * self.values // self.ranks

    @property
    def label(self) -> str:
        return f"{'unsharded' if self.kind == 'gathered' else self.kind}: {self.name}"

    @property
    def formula(self) -> str:
        if self.kind == "activations":
            return "measured"
        return f"{self.value_bytes} · {self.values:,}" + (f" / {self.ranks}" if self.ranks > 1 else "")


@dataclass(frozen=True, kw_only=True)
class Peak:
    """A rank's peak memory in a step: when it's reached, and the terms that add up to it."""

    when: str
    terms: tuple[Term, ...]

    @property
    def bytes(self) -> int:
        return sum(term.bytes for term in self.terms)

    def by_kind(self) -> dict[str, int]:
        """Return the bytes at the peak for each kind in KINDS."""
        return {kind: sum(term.bytes for term in self.terms if term.kind == kind) for kind in KINDS}

    def rows(self) -> list[tuple[str, str, int]]:
        """Return a row (term, formula, bytes) for each nonzero term, so you can add them up on paper."""
        return [(term.label, term.formula, term.bytes) for term in self.terms if term.bytes]


class Ledger:
    """A rank's current bytes, and its peak, collectives and tasks so far."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, str, str], Term] = {}  # owner, kind, name -> the term
        self._activation_bytes = 0
        self._bytes = 0  # the sum of the terms held, without activations
        self.when = ""
        self._peak_when, self._peak_bytes = "", -1
        self._peak_terms: tuple[Term, ...] = ()
        self._collectives: dict[str, CollectiveCount] = {}
        self.tasks: list[Task] = []  # arithmetic and collectives, in the order in which they're issued

    def hold(self, owner: str, term: Term) -> None:
        """Add `term` for `owner` (a parameter or a unit), replacing the owner's earlier term of that kind and name."""
        self.free(owner, term.kind, term.name)
        self._held[owner, term.kind, term.name] = term
        self._bytes += term.bytes
        self._look()

    def holds(self, owner: str, kind: str, name: str) -> bool:
        return (owner, kind, name) in self._held

    def free(self, owner: str, kind: str, name: str) -> None:
        """Remove the owner's term with that kind and name, if there is one."""
        term = self._held.pop((owner, kind, name), None)
        self._bytes -= term.bytes if term else 0

    def set_activations(self, num_bytes: int) -> None:
        self._activation_bytes = num_bytes
        self._look()

    def _look(self) -> None:
        if self._bytes + self._activation_bytes > self._peak_bytes:
            self._peak_bytes = self._bytes + self._activation_bytes
            activations = Term(
                kind="activations", name="kept and in flight", values=self._activation_bytes, value_bytes=1
            )
            self._peak_when, self._peak_terms = self.when, (*self._held.values(), activations)

    def repeat(self, tasks: Sequence[Task], times: int) -> None:
        """Repeat the latest `tasks` and count their collectives again, since further micro-batches are the same."""
        counted = dict(self._collectives)
        self.tasks += [*tasks] * times
        for task in tasks:
            if task.op not in counted:  # no collective
                continue
            count, ranks = counted[task.op], task.ranks
            sent_bytes = ring_sent_bytes(task.op, int(task.amount), ranks)
            counted[task.op] = CollectiveCount(
                op=task.op,
                count=count.count + times,
                bytes=count.bytes + times * int(task.amount),
                sent_bytes=count.sent_bytes + times * sent_bytes,
            )
        self._collectives = counted

    @property
    def peak(self) -> Peak:
        """Return the peak, with terms of the same kind and name added up, in the order of KINDS."""
        sums: dict[Term, int] = {}
        for term in self._peak_terms:
            alike = replace(term, values=0)
            sums[alike] = sums.get(alike, 0) + term.values
        terms = [replace(alike, values=values) for alike, values in sums.items()]
        return Peak(when=self._peak_when, terms=tuple(sorted(terms, key=lambda term: KINDS.index(term.kind))))

    def compute(self, phase: str, unit: str, share: float = 1.0) -> None:
        """Add a task: a unit's arithmetic in the "forward" or "backward" phase, or a `share` of that arithmetic."""
        self.tasks.append(Task(queue=ARITHMETIC, op=phase, unit=unit, amount=share))

    def communicate(
        self, op: str, full_bytes: int, ranks: int, unit: str = "", *, late: bool = False, between_copies: bool = False
    ) -> None:
        """Add a collective across a number of ranks, unless it's empty or there's only one rank.

        The collective is issued when the arithmetic before it begins or, with `late`, when that arithmetic is done.
        """
        if full_bytes == 0 or ranks == 1:
            return
        queue, issued = COPIES if between_copies else COMMUNICATION, AT_END if late else AT_START
        self.tasks.append(Task(queue=queue, op=op, unit=unit, amount=full_bytes, issued=issued, ranks=ranks))
        before = self._collectives.get(op, CollectiveCount(op=op, count=0, bytes=0, sent_bytes=0))
        self._collectives[op] = CollectiveCount(
            op=op,
            count=before.count + 1,
            bytes=before.bytes + full_bytes,
            sent_bytes=before.sent_bytes + ring_sent_bytes(op, full_bytes, ranks),
        )

    @property
    def collectives(self) -> tuple[CollectiveCount, ...]:
        """Return the collectives so far, counted by kind, in order of first appearance."""
        return tuple(self._collectives.values())
