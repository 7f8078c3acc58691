"""What was measured opens and closes the gate for its kind of calls; before that, what is known of the card."""

from __future__ import annotations

import pytest
import torch

import tome_core
from tests.models import sd15
from tome_core import MergeConfig, gains, preset
from tome_core.engine.decision import decide
from tome_core.engine.time import Clock
from tome_core.measuring.pays import Pays

LATENT = torch.empty(2, 4, 64, 64)
BLOCKS = ((1, 320),)
ASKS = Clock(preset("balanced"), [1, 2])


@pytest.fixture(autouse=True)
def card(monkeypatch):
    """A card that waits for kernel launches."""
    monkeypatch.setattr("tome_core.measuring.pays.is_host_bound", lambda *_: True)
    monkeypatch.setattr("tome_core.measuring.pays.device_of", lambda device: "card")


def gain(merged, side=64):
    return gains.Gain(*("",) * 5, "card", "float32", side, side, 2, 1.0, merged)


def ask(pays, clock=ASKS, latent=LATENT):
    """Does anything merge in 4,096 tokens of the finest level, and why not?"""
    rules = clock.at(clock.moment(900.0)).rules
    found, why = decide(rules[0], "off", 4096, "cuda", pays.gates(rules, latent)[0])
    return any(found), why


def test_a_card_that_waits_merges_nothing_until_it_was_measured_to_pay():
    merges, why = ask(Pays((), BLOCKS))
    assert not merges and "waits for kernel launches" in why
    for merged, expected in ((0.5, True), (2.0, False)):
        found = gain(merged)
        pays = Pays([found], BLOCKS)
        merges, why = ask(pays)
        assert merges == expected and why == ("" if expected else found.why_not)
        assert list(pays.used) == [found], "it decided"
    assert "waits for kernel launches" in ask(Pays([gain(0.5, side=32)], BLOCKS))[1], "another size was measured"


def test_who_does_not_ask_merges_on_such_a_card():
    assert ask(Pays((), BLOCKS, always=True))[0], "a measurement"
    assert ask(Pays((), BLOCKS), Clock(MergeConfig(ratio=0.5), [1]))[0], "rules of ratios"
    for latent in (None, torch.empty(2, 4, 3, 64, 64)):
        assert ask(Pays((), BLOCKS), latent=latent)[0], "a latent that has no size is left to the number of tokens"


def test_a_gain_opens_the_gate_of_the_finest_level_alone():
    rules = Clock(MergeConfig(max_downsample=8, only_if_it_pays=True), [1, 2]).at(ASKS.moment(900.0)).rules
    assert Pays([gain(0.5)], BLOCKS).gates(rules, LATENT) == (True, None)
    assert Pays([gain(2.0)], BLOCKS).gates(rules, LATENT) == (gain(2.0).why_not,) * 2


def test_a_models_blocks_are_counted_for_it_and_versions_make_old_gains_anothers():
    handle = tome_core.patch(sd15())
    assert sorted(handle._block_sizes()) == [(1, 32)] * 3 + [(2, 64)]
    assert handle._about()[-2:] == (torch.__version__, tome_core.__version__)
