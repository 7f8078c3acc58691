"""InvokeAI's attention processor, by a double of its name and protocol: keys and values merge as in diffusers' own."""

from __future__ import annotations

import torch
from diffusers.models.attention_processor import AttnProcessor2_0
from torch import nn

from tests.models import inputs, sd15
from tome_core import patch

_CALL = AttnProcessor2_0.__call__


class CustomAttnProcessor2_0(AttnProcessor2_0):
    """Set on every attention; regional_prompt_data and percent_through come with each call."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, temb=None,
                 regional_prompt_data=None, percent_through=None, *args, **kwargs):
        assert percent_through == 0.5
        return _CALL(self, attn, hidden_states, encoder_hidden_states, attention_mask, temb)


CustomAttnProcessor2_0.__module__ = "invokeai.backend.stable_diffusion.diffusion.custom_atttention"
CustomAttnProcessor2_0.__call__.__module__ = CustomAttnProcessor2_0.__module__


@torch.no_grad()
def call(model):
    ours = isinstance(next(iter(model.attn_processors.values())), CustomAttnProcessor2_0)
    more = {"cross_attention_kwargs": {"percent_through": 0.5}} if ours else {}
    x, text = inputs(4, 2, 16, 16)
    return model(x, 500, text, **more).sample


def test_it_merges_what_diffusers_own_merges():
    model = sd15()
    settings = {"ratio": 0.75, "side": "kv", "only_if_it_pays": False}
    with patch(model, **settings) as handle:
        expected = call(model)
        told = handle.report().as_data()["levels"]
    model.set_attn_processor({name: CustomAttnProcessor2_0() for name in model.attn_processors})
    plain = call(model)
    with patch(model, **settings) as handle:
        found = call(model)
        assert handle.report().as_data()["levels"] == told and handle.report().merged_anything
    assert torch.equal(found, expected) and not torch.equal(found, plain)
    assert torch.equal(call(model), plain)


def test_heads_with_norms_which_it_does_not_apply_are_not_taken_apart():
    model = sd15()
    model.set_attn_processor({name: CustomAttnProcessor2_0() for name in model.attn_processors})
    for one in model.modules():
        if hasattr(one, "norm_q"):
            one.norm_q = nn.Identity()
    with patch(model, ratio=0.5, side="kv", only_if_it_pays=False) as handle:
        call(model)
    assert "norms" in str(handle.report())
