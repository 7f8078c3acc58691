"""A small share of the random stackings at every run, always the same; `python -m tests.random_stackings` does more."""

from __future__ import annotations

import logging

import pytest

from tests.random_stackings import cases, comfy_graphs, laws

pytestmark = pytest.mark.slow
SEED = 1  # a change of it alone moves to other cases, so that a change elsewhere does not
SHARE = {laws: 90, comfy_graphs: 20}


@pytest.mark.parametrize("kind", SHARE, ids=lambda kind: kind.__name__.rpartition(".")[2])
def test_random_stackings_end_in_a_picture_or_a_sentence(kind, monkeypatch):
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)
    monkeypatch.setattr(cases, "KINDS", {kind.hold: 1})
    seen = sum((cases.run(SEED, number) for number in range(SHARE[kind])), start=cases.Counter())
    assert sum(seen.values()) - seen[kind.__name__.rpartition(".")[2]] >= SHARE[kind]


def test_a_fault_of_the_engine_is_found(monkeypatch):
    """The laws can fail: wraps that do not come off."""
    from tome_core.models.wrap import Wrap

    monkeypatch.setattr(cases, "KINDS", {laws.hold: 1})
    monkeypatch.setattr(Wrap, "uninstall", lambda self: None)
    with pytest.raises(laws.Fault):
        for number in range(20):
            cases.run(SEED, number)
