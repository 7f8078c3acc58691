"""A card that waits for its host is told from a slow one before anything is measured, and merges nothing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import tome_core
from tests.models import sd15, sdxl, small
from tome_core import gains, preset
from tome_core.running import fingerprint, gate
from tome_core.measuring.pays import Pays
from tome_core.settings.phases import plain_rules

_SD15 = ((1, 320),) * 5 + ((2, 640),) * 5 + ((4, 1280),) * 5 + ((8, 1280),)
_SDXL = ((2, 640),) * 10 + ((4, 1280),) * 60
_CARDS = {"3060": ((8, 6), 28), "4090": ((8, 9), 128), "H200": ((9, 0), 132)}


@pytest.fixture
def card(monkeypatch):
    """Makes torch see a card."""

    def make(name):
        (major, minor), processors = _CARDS.get(name, ((99, 0), 1))
        seen = SimpleNamespace(major=major, minor=minor, multi_processor_count=processors)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: seen)
        return torch.device("cuda", 0)

    return make


@pytest.mark.parametrize(
    ("name", "blocks", "pixels", "waits"),
    [("3060", _SD15, 512, False), ("3060", _SDXL, 1024, False),
     ("4090", _SD15, 512, True), ("4090", _SD15, 1024, False), ("4090", _SDXL, 1024, False),
     ("H200", _SD15, 512, True), ("H200", _SD15, 1024, True), ("H200", _SD15, 2048, False),
     ("H200", _SDXL, 1024, True), ("H200", _SDXL, 2048, False), ("a card of tomorrow", _SD15, 512, False)],
)  # fmt: skip
def test_cards_that_wait_for_their_host_are_told_from_slow_ones(card, name, blocks, pixels, waits):
    """As the model says that the constants are from: see `tome_core.engine.size_gate`."""
    assert gate.is_host_bound(blocks, 2, (pixels // 8) ** 2, torch.float16, card(name)) == waits


def test_a_card_does_not_wait_longer_for_more_work(card):
    for name in _CARDS:
        device = card(name)
        for blocks in (_SD15, _SDXL):
            told = [gate.is_host_bound(blocks, batch, area, dtype, device)
                    for batch, area, dtype in ((1, 64**2, torch.float16), (2, 64**2, torch.float16),
                                               (2, 128**2, torch.float16), (2, 128**2, torch.float32))]  # fmt: skip
            assert told == sorted(told, reverse=True)


def test_what_is_no_card_waits_for_nobody(card):
    card("H200")
    assert not any(gate.is_host_bound(_SD15, 2, 64**2, torch.float16, torch.device(kind)) for kind in ("cpu", "mps"))


def test_the_blocks_of_a_model_are_counted_for_it():
    for build, level in ((sd15, 1), (sdxl, 2)):
        handle = tome_core.patch(build())
        assert min(down for down, _ in handle.block_sizes) == level and all(width for _, width in handle.block_sizes)


def test_a_card_that_waits_merges_nothing_until_it_was_measured_to_pay(card, monkeypatch):
    """The table's part of a latch: what was measured outweighs it."""
    monkeypatch.setattr("tome_core.running.latch.is_host_bound", lambda *_: True)
    monkeypatch.setattr("tome_core.running.latch.device_of", lambda device: "card")
    latent = torch.empty(2, 4, 64, 64)
    handle = tome_core.patch(small(), "balanced", host_clock=True)
    clock = handle.clock
    rules, why = clock.at(clock.moment(900.0)).rules, ("off",) * 2
    left, told = Latch((), _SD15).apply(rules, why, latent, clock.apply_gate)
    assert not any(any(one) for one in left) and "waits for its host" in told[0]
    case = gains.Case(*("",) * 5, "card", "float32", 64, 64, 2)
    for merged, merges in ((0.5, True), (2.0, False)):
        left, told = Latch([gains.Gain(case, 1.0, merged)], _SD15).apply(rules, why, latent, clock.apply_gate)
        assert any(any(one) for one in left) == merges
    plain = plain_rules(preset("fast"), [1])
    assert all(rule.only_if_it_pays for rule in plain), "presets ask"


def test_an_update_of_torch_or_of_the_engine_makes_old_gains_anothers():
    assert fingerprint.versions() == (torch.__version__, tome_core.__version__)
