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
_HALF, _FULL = torch.float16, torch.float32
_FEW = "so few tokens that merging would not pay"
_ASKS, _MERGES = MergeRule(merge_mlp=True, only_if_it_pays=True), MergeRule()


# of the H200 as measured, of the others as the model says: see `tome_core.engine.decision`
@pytest.mark.parametrize("name, blocks, pixels, batch, dtype, waits", [
    ("3060", _SD15, 512, 2, _HALF, False), ("3060", _SDXL, 1024, 2, _HALF, False), ("4090", _SD15, 512, 2, _HALF, True),
    ("4090", _SD15, 1024, 2, _HALF, False), ("4090", _SDXL, 1024, 2, _HALF, False),
    ("H200", _SD15, 512, 2, _HALF, True), ("H200", _SD15, 1024, 2, _HALF, True), ("H200", _SD15, 2048, 2, _HALF, False),
    ("H200", _SDXL, 1024, 2, _HALF, True), ("H200", _SDXL, 2048, 2, _HALF, False),
    ("H200", _SD15, 1024, 2, _FULL, False), ("H200", _SD15, 1024, 16, _HALF, False),
    ("a card of tomorrow", _SD15, 512, 2, _HALF, False),
])  # fmt: skip
def test_cards_that_wait_for_their_host_are_told_from_slow_ones(monkeypatch, name, blocks, pixels, batch, dtype, waits):
    (major, minor), processors = _CARDS[name]
    card = SimpleNamespace(major=major, minor=minor, multi_processor_count=processors)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    area = (pixels // 8) ** 2
    assert is_host_bound(blocks, batch, area, dtype, torch.device("cuda", 0)) == waits
    assert not any(is_host_bound(blocks, batch, area, dtype, torch.device(kind)) for kind in ("cpu", "mps"))


@pytest.mark.parametrize("part", LevelRules._fields)
def test_few_tokens_are_left_alone_if_a_rule_asks_whether_it_pays_and_nothing_was_measured(part):
    asks, merges, none = LevelRules(**{part: _ASKS}), LevelRules(**{part: _MERGES}), LevelRules()
    for rules, tokens, device, gate, expected in (
        (asks, 4095, "cuda", None, (none, _FEW)), (asks, 4096, "cuda", None, (asks, "")),
        (asks, 1023, "cpu", None, (none, _FEW)), (asks, 1024, "cpu", None, (asks, "")),
        (asks, 4, "cuda", True, (asks, "")), (asks, 9999, "cuda", "measured", (none, "measured")),
        (merges, 4, "cuda", "measured", (merges, "")), (none, 9999, "cuda", True, (none, "off")),
    ):  # fmt: skip
        assert decide(rules, "off", tokens, device, gate) == expected


def test_of_two_parts_the_one_merges_that_does_not_ask():
    assert decide(LevelRules(attn=_ASKS, mlp=_MERGES), "off", 4, "cuda") == (LevelRules(mlp=_MERGES), "")
