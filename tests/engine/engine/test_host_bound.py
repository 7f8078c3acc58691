"""A card that waits for its host is told from a slow one before anything is measured."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tome_core.engine.decision import is_host_bound

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
    """H200: as measured. Others as the model says: see `tome_core.engine.decision`."""
    assert is_host_bound(blocks, 2, (pixels // 8) ** 2, torch.float16, card(name)) == waits


def test_a_card_does_not_wait_longer_for_more_work(card):
    for name in _CARDS:
        device = card(name)
        for blocks in (_SD15, _SDXL):
            told = [is_host_bound(blocks, batch, area, dtype, device)
                    for batch, area, dtype in ((1, 64**2, torch.float16), (2, 64**2, torch.float16),
                                               (2, 128**2, torch.float16), (2, 128**2, torch.float32))]  # fmt: skip
            assert told == sorted(told, reverse=True)


def test_what_is_no_card_waits_for_nobody(card):
    card("H200")
    assert not any(is_host_bound(_SD15, 2, 64**2, torch.float16, torch.device(kind)) for kind in ("cpu", "mps"))
