"""Every self-attention of every family of models, by hooks from outside: merged keys give what repeated keys give."""

import contextlib
import copy
from collections.abc import Iterator

import pytest
import torch
from ldm.modules import attention as ldm_attention
from torch import nn

import tome_core
from tests.engine.attention.conformance import GROUPS, KV, assert_repeated, far, means, merging_by, ragged
from tests.small_models import dits
from tests.small_models.families import any_unet
from tests.small_models.unets import Family
from tests.thoroughness import some_quick
from tome_core import MergeConfig
from tome_core.attention.merged import BIAS, OWN_BIAS
from tome_core.models.transformer import family_of, find_attentions
from tome_core.models.unet_blocks import find_blocks, find_unet

QKV = MergeConfig(ratio=0.75, correction=False, use_rand=False, max_downsample=8)


@contextlib.contextmanager
def watched(model: nn.Module, names: list[str]) -> Iterator[list[tuple]]:
    """Collect the calls of these modules, outside of all patches: name, arguments and output."""
    seen = []
    hooks = [
        model.get_submodule(name).register_forward_hook(
            lambda module, args, kwargs, out, name=name: seen.append((name, args, kwargs, out)), with_kwargs=True
        )
        for name in names
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


@any_unet
def test_every_self_attention_of_every_family_gives_what_repeated_keys_give(family: Family, monkeypatch):
    # LDM's plain attention casts its logits to float32, and of float64 it makes nothing
    monkeypatch.setattr(ldm_attention, "_ATTN_PRECISION", "fp16")
    model = family.build()
    unet = find_unet(model)
    names = [f"{place.path}.attn1" for place in find_blocks(unet) if not getattr(place.block, "disable_self_attn", 0)]
    plain = copy.deepcopy(unet)
    for config, roles in ((KV, "kv"), (QKV, "qkv")):
        with merging_by(), tome_core.patch(model, config) as handle, watched(unet, names) as seen:
            family.call(model)
        assert [name for name, *_ in seen] == names
        for name, args, kwargs, out in seen:
            plan = ragged(*args[0].shape[:2], GROUPS)
            assert_repeated(plain.get_submodule(name), args, kwargs, out, plan, roles=roles)
        levels = handle.report().levels
        assert sum(level.calls_merged for level in levels) == len(names)
        way = OWN_BIAS if family.name.startswith("ldm") else BIAS  # ldm's attention computes by hand
        assert all(level.sized_by.keys() == {way} for level in levels)


def first(out: torch.Tensor | tuple) -> torch.Tensor:
    return out[0] if isinstance(out, tuple) else out


@pytest.mark.parametrize("name", some_quick(dits.PRESENT, 2))
@pytest.mark.parametrize("config", [KV, QKV], ids=["kv", "qkv"])
def test_every_self_attention_of_every_transformer_gives_what_repeated_keys_give(name, config, monkeypatch):
    """Positions enter after the projections, so the function's arguments are exchanged; text tokens do not merge."""
    model, arguments = dits.make(name)
    plain, names = copy.deepcopy(model), [path for path, _ in find_attentions(model, family_of(model))]
    with merging_by(), tome_core.patch(model, config) as handle, watched(model, names) as seen:
        dits.call(model, arguments)
    *_, before, count, _ = dits.MODELS[name]

    def exchanged(query, key, value, attn_mask=None, **more):
        tokens = key.shape[2]
        start = before if tokens > count else 0
        picture, group = ragged(len(key), count, GROUPS), torch.arange(tokens).repeat(len(key), 1)
        group[:, start : start + count] = picture.group + tokens
        group = group.unique(return_inverse=True)[1]
        given = [query, key, value]
        for place in (0, 1, 2) if config is QKV else (1, 2):
            given[place] = means(given[place].transpose(1, 2), group).transpose(1, 2)
        return torch._C._nn.scaled_dot_product_attention(*given, attn_mask, **more)

    def outputs() -> list[torch.Tensor]:
        return [first(plain.get_submodule(name)(*args, **kwargs)) for name, args, kwargs, _ in seen]

    assert {name for name, *_ in seen} == set(names)
    with torch.no_grad():
        unmerged = outputs()
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", exchanged)
        expected = outputs()
    for (*_, out), other, without in zip(seen, expected, unmerged, strict=True):
        assert far(first(out), other) < 1e-5 < 1e-2 < far(without, other)
    assert handle.report().levels[0].calls_merged == len(seen)
