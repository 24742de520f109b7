"""Where these tests cannot run: what is missing, and how to get it."""

import pytest


def need(missing: str | None) -> None:
    """Skip where something is missing."""
    if missing:
        pytest.skip(missing)
