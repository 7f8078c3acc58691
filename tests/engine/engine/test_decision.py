"""Where merging would not pay: on a card that waits for its host, and in levels of few tokens."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tome_core import MergeRule
from tome_core.engine.decision import decide, is_host_bound
from tome_core.settings.schedule import LevelRules

_SD15 = ((1, 320),) * 5 + ((2, 640),) * 5 + ((4, 1280),) * 5 + ((8, 1280),)
_SDXL = ((2, 640),) * 10 + ((4, 1280),) * 60
_CARDS = {"3060": ((8, 6), 28), "4090": ((8, 9), 128), "H200": ((9, 0), 132), "a card of tomorrow": ((99, 0), 1)}
# of the H200 as measured, of the others as the model says: see `tome_core.engine.decision`
_WAITS = [
    ("3060", _SD15, 512, False), ("3060", _SDXL, 1024, False), ("4090", _SD15, 512, True),
    ("4090", _SD15, 1024, False), ("4090", _SDXL, 1024, False), ("H200", _SD15, 512, True),
    ("H200", _SD15, 1024, True), ("H200", _SD15, 2048, False), ("H200", _SDXL, 1024, True),
    ("H200", _SDXL, 2048, False), ("a card of tomorrow", _SD15, 512, False),
]  # fmt: skip


@pytest.fixture
def card(monkeypatch):
    """Makes torch see a card."""

    def make(name):
        (major, minor), processors = _CARDS[name]
        seen = SimpleNamespace(major=major, minor=minor, multi_processor_count=processors)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: seen)
        return torch.device("cuda", 0)

    return make


def test_cards_that_wait_for_their_host_are_told_from_slow_ones(card):
    for name, blocks, pixels, waits in _WAITS:
        found = is_host_bound(blocks, 2, (pixels // 8) ** 2, torch.float16, card(name))
        assert found == waits, (name, len(blocks), pixels)


def test_more_work_ends_the_waiting_and_what_is_no_card_never_waits(card):
    device = card("H200")
    assert is_host_bound(_SD15, 2, 128**2, torch.float16, device)
    assert not is_host_bound(_SD15, 2, 128**2, torch.float32, device)
    assert not is_host_bound(_SD15, 16, 128**2, torch.float16, device)
    assert not any(is_host_bound(_SD15, 2, 64**2, torch.float16, torch.device(kind)) for kind in ("cpu", "mps"))


def test_few_tokens_are_left_alone_if_a_rule_asks_whether_it_pays():
    asks, merges = MergeRule(merge_mlp=True, only_if_it_pays=True), MergeRule()
    few = "so few tokens that merging would not pay"
    for part in LevelRules._fields:
        for tokens, device, pays in ((4095, "cuda", False), (4096, "cuda", True), (1023, "cpu", False),
                                     (1024, "cpu", True)):  # fmt: skip
            rules = LevelRules(**{part: asks})
            assert decide(rules, "off", tokens, device) == ((rules, "") if pays else (LevelRules(), few))
        assert decide(LevelRules(**{part: merges}), "off", 4, "cuda") == (LevelRules(**{part: merges}), "")
    mixed = LevelRules(attn=asks, mlp=merges)
    assert decide(mixed, "off", 4, "cuda") == (LevelRules(mlp=merges), "")
    assert decide(LevelRules(), "off", 4096, "cuda") == (LevelRules(), "off")


def test_what_was_measured_outweighs_the_number_of_tokens():
    rules = LevelRules(attn=MergeRule(only_if_it_pays=True))
    assert decide(rules, "off", 4, "cuda", True) == (rules, "")
    assert decide(rules, "off", 9999, "cuda", "measured") == (LevelRules(), "measured")
