"""The attentions of CompVis' and Stability AI's own code: merged keys give what repeated keys give.

``ldm`` is the package itself, sgm's attention the double of it.
"""

from __future__ import annotations

import contextlib
import io

import pytest
import torch
from ldm.modules import attention as ldm_attention

from tests import conformance as laws
from tests.conformance import CHANNELS, HEADS, SIDE, UNetOf, run, telling, tokens, way, why_left_alone
from tests.doubles import SgmAttention
from tome_core.attention.merged import BIAS, OWN_BIAS

KINDS: dict[str, tuple[type, str]] = {
    "ldm": (ldm_attention.CrossAttention, OWN_BIAS),  # by hand
    "ldm_xformers": (ldm_attention.MemoryEfficientCrossAttention, OWN_BIAS),  # heads lie within the batch
    "sgm": (SgmAttention, BIAS),  # its function is called by a helper
}


@pytest.fixture(autouse=True)
def _xformers(monkeypatch):
    """And LDM's plain attention as it comes: in float32 it goes with halves under CUDA's autocast alone."""
    laws.with_xformers(monkeypatch, ldm_attention)
    monkeypatch.setattr(ldm_attention, "_ATTN_PRECISION", "fp16")


def attention(kind: str, dtype: torch.dtype = torch.float32, heads: int = HEADS, width: int = CHANNELS // HEADS):
    made = KINDS[kind][0]
    if made is SgmAttention:
        return telling(made(CHANNELS, heads, CHANNELS), dtype)
    with contextlib.redirect_stdout(io.StringIO()):
        return telling(made(CHANNELS, heads=heads, dim_head=width), dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_merged_keys_give_what_repeated_keys_give(kind):
    expected = KINDS[kind][1]
    for dtype in laws.DTYPES:
        assert way(attention(kind, dtype), dtype, batches=(3,)) == expected, dtype
    assert way(attention(kind), queries=True) == expected
    if kind != "sgm":  # heads may be wider or narrower than the tokens
        assert all(way(attention(kind, heads=heads, width=width)) == expected for heads, width in ((2, 40), (3, 5)))
    with torch.autocast("cpu", torch.bfloat16):
        way(attention(kind), tolerance=laws.TOLERANCE[torch.bfloat16])
    module = attention(kind)
    module.scale = 0.7  # LDM's plain attention multiplies by it; the others scale by the width of their heads
    before = dict(vars(module))
    assert way(module) == expected and vars(module) == before
    assert "keys and values" in why_left_alone(module, context=tokens(3, count=9))


def test_code_that_a_host_puts_on_the_class_counts(monkeypatch):
    """As the webui does for its choice of cross-attention optimization."""
    module = attention("ldm")
    assert way(module) == OWN_BIAS
    monkeypatch.setattr(ldm_attention.CrossAttention, "forward", ldm_attention.MemoryEfficientCrossAttention.forward)
    module.attention_op, module.dim_head = None, CHANNELS // HEADS
    assert way(module) == OWN_BIAS
    monkeypatch.setattr(ldm_attention.CrossAttention, "forward", lambda self, x, context=None, mask=None: x)
    assert "calls no attention function that is known" in why_left_alone(module)


@pytest.mark.parametrize("kind", ["ldm", "sgm"])
def test_a_call_with_a_mask_is_left_alone(kind):
    mask = torch.arange(SIDE**2) < SIDE**2 // 2
    mask = mask.expand(3, -1) if kind == "ldm" else torch.where(mask, 0.0, -9.0)[None, None, None]  # as torch takes it
    module = attention(kind)
    assert not torch.equal(run(UNetOf(module, mask=mask), tokens(3)), run(UNetOf(module), tokens(3)))
    assert "mask" in why_left_alone(module, mask=mask)


def test_sgms_additional_tokens_are_left_alone():
    """Only its own forward knows which of the tokens they are."""
    reason = why_left_alone(attention("sgm"), additional_tokens=tokens(3, count=3, seed=1))
    assert "the tokens are not the picture's grid" in reason
