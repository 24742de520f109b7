"""A rank that holds the whole model: one process, or one of DDP's. No torch."""

from collections.abc import Iterable, Iterator
from math import prod

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.planning.profile import StepProfile
from fsdp_helpers.planning.state import FP32_BYTES
from fsdp_helpers.planning.walk.ledger import Ledger, Term

FIRST_BUCKET_BYTES, BUCKET_BYTES = 2**20, 25 * 2**20  # DDP's own limits; a bucket is closed when it has reached its


class WholeModel:
    """Parameters and moments stay, gradients appear one by one; DDP's buckets, as large as they, are always there.

    With `bucket_view` the buckets are the gradients. A gradient that arrives while there is one already is part of the
    activations until it is added: the profile has it in flight.
    """

    units: tuple[str, ...] = ()

    def __init__(self, profile: StepProfile, config: TrainConfig, ledger: Ledger, ranks: int = 1) -> None:
        self._shapes, self._ledger, self._ranks = profile.shapes, ledger, ranks
        self._arrived: list[int] = []  # bytes of the gradients, in the order in which they were finished
        self._bucket_view = config.strategy == "ddp" and config.bucket_view
        whole = profile.num_params
        ledger.hold("", Term(kind="parameters", name="whole", values=whole))
        ledger.hold("", Term(kind="optimizer", name="two moments", values=whole, value_bytes=8))
        if self._bucket_view:
            ledger.hold("", Term(kind="gradients", name="whole, in buckets", values=whole))
        elif config.strategy == "ddp":
            ledger.hold("", Term(kind="buffers", name="buckets", values=whole))

    def begin_part(self, *, reduces: bool, is_last: bool) -> None:
        """The same gradients are there, whether they are reduced or wait."""
        self._reduces = reduces

    def gradient(self, name: str) -> None:
        values = prod(self._shapes[name])
        self._arrived.append(FP32_BYTES * values)
        if not self._bucket_view:
            self._ledger.hold(name, Term(kind="gradients", name="whole", values=values))

    def end_backward(self) -> None:
        """All gradients stay until the next step; DDP has sent them by now, bucket after bucket."""
        for size in buckets(self._arrived) if self._reduces else ():
            self._ledger.communicate("all_reduce", size, self._ranks)
        self._arrived.clear()


def buckets(gradient_bytes: Iterable[int]) -> Iterator[int]:
    """The bytes of each of DDP's buckets, for gradients that are finished in this order."""
    size, limit = 0, FIRST_BUCKET_BYTES
    for more in gradient_bytes:
        size += more
        if size >= limit:
            yield size
            size, limit = 0, BUCKET_BYTES
    if size:
        yield size
