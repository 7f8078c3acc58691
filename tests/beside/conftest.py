"""A share of the long tail: blocks below which things stand, times models, orders and errors."""

from zlib import crc32

import pytest

from tests.thoroughness import THOROUGH

SHARE = 5  # of slow cases one in so many runs; in a thorough run all


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect slow cases of stretches but for a share, always the same one."""
    left_out = [item for item in items if item.path.name == "test_stretches.py" and item.get_closest_marker("slow")
                and not THOROUGH and crc32(item.name.encode()) % SHARE]  # fmt: skip
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
