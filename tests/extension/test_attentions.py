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
of_each_forge = pytest.mark.parametrize(
    "kind", [theirs.ForgeAttention, theirs.ReforgeAttention, theirs.ClassicAttention]
)


@pytest.fixture
def webui(monkeypatch):
    made = Webui(monkeypatch, "a1111")
    made.shared.loaded_hypernetworks = theirs.hypernetworks
    made.put("modules.hypernetworks.hypernetwork", apply_hypernetworks=theirs.apply_hypernetworks)
    conformance.with_xformers(monkeypatch, theirs)
    made.start()
    yield made
    theirs.hypernetworks.clear()
    theirs.upcast.on = False
    made.call("script_unloaded")


def hijacked(monkeypatch, name, dtype=torch.float32):
    monkeypatch.setattr(theirs.CrossAttention, "forward", theirs.HIJACKS[name], raising=False)
    return made(theirs.CrossAttention, dtype)


def made(kind, dtype=torch.float32):
    return telling(kind(CHANNELS, HEADS), dtype)


def way(webui, module, dtype=torch.float32, **told):
    """The way in which it is told of sizes, held against repeated keys."""
    return conformance.way(module, dtype, engine=webui.engine(), **told)


def merged(webui, module, **settings):
    """What it gives by a patch with these settings, and the report."""
    unet, x = UNetOf(module), tokens(2, next(module.parameters()).dtype)
    with webui.engine().patch(unet, side="kv", use_rand=False, ratio=0.5, **settings) as handle:
        return run(unet, x), handle.report()


@pytest.mark.parametrize("dtype", some_quick(DTYPES), ids=str)
@pytest.mark.parametrize("name", theirs.HIJACKS)
def test_each_of_a1111s_forwards_is_known(webui, monkeypatch, name, dtype):
    found = way(webui, hijacked(monkeypatch, name, dtype), dtype, mask=None, additional_tokens=None)
    assert found == (BIAS if name == TORCH else OWN_BIAS)


@pytest.mark.parametrize("dtype", some_quick([torch.bfloat16, torch.float16]), ids=str)
@pytest.mark.parametrize("name", [one for one in theirs.HIJACKS if one.startswith(("split", "sub", "xf", "scaled"))])
def test_they_may_cast_to_float32(webui, monkeypatch, name, dtype):
    theirs.upcast.on = True
    found = way(webui, hijacked(monkeypatch, name, dtype), dtype, tolerance=2e-2)
    assert found == (BIAS if name == TORCH else OWN_BIAS)


@pytest.mark.parametrize("name", theirs.HIJACKS)
def test_hypernetworks_change_tokens_once(webui, monkeypatch, name):
    module, x = hijacked(monkeypatch, name, torch.float64), tokens(2, torch.float64)
    plain = module(x)
    theirs.hypernetworks += [theirs.Hypernetwork(CHANNELS, torch.float64) for _ in range(2)]
    assert not torch.allclose(module(x), plain)
    assert way(webui, module, torch.float64) == (BIAS if name == TORCH else OWN_BIAS)


@pytest.mark.parametrize("loaded", [0, 2])
def test_without_sizes_all_of_a1111s_forwards_agree(webui, monkeypatch, loaded):
    """Then it is the forward itself that computes with merged keys."""
    theirs.hypernetworks += [theirs.Hypernetwork(CHANNELS, torch.float64) for _ in range(loaded)]
    found = {name: merged(webui, hijacked(monkeypatch, name, torch.float64), proportional=False, correction=False)
             for name in theirs.HIJACKS}  # fmt: skip
    expected, report = found.pop(TORCH)
    assert report.merged_anything and not any(level.sized_by for level in report.levels)
    for name, (out, _) in found.items():
        assert far(out, expected) < 1e-12, name


def put(monkeypatch, function):
    """Let it be the function that the Forges' attentions call."""
    for name in ("attention_function", "optimized_attention", "optimized_attention_masked"):
        monkeypatch.setattr(theirs, name, function)


@of_each_forge
@pytest.mark.parametrize("dtype", some_quick(DTYPES), ids=str)
@pytest.mark.parametrize("function", theirs.FUNCTIONS.values(), ids=theirs.FUNCTIONS)
def test_the_forges_functions_are_given_no_bias(webui, monkeypatch, kind, function, dtype):
    """Some take it for square, or cut it by queries if memory is short, which no trial tells."""
    put(monkeypatch, function)
    assert way(webui, made(kind, dtype), dtype, mask=None) == OWN_BIAS


@of_each_forge
def test_what_is_no_attention_is_left_alone(webui, monkeypatch, kind):
    put(monkeypatch, lambda q, k, v, heads, mask=None, attn_precision=None: v * 0.5)
    module = made(kind)
    out, report = merged(webui, module)
    assert torch.equal(out, run(UNetOf(module), tokens(2)))
    (reason,) = report.reasons
    assert reason.startswith("attn: the function that it calls is no attention: ") and reason.endswith("<lambda>")


@of_each_forge
def test_a_mask_leaves_it_alone(webui, kind):
    unet, x = UNetOf(made(kind), mask=torch.randn(1, 1, 1, 64)), tokens(2)
    expected = run(unet, x)
    with webui.engine().patch(unet, ratio=0.5) as handle:
        assert torch.equal(run(unet, x), expected)
    assert list(handle.report().reasons) == ["attn: an attention mask came along"]


def test_a_forward_of_somebody_elses_is_not_known(webui, monkeypatch):
    def forward(self, x, context=None, mask=None, **kwargs):
        return x

    monkeypatch.setattr(theirs.CrossAttention, "forward", forward, raising=False)
    (reason,) = merged(webui, made(theirs.CrossAttention))[1].reasons
    assert "calls no attention function that is known" in reason
