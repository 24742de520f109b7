"""Walk through a step of a rank that holds the full model: a single process, or a DDP rank. No torch import."""

from math import prod

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.planning.optimizers import Optimizer
from fsdp_helpers.planning.precisions import ValueBytes
from fsdp_helpers.planning.profile import ROOT, StepProfile
from fsdp_helpers.planning.walk.ledger import Ledger, Term

FIRST_BUCKET_BYTES, BUCKET_BYTES = 2**20, 25 * 2**20  # DDP's defaults; a bucket is full once it reaches its limit


class WholeModel:
    """A rank that always holds all parameters, moments and, with DDP, buckets; gradients appear one by one.

    The buckets are as large as the gradients. With `bucket_view`, they are the gradients. If a parameter already has a
    gradient, a new one counts as part of the activations until it's added, because that's how the profile counts it.
    """

    def __init__(
        self,
        profile: StepProfile,
        config: TrainConfig,
        ledger: Ledger,
        ranks: int,
        sizes: ValueBytes,
        optimizer: Optimizer,
    ) -> None:
        self.units = {ROOT: None}
        self._ledger, self._ranks, self._kept_bytes, self._optimizer = ledger, ranks, sizes.kept, optimizer
        self._trained = {name: prod(shape) for name, shape in profile.trained.items()}
        self._bucket: list[int] = []  # bytes of each gradient in the bucket that's being filled
        self._limit = FIRST_BUCKET_BYTES
        self._bucket_view = config.strategy == "ddp" and config.bucket_view
        self._num_trained = sum(self._trained.values())
        trained = {"values": self._num_trained, "value_bytes": sizes.kept}
        full = Term(kind="parameters", name="full", values=profile.num_params, value_bytes=sizes.kept)
        ledger.hold(ROOT, full)
        if profile.buffer_bytes:
            ledger.hold(ROOT, Term(kind="parameters", name="buffers", values=profile.buffer_bytes, value_bytes=1))
        for name, values, value_bytes in optimizer.state_terms(self._num_trained, sizes.kept):
            ledger.hold(ROOT, Term(kind="optimizer", name=name, values=values, value_bytes=value_bytes))
        if self._bucket_view:
            ledger.hold(ROOT, Term(kind="gradients", name="full, in buckets", **trained))
        elif config.strategy == "ddp":
            ledger.hold(ROOT, Term(kind="buffers", name="buckets", **trained))

    def begin_part(self, *, reduces: bool) -> None:
        """Note whether this micro-batch's gradients are reduced; they take the same memory either way."""
        self._reduces = reduces
        self._backward_runs = False

    def enter_forward(self, name: str) -> None:
        """Do nothing: the parameters are always in memory."""

    def leave_forward(self, name: str) -> None:
        if not self._backward_runs:
            self._ledger.compute("forward", ROOT)

    def enter_backward(self, name: str) -> None:
        self._backward_runs = True

    def leave_backward(self, name: str) -> None:
        """Do nothing: no memory is freed."""

    def gradient(self, name: str) -> None:
        """Record the gradient, and send its bucket if that's now full."""
        values = self._trained[name]
        if not self._bucket_view:
            size = {"values": values, "value_bytes": self._kept_bytes}
            self._ledger.hold(name, Term(kind="gradients", name="full", **size))
        self._ledger.compute("backward", ROOT, values / self._num_trained)
        self._bucket.append(self._kept_bytes * values)
        if sum(self._bucket) >= self._limit:
            self._send()

    def end_backward(self) -> None:
        """Send the last bucket, which may not be full; all gradients stay until the next step."""
        self._send()
        self._limit = FIRST_BUCKET_BYTES

    def update(self) -> None:
        """Hold the optimizer step's temporaries, then free them."""
        values = self._optimizer.in_flight_values(self._num_trained, max(self._trained.values(), default=0))
        size = {"values": values, "value_bytes": self._kept_bytes}
        self._ledger.hold(ROOT, Term(kind="optimizer", name="in flight", **size))
        self._ledger.free(ROOT, "optimizer", "in flight")

    def _send(self) -> None:
        if self._reduces:
            self._ledger.communicate("all_reduce", sum(self._bucket), self._ranks, ROOT, late=True)
        self._bucket.clear()
        self._limit = BUCKET_BYTES
