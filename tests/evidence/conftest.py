"""Everything in here is marked `cluster`, and may take some minutes."""

import pytest


def pytest_collection_modifyitems(items):
    for item in items:
        if "/evidence/" in item.path.as_posix():
            item.add_marker(pytest.mark.cluster)
            item.add_marker(pytest.mark.timeout(900))
