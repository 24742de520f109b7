"""Where these tests cannot run: what is missing, and how to get it."""

import os

import pytest


def need(programs: list[str], how_to_get: str) -> None:
    """Skip where something is missing."""
    if os.geteuid() != 0:
        pytest.skip("root is needed, for namespaces and for Slurm's daemons: sudo make test-cluster")
    if programs:
        pytest.skip(f"{', '.join(programs)} not found here; to get them: {how_to_get}")
