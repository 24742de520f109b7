"""What needs root and Debian packages: skipped, with what is missing and how to get it, where it is not at hand."""

import os

import pytest


def pytest_collection_modifyitems(items):
    for item in items:
        if "/cluster/" in str(item.path):
            item.add_marker(pytest.mark.cluster)
            item.add_marker(pytest.mark.timeout(900))


def need(programs: list[str], how_to_get: str) -> None:
    """Skip where something is missing."""
    if os.geteuid() != 0:
        pytest.skip("root is needed, for namespaces and for Slurm's daemons: sudo make test-cluster")
    if programs:
        pytest.skip(f"{', '.join(programs)} not found here; to get them: {how_to_get}")
