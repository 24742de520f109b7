"""Failures that need a GPU or a cluster, from documentation and reports; we haven't run any of them."""

from fsdp_helpers.teaching.failures.entry import Failure
from fsdp_helpers.teaching.failures.sights import table

PARTS = ("title", "why", "tell", "fix", "source")
DOCUMENTED = tuple(
    Failure(name=name, **{part: card[part] for part in PARTS}) for name, card in table("documented.toml").items()
)
