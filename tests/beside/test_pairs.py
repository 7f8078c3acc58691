"""A few random pairs of foreign things beside merging; thousands by `python -m tests.beside`."""

from __future__ import annotations

import pytest

from tests.beside.pairs import run
from tests.thoroughness import some_quick


@pytest.mark.parametrize("number", some_quick(range(40), 8))
def test_with_two_things_the_picture_is_right_or_left_alone_and_said(number: int):
    assert run(1, number).total()
