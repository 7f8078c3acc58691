"""Does merging pay? The answer is estimated from the card and the tokens."""

from types import SimpleNamespace

import pytest
import torch

import tome_core
from tests.small_models import dits
from tests.small_models.families import MODELS
from tests.small_models.unets import sdxl, small
from tome_core import MergeConfig, MergeRule
from tome_core.engine.decision import decide
from tome_core.hosting import why_not_at
from tome_core.measuring.pays import is_host_bound
from tome_core.settings.rules import LevelRules

_SD15 = ((1, 320),) * 5 + ((2, 640),) * 5 + ((4, 1280),) * 5 + ((8, 1280),)
_SDXL = ((2, 640),) * 10 + ((4, 1280),) * 60
_CARDS = {"3060": ((8, 6), 28), "4090": ((8, 9), 128), "H200": ((9, 0), 132), "unknown": ((99, 0), 1)}
_FEW = "the picture is so small that merging would not pay"
_ASKS, _MERGES = MergeRule(merge_mlp=True, only_if_it_pays=True), MergeRule()


# the H200's answer is measured, the others' are the model's: see `tome_core.measuring.pays`
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
    (_ASKS, 3599, "cuda", None, False, _FEW), (_ASKS, 3600, "cuda", None, True, ""),
    (_ASKS, 1023, "cpu", None, False, _FEW), (_ASKS, 1024, "cpu", None, True, ""),
    (_ASKS, 9999, "cuda", "it waits", False, "it waits"), (_MERGES, 4, "cuda", "it waits", True, ""),
    (None, 9999, "cuda", None, False, "off")])  # fmt: skip
def test_a_rule_that_asks_goes_by_the_gate_and_else_by_the_tokens(part, rule, tokens, device, gate, merges, why):
    rules = LevelRules(**{part: rule})
    if part == "block" and rule == _ASKS and tokens in (3599, 1023):
        merges, why = True, ""  # most of their work grows with the tokens alone, so they pay with fewer
    assert decide(rules, "off", tokens, device, gate) == (rules if merges else LevelRules(), why)


WAITS = "at this size the GPU waits for kernel launches, so merging would not pay (estimated)"
SIDE, FEW_SIDE = 32, 16  # sides of latents of enough tokens on a CPU, and of too few


@pytest.fixture
def asked(monkeypatch):
    """The (blocks, batch, area) for which the estimate was asked, on a device that waits if this says so."""
    asked = SimpleNamespace(waits=True, of=[])

    def estimate(blocks, batch, area, dtype, device):
        asked.of.append((blocks, batch, area))
        return asked.waits

    monkeypatch.setattr("tome_core.measuring.pays.is_host_bound", estimate)
    return asked


def picture(model, side=SIDE):
    return MODELS["sd15"].call(model, height=side, width=side)


def test_what_waits_merges_nothing_and_says_so_until_the_patch_is_put_on_again(asked):
    """A patch asks again only when it is put on again, because its picture may be half drawn."""
    model = small()
    plain, handle = picture(model), tome_core.patch(model, "balanced")
    assert torch.equal(picture(model), plain) and handle.report().headline == f"nothing merged: {WAITS}"
    asked.waits = False
    handle.install()  # hosts do so at each step
    assert torch.equal(picture(model), plain)
    handle.uninstall()
    handle.install()
    assert not torch.equal(picture(model), plain)


def test_the_estimate_is_asked_once_for_a_kind_of_call_with_the_sizes_of_all_blocks(asked):
    model = small()
    handle = tome_core.patch(model, "balanced")
    for side in (SIDE, SIDE, FEW_SIDE):
        picture(model, side)
    ((blocks, batch, area), other), channels = asked.of, {2**place.halvings: place.block.attn1.to_q.in_features
                                                          for place in handle.adapter.places}  # fmt: skip
    assert (batch, area) == (len(picture(model)), SIDE**2) and other[2] == FEW_SIDE**2
    assert len(blocks) == len(handle.adapter.places) and set(blocks) == set(channels.items())


def test_no_estimate_is_asked_for_a_film_a_compiled_unet_a_transformer_or_rules_that_do_not_ask(asked):
    model, film = small(), torch.empty(2, 4, 3, SIDE, SIDE)
    assert tome_core.patch(model, "balanced").pays.gate(film) is None
    assert tome_core.patch(model, ratio=0.5).pays is None
    assert tome_core.patch(dits.make("SD3.5")[0], "balanced").pays is None
    model.compile(backend="eager")
    assert tome_core.patch(model, "balanced").pays is None and not asked.of


def test_why_pictures_of_a_size_would_not_merge_is_told_without_a_call(asked):
    model, balanced, calls = small(), tome_core.preset("balanced"), []
    model.conv_in.register_forward_hook(lambda *_: calls.append(1))
    assert why_not_at(model, balanced, 8 * SIDE, 8 * SIDE) == WAITS
    asked.waits = False
    assert why_not_at(model, balanced, 8 * SIDE, 8 * SIDE, 1) == "" == why_not_at(model, MergeConfig(), 64, 64)
    assert why_not_at(model, balanced, 8 * FEW_SIDE, 8 * FEW_SIDE) == _FEW
    assert why_not_at(model, MergeConfig(rules=(MergeRule(min_downsample=8), MergeRule())), 64, 64) == ""
    assert why_not_at(sdxl(), MergeConfig(max_downsample=1), 512, 512) == "no rule holds for this size"
    assert why_not_at(dits.make("SD3.5")[0], tome_core.preset("balanced", "transformer"), 64, 64) == ""
    assert not calls and {batch for _, batch, _ in asked.of} == {1, 2}
