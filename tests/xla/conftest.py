"""Tests marked `xla` need an environment with torch_xla; where there is none they are skipped, and say so."""

import pytest

from fsdp_helpers.teaching.lessons import xla


def pytest_collection_modifyitems(items):
    try:
        xla.find_python()
    except xla.XlaMissing as missing:
        skip = pytest.mark.skip(reason=str(missing))
        for item in items:
            if item.get_closest_marker("xla"):
                item.add_marker(skip)
