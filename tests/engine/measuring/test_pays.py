"""What was measured opens and closes the gate for its kind of calls; before that, what is known of the card."""

from __future__ import annotations

import pytest
import torch

import tome_core
from tests.models import sd15, sdxl, small
from tome_core import gains
from tome_core.engine.decision import decide
from tome_core.measuring.pays import Pays

LATENT = torch.empty(2, 4, 64, 64)
BLOCKS = ((1, 320),)


@pytest.fixture
def clock():
    return tome_core.patch(small(), "balanced", host_clock=True).clock


@pytest.fixture(autouse=True)
def card(monkeypatch):
    """One that waits for its host."""
    monkeypatch.setattr("tome_core.measuring.pays.is_host_bound", lambda *_: True)
    monkeypatch.setattr("tome_core.measuring.pays.device_of", lambda device: "card")


def gain(merged, side=64):
    return gains.Gain(*("",) * 5, "card", "float32", side, side, 2, 1.0, merged)


def ask(pays, clock, latent=LATENT):
    """Does anything merge in 4,096 tokens of the finest level, and why not?"""
    rules = clock.at(clock.moment(900.0)).rules
    found, why = decide(rules[0], "off", 4096, "cuda", pays.gates(rules, latent)[0])
    return any(found), why


def test_a_card_that_waits_merges_nothing_until_it_was_measured_to_pay(clock):
    merges, why = ask(Pays((), BLOCKS), clock)
    assert not merges and "waits for its host" in why
    for merged, expected in ((0.5, True), (2.0, False)):
        found = gain(merged)
        pays = Pays([found], BLOCKS)
        merges, why = ask(pays, clock)
        assert merges == expected and why == ("" if expected else found.why_not)
        assert list(pays.used) == [found], "it decided"
    assert "waits for its host" in ask(Pays([gain(0.5, side=32)], BLOCKS), clock)[1], "another size was measured"


def test_a_measurement_asks_nobody(clock):
    assert ask(Pays((), BLOCKS, always=True), clock)[0]


def test_rules_that_do_not_ask_merge_on_such_a_card():
    clock = tome_core.patch(small(), ratio=0.5).clock
    assert ask(Pays((), BLOCKS), clock)[0]


def test_what_has_no_size_is_left_to_the_number_of_tokens(clock):
    for latent in (None, torch.empty(2, 4, 3, 64, 64)):
        assert ask(Pays((), BLOCKS), clock, latent)[0]


def test_the_blocks_of_a_model_are_counted_for_it():
    for build, level, count in ((sd15, 1, 4), (sdxl, 2, 11)):
        blocks = tome_core.patch(build())._block_sizes()
        assert min(down for down, _ in blocks) == level and all(width for _, width in blocks) and len(blocks) == count


def test_an_update_of_torch_or_of_the_engine_makes_old_gains_anothers():
    assert tome_core.patch(small())._about()[-2:] == (torch.__version__, tome_core.__version__)
