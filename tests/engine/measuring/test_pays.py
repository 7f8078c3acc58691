"""Does merging pay? The answer is measured for the kind of call, else estimated from the card and the tokens."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor

from tests.models import sdxl, small
from tome_core import MergeConfig, MergeRule, gains
from tome_core.engine.decision import decide, is_host_bound
from tome_core.engine.time import Clock
from tome_core.measuring.pays import Pays, about
from tome_core.models.unet_blocks import find_blocks
from tome_core.settings.schedule import LevelRules

_SD15 = ((1, 320),) * 5 + ((2, 640),) * 5 + ((4, 1280),) * 5 + ((8, 1280),)
_SDXL = ((2, 640),) * 10 + ((4, 1280),) * 60
_CARDS = {"3060": ((8, 6), 28), "4090": ((8, 9), 128), "H200": ((9, 0), 132), "unknown": ((99, 0), 1)}
_FEW = "so few tokens that merging would not pay"
_ASKS, _MERGES = MergeRule(merge_mlp=True, only_if_it_pays=True), MergeRule()


# the H200's answer is measured, the others' are the model's: see `tome_core.engine.decision`
@pytest.mark.parametrize("name, blocks, pixels, batch, dtype, waits",
                         [("3060", _SD15, 512, 2, torch.half, False), ("4090", _SD15, 512, 2, torch.half, True),
                          ("4090", _SDXL, 1024, 2, torch.half, False), ("H200", _SDXL, 1024, 2, torch.half, True),
                          ("H200", _SDXL, 2048, 2, torch.half, False), ("H200", _SD15, 1024, 2, torch.half, True),
                          ("H200", _SD15, 1024, 2, torch.float, False), ("H200", _SD15, 1024, 16, torch.half, False),
                          ("unknown", _SD15, 512, 2, torch.half, False)])  # fmt: skip
def test_cards_that_wait_for_their_host_are_told_from_slow_ones(monkeypatch, name, blocks, pixels, batch, dtype, waits):
    (major, minor), processors = _CARDS[name]
    card = SimpleNamespace(major=major, minor=minor, multi_processor_count=processors)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    area = (pixels // 8) ** 2
    assert is_host_bound(blocks, batch, area, dtype, torch.device("cuda", 0)) == waits
    assert not any(is_host_bound(blocks, batch, area, dtype, torch.device(kind)) for kind in ("cpu", "mps"))


@pytest.mark.parametrize("part", LevelRules._fields)
@pytest.mark.parametrize("rule, tokens, device, gate, merges, why", [
    (_ASKS, 4095, "cuda", None, False, _FEW), (_ASKS, 4096, "cuda", None, True, ""),
    (_ASKS, 1023, "cpu", None, False, _FEW), (_ASKS, 1024, "cpu", None, True, ""), (_ASKS, 4, "cuda", True, True, ""),
    (_ASKS, 9999, "cuda", "measured", False, "measured"), (_MERGES, 4, "cuda", "measured", True, ""),
    (None, 9999, "cuda", True, False, "off")])  # fmt: skip
def test_a_rule_that_asks_goes_by_the_gate_and_else_by_the_tokens(part, rule, tokens, device, gate, merges, why):
    rules = LevelRules(**{part: rule})
    if part == "blocks" and tokens == 4095:
        merges, why = True, ""  # most of their work grows with the tokens alone, so they pay with fewer
    assert decide(rules, "off", tokens, device, gate) == (rules if merges else LevelRules(), why)


WAITS = "at this size the GPU waits for kernel launches, so merging would not pay (estimated, not measured)"


@pytest.fixture
def gates(monkeypatch):
    """The gates of two levels on such a card, for a call of 4,096 tokens in the finest, by known measurements."""
    monkeypatch.setattr("tome_core.measuring.pays.is_host_bound", lambda *_: True)
    monkeypatch.setattr("tome_core.measuring.pays.device_of", lambda device: "card")
    clock = Clock(MergeConfig(max_downsample=8, only_if_it_pays=True), [1, 2])

    def ask(*known, shape=(2, 4, 64, 64), **more):
        pays = Pays(known, ((1, 320),), **more)
        answer = pays.gates(clock.at(clock.moment(900.0)).rules, torch.empty(shape))
        return answer, [*pays.used]

    return ask


def gain(merged, side=64):
    return gains.Gain(*("",) * 5, "card", "float32", side, side, 2, 1.0, merged)


def test_it_merges_nothing_until_it_was_measured_to_pay_and_then_in_the_finest_level_whatever_its_tokens(gates):
    assert gates() == ((WAITS, WAITS), [])
    assert gates(gain(0.5)) == ((True, None), [gain(0.5)])
    assert gates(gain(2.0)) == ((gain(2.0).why_not,) * 2, [gain(2.0)])
    assert gates(gain(0.5, side=32)) == gates(), "another size was measured"
    assert gates(always=True)[0] == (True, None), "for a measurement"
    assert gates(shape=(2, 4, 3, 64, 64))[0] == (None, None), "a film goes by its tokens"


def test_a_gain_is_of_one_model_one_attention_and_one_set_of_rules():
    unet, config = small(), MergeConfig()
    plain = about(unet, find_blocks(unet), config)
    assert about(unet, find_blocks(unet), replace(config, seed=5)) == plain
    assert about(unet, find_blocks(unet), MergeConfig(ratio=0.25)) != plain
    assert about(sdxl(), find_blocks(sdxl()), config) != plain
    unet.set_attn_processor(AttnProcessor())
    assert about(unet, find_blocks(unet), config) != plain
