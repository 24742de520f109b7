"""Names of parameters and modules, as they are in a model that nothing wraps."""

WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")  # of FSDP1, recomputing, torch.compile


def plain_name(name: str) -> str:
    """Return a name without what FSDP1, activation checkpointing and torch.compile add to it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)
