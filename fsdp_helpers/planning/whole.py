"""A rank that holds the whole model: one process, or one of DDP's. No torch."""

from math import prod

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.planning.ledger import Ledger, Term
from fsdp_helpers.planning.profile import StepProfile


class WholeModel:
    """Parameters and moments stay, gradients appear one by one; DDP's buckets, as large as they, are always there.

    With `bucket_view` the buckets are the gradients. A gradient that arrives while there is one already is part of the
    activations until it is added: the profile has it in flight.
    """

    units: tuple[str, ...] = ()

    def __init__(self, profile: StepProfile, config: TrainConfig, ledger: Ledger) -> None:
        self._shapes, self._ledger = profile.shapes, ledger
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

    def gradient(self, name: str) -> None:
        if not self._bucket_view:
            self._ledger.hold(name, Term(kind="gradients", name="whole", values=prod(self._shapes[name])))

    def end_backward(self) -> None:
        """All gradients stay until the next step."""
