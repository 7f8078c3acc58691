"""The webuis' attentions: merged keys give what repeated keys give, by whichever function is in force."""

from __future__ import annotations

import pytest
import torch

from tests import conformance
from tests import webui_attention as theirs
from tests.conformance import CHANNELS, DTYPES, HEADS, UNetOf, far, run, telling, tokens
from tests.thoroughness import some_quick
from tests.webui_doubles import Webui

TORCH, BIAS, OWN_BIAS = "scaled_dot_product_attention_forward", "bias", "bias, by torch's own function"
FORGES = (theirs.ForgeAttention, theirs.ReforgeAttention, theirs.ClassicAttention)
each_hijack = pytest.mark.parametrize("name", theirs.HIJACKS)


@pytest.fixture
def webui(monkeypatch):
    webui = Webui(monkeypatch, "a1111")
    webui.shared.loaded_hypernetworks = theirs.hypernetworks
    webui.put("modules.hypernetworks.hypernetwork", apply_hypernetworks=theirs.apply_hypernetworks)
    conformance.with_xformers(monkeypatch, theirs)
    webui.start()
    yield webui
    theirs.hypernetworks.clear()
    theirs.upcast.on = False
    webui.call("script_unloaded")


def make(kind, dtype=torch.float32):
    return telling(kind(CHANNELS, HEADS), dtype)


def hijacked(monkeypatch, name, dtype=torch.float32):
    monkeypatch.setattr(theirs.CrossAttention, "forward", theirs.HIJACKS[name], raising=False)
    return make(theirs.CrossAttention, dtype)


def way(webui, module, dtype=torch.float32, **more):
    """The way in which it is told of sizes, held against repeated keys."""
    return conformance.way(module, dtype, engine=webui.engine(), **more)


def way_of(name):
    return BIAS if name == TORCH else OWN_BIAS


def merged(webui, module, **settings):
    """What it gives by a patch with these settings, and the report."""
    unet, x = UNetOf(module), tokens(2, next(module.parameters()).dtype)
    with webui.engine().patch(unet, side="kv", use_rand=False, ratio=0.5, **settings) as handle:
        return run(unet, x), handle.report()


@each_hijack
@pytest.mark.parametrize("dtype", some_quick(DTYPES), ids=str)
def test_each_of_a1111s_forwards_is_known_also_if_it_casts(webui, monkeypatch, name, dtype):
    module = hijacked(monkeypatch, name, dtype)
    assert way(webui, module, dtype, mask=None, additional_tokens=None) == way_of(name)
    theirs.upcast.on = dtype.itemsize == 2
    assert way(webui, module, dtype, tolerance=2e-2) == way_of(name)


@each_hijack
def test_hypernetworks_change_tokens_once(webui, monkeypatch, name):
    module, x = hijacked(monkeypatch, name, torch.float64), tokens(2, torch.float64)
    plain = module(x)
    theirs.hypernetworks += [theirs.Hypernetwork(CHANNELS, torch.float64) for _ in range(2)]
    assert not torch.allclose(module(x), plain)
    assert way(webui, module, torch.float64) == way_of(name)


def test_without_sizes_all_of_a1111s_forwards_agree(webui, monkeypatch):
    """Then it is the forward itself that computes with merged keys."""
    for loaded in ([], [theirs.Hypernetwork(CHANNELS, torch.float64) for _ in range(2)]):
        theirs.hypernetworks += loaded
        results = {name: merged(webui, hijacked(monkeypatch, name, torch.float64), proportional=False, correction=False)
                   for name in theirs.HIJACKS}  # fmt: skip
        expected, report = results[TORCH]
        assert report.merged_anything and not any(level.sized_by for level in report.levels)
        assert all(far(out, expected) < 1e-12 for out, _ in results.values())


def put(monkeypatch, function):
    """Let it be the function that the Forges' attentions call."""
    for name in ("attention_function", "optimized_attention", "optimized_attention_masked"):
        monkeypatch.setattr(theirs, name, function)


@pytest.mark.parametrize("dtype", some_quick([torch.float32, torch.bfloat16]), ids=str)
@pytest.mark.parametrize("kind", FORGES)
def test_the_forges_functions_are_given_no_bias(webui, monkeypatch, kind, dtype):
    """Some take it for square, or cut it by queries if memory is short, which no trial tells."""
    for function in theirs.FUNCTIONS.values():
        put(monkeypatch, function)
        assert way(webui, make(kind, dtype), dtype, mask=None) == OWN_BIAS


@pytest.mark.parametrize("kind", FORGES)
def test_a_forges_attention_by_another_function_or_with_a_mask_is_left_alone(webui, monkeypatch, kind):
    module = make(kind)
    unet, x = UNetOf(module, mask=torch.randn(1, 1, 1, 64)), tokens(2)
    expected = run(unet, x)
    with webui.engine().patch(unet, ratio=0.5) as handle:
        assert torch.equal(run(unet, x), expected)
    assert list(handle.report().reasons) == ["attn: an attention mask came along"]
    put(monkeypatch, lambda q, k, v, heads, mask=None, attn_precision=None: v * 0.5)
    out, report = merged(webui, module)
    assert torch.equal(out, run(UNetOf(module), x))
    (reason,) = report.reasons
    assert reason.startswith("attn: the function that it calls is no attention: ") and reason.endswith("<lambda>")


def test_a_forward_of_another_extension_is_not_known(webui, monkeypatch):
    monkeypatch.setattr(theirs.CrossAttention, "forward", lambda self, x, context=None, **more: x, raising=False)
    (reason,) = merged(webui, make(theirs.CrossAttention))[1].reasons
    assert "calls no attention function that is known" in reason
