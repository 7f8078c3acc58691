"""The webuis' attentions: merged keys give what repeated keys give, by whichever function is in force."""

from __future__ import annotations

import pytest
import torch

from tests import conformance
from tests import webui_attention as theirs
from tests.conformance import CHANNELS, DTYPES, GROUPS, HEADS, TOKENS, assert_sized, own, ragged, telling, tokens
from tests.thoroughness import some_quick
from tests.webui_doubles import Webui
from tome_core.attention.core import attend_merged

BOTH, WIDER = {"bias", "wider heads"}, {"wider heads"}
TORCH = "scaled_dot_product_attention_forward"
_WITHOUT_SAGE = {name: one for name, one in theirs.CLASSIC.items() if name != "attention_sage"}


@pytest.fixture
def webui(monkeypatch):
    made = Webui(monkeypatch, "a1111")
    made.shared.loaded_hypernetworks = theirs.hypernetworks
    made.put("modules.hypernetworks.hypernetwork", apply_hypernetworks=theirs.apply_hypernetworks)
    made.shared.opts.data["upcast_attn"] = False
    conformance.with_xformers(monkeypatch, theirs)
    made.start()
    yield made
    theirs.hypernetworks.clear()
    theirs.upcast.on = False
    made.call("script_unloaded")


def registry(webui):
    """The engine's, as the running extension has it."""
    return __import__("sys").modules["_tome_core_webui.tome_core.attention"]


def hijacked(monkeypatch, name, dtype=torch.float32):
    monkeypatch.setattr(theirs.CrossAttention, "forward", theirs.HIJACKS[name], raising=False)
    return made(theirs.CrossAttention, dtype)


def made(kind, dtype=torch.float32):
    return telling(kind(CHANNELS, HEADS), dtype)


def ways(webui, monkeypatch, module, dtype=torch.float32, **kwargs):
    monkeypatch.setattr(conformance, "known_of", registry(webui).known_of)
    return conformance.ways(module, dtype, **kwargs)


@pytest.mark.parametrize("dtype", some_quick(DTYPES), ids=str)
@pytest.mark.parametrize("name", theirs.HIJACKS)
def test_each_of_a1111s_forwards_is_known(webui, monkeypatch, name, dtype):
    found = ways(webui, monkeypatch, hijacked(monkeypatch, name, dtype), dtype, mask=None, additional_tokens=None)
    assert found == (BOTH if name == TORCH else WIDER)


@pytest.mark.parametrize("dtype", some_quick([torch.bfloat16, torch.float16]), ids=str)
@pytest.mark.parametrize("name", [one for one in theirs.HIJACKS if one.startswith(("split", "sub", "xf", "scaled"))])
def test_they_may_cast_to_float32(webui, monkeypatch, name, dtype):
    theirs.upcast.on = webui.shared.opts.data["upcast_attn"] = True
    # the mask would stay in half precision, which torch's function refuses
    assert ways(webui, monkeypatch, hijacked(monkeypatch, name, dtype), dtype, tolerance=2e-2) == WIDER


@pytest.mark.parametrize("name", theirs.HIJACKS)
def test_hypernetworks_change_merged_tokens_once(webui, monkeypatch, name):
    theirs.hypernetworks += [theirs.Hypernetwork(CHANNELS, torch.float64) for _ in range(2)]
    module = hijacked(monkeypatch, name, torch.float64)
    x = tokens(2, dtype=torch.float64)
    changed = own(module, x, None)
    assert ways(webui, monkeypatch, module, torch.float64) == (BOTH if name == TORCH else WIDER)
    theirs.hypernetworks.clear()
    assert not torch.allclose(changed, own(module, x, None))


def test_keys_and_values_go_through_their_own_halves_of_a_hypernetwork(webui, monkeypatch):
    theirs.hypernetworks.append(theirs.Hypernetwork(CHANNELS, torch.float64))
    module, x = hijacked(monkeypatch, TORCH, torch.float64), tokens(2, dtype=torch.float64)
    keys, plan = tokens(2, GROUPS, torch.float64, 1), ragged(2, TOKENS, GROUPS)
    known = registry(webui).known_of(module)
    out = attend_merged(known, module, x, keys, keys.clone(), plan, {}).out
    assert_sized(own, module, x, keys, plan.sizes, out)


@pytest.mark.parametrize("dtype", some_quick(DTYPES), ids=str)
@pytest.mark.parametrize(("kind", "name", "functions", "adding"), [
    (theirs.ForgeAttention, "attention_function", theirs.FORGE, {"attention_basic", "attention_pytorch"}),
    (theirs.ReforgeAttention, "optimized_attention", theirs.REFORGE,
     {"attention_basic", "attention_split", "attention_pytorch"}),
    (theirs.ClassicAttention, "optimized_attention", _WITHOUT_SAGE, {"attention_pytorch"}),
], ids=["forge", "reforge", "classic"])  # fmt: skip
def test_each_of_the_forges_functions_takes_sizes_its_own_way(
    webui, monkeypatch, kind, name, functions, adding, dtype
):  # fmt: skip
    for function in functions:
        monkeypatch.setattr(theirs, name, functions[function])
        monkeypatch.setattr(theirs, "optimized_attention_masked", theirs.optimized_attention)
        found = ways(webui, monkeypatch, made(kind, dtype), dtype, mask=None)
        assert found == (BOTH if function in adding else WIDER), function


@pytest.mark.parametrize("kind", [theirs.ForgeAttention, theirs.ReforgeAttention])
def test_a_function_that_nobody_knows_gets_wider_heads(webui, monkeypatch, kind):
    def sage(q, k, v, heads, mask=None, attn_precision=None):
        assert mask is None
        return theirs.REFORGE["attention_pytorch"](q, k, v, heads)

    for name in ("attention_function", "optimized_attention", "optimized_attention_masked"):
        monkeypatch.setattr(theirs, name, sage)
    assert ways(webui, monkeypatch, made(kind)) == WIDER


@pytest.mark.parametrize(("width", "merges_inside"), [(64, False), (40, True)])
def test_classics_sage_is_never_called_with_wider_heads(webui, monkeypatch, width, merges_inside):
    monkeypatch.setattr(theirs, "optimized_attention", theirs.CLASSIC["attention_sage"])
    monkeypatch.setattr(theirs, "optimized_attention_masked", theirs.CLASSIC["attention_sage"])
    module = theirs.ClassicAttention(2 * width, 2)
    problem = registry(webui).known_of(module).problem(module, {})
    assert problem == (None if merges_inside else "its function takes no wider heads")


def test_no_mask_is_made_where_it_would_call_another_function(webui, monkeypatch):
    monkeypatch.setattr(theirs, "optimized_attention_masked", theirs.REFORGE["attention_basic"])
    assert ways(webui, monkeypatch, made(theirs.ReforgeAttention)) == WIDER


@pytest.mark.parametrize("kind", [
    theirs.CrossAttention, theirs.ForgeAttention, theirs.ReforgeAttention, theirs.ClassicAttention,
])
def test_a_mask_is_a_problem(webui, monkeypatch, kind):
    module = hijacked(monkeypatch, TORCH) if kind is theirs.CrossAttention else made(kind)
    known = registry(webui).known_of(module)
    assert known.problem(module, {"mask": torch.ones(1)}) == "a mask came along"
    assert known.problem(module, {"mask": None, "n_times_crossframe_attn_in_self": 0}) is None


def test_a_forward_of_somebody_elses_is_not_known(webui, monkeypatch):
    def forward(self, x, context=None, mask=None, **kwargs):
        return x

    monkeypatch.setattr(theirs.CrossAttention, "forward", forward, raising=False)
    assert registry(webui).known_of(made(theirs.CrossAttention)) is None
