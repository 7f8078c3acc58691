"""What stands below Expert, and in which order."""

from __future__ import annotations

import pytest

from tome_core import form

pytestmark = [pytest.mark.usefixtures("small"), pytest.mark.parametrize("flavour", ["a1111", "forge"])]


def test_every_setting_stands_once_in_its_group_at_most_three_in_a_row(webui):
    webui.script.ui(False)  # imports the panel
    rows_of = webui.part("ui").rows_of
    rows = {group: rows_of(group) for group in form.GROUPS}
    for group, found in rows.items():
        assert all(one.group == group and len(row) <= 3 for row in found for one in row)
    assert sorted(one.name for found in rows.values() for row in found for one in row) == sorted(form.NAMES)
