"""One contract, every model: what patching, calling and unpatching have to mean, whatever the model is."""

from __future__ import annotations

import inspect

import pytest
import torch
from diffusers import LatteTransformer3DModel, SanaTransformer2DModel
from torch import nn

import tome_core
from tests.families import Family, every_family, every_family_in_time, every_model, largest_difference
from tests.models import ModelCase, call_case, inputs, merge_with_self
from tests.thoroughness import some_quick
from tests.traces import attributes, is_idle, traces
from tome_core import MergeConfig
from tome_core.merging.grid import split_grid
from tome_core.merging.methods import METHODS, bipartite
from tome_core.models import find_models
from tome_core.models.unet_blocks import find_unet
from tome_core.settings.config import SIDES

EVERYTHING = {"ratio": 0.5, "merge_crossattn": True, "merge_mlp": True}
ALL_LEVELS = MergeConfig(max_downsample=8, **EVERYTHING)
# tokens that a mask hides are left out before a merge: other sums
PADDED = ("Qwen-Image, padded", "HunyuanVideo", "HunyuanVideo 1.5", "HunyuanImage")


# --- on ---------------------------------------------------------------------------------------------------------------


@every_family
@pytest.mark.parametrize("batch", some_quick([2, 1, 3]))
def test_merging_changes_the_picture_and_says_so(case: ModelCase, batch: int):
    model = case.build()
    vanilla = call_case(case, model, batch)
    assert tome_core.apply_patch(model, ratio=0.5) is model
    merged = call_case(case, model, batch)
    report = tome_core.report(model)
    assert merged.shape == vanilla.shape and merged.isfinite().all()
    assert largest_difference(merged, vanilla) > 1e-3
    level = report.levels[0]
    assert report.calls == 1 and level.calls_merged == level.blocks and not level.reasons
    assert level.work_saved == pytest.approx(0.75)


@every_model
def test_what_lies_over_a_model_is_named_before_and_after_a_call_that_never_came_to_us(one: Family):
    model = one.build()
    plain = one.call(model)
    (network,) = find_models(model)
    with tome_core.patch(model, **EVERYTHING) as handle:
        ours = network.forward

        def kept(*args, **kwargs):
            return one.call(one.build())

        network.forward = kept
        for _ in range(2):
            assert f"no call counted yet; something else runs in its place: {__name__}" in handle.report().headline
            assert torch.equal(network(), plain)
        network.forward = ours
        one.call(model)
    assert handle.report().merged_anything and "counted yet" not in str(handle.report())


@every_model
@pytest.mark.parametrize("side", [{"side": "qkv"}, {"side": "kv"}], ids=str)
def test_merging_each_token_with_itself_changes_no_bit(one: Family, side: dict, monkeypatch):
    """The plumbing alone: every site merges and unmerges, and nothing but the plan may make a difference."""
    merge_with_self(monkeypatch)
    model = one.build()
    vanilla = one.call(model)
    plain = MergeConfig(max_downsample=8, proportional=False, **side, **EVERYTHING)
    with tome_core.patch(model, plain) as handle:
        assert largest_difference(one.call(model), vanilla) <= (1e-5 if one.name in PADDED else 0.0)
    with tome_core.patch(model, MergeConfig(max_downsample=8, **side, **EVERYTHING)):
        assert largest_difference(one.call(model), vanilla) <= 1e-3  # other sums, and a UNet that amplifies them
    assert all(level.calls_merged >= level.blocks for level in handle.report().levels)


@every_model
@pytest.mark.parametrize("method", list(METHODS))
def test_every_method_part_and_side_runs_at_every_level(one: Family, method: str):
    model = one.build()
    vanilla = one.call(model)
    for side in SIDES:
        config = MergeConfig(method=method, side=side, max_downsample=8, merge_crossattn=True, merge_mlp=True)
        with tome_core.patch(model, config) as handle:
            merged = one.call(model)
        assert merged.isfinite().all() and largest_difference(merged, vanilla) > 1e-4
        assert all(level.calls_merged for level in handle.report().levels)


@every_family_in_time
def test_a_call_by_keywords_is_the_same_call(case: ModelCase):
    model = case.build()
    tome_core.apply_patch(model, max_downsample=8, **EVERYTHING)
    by_position = call_case(case, model)
    unet = find_unet(model)
    names = list(inspect.signature(type(unet).forward).parameters)[1:]

    def call(*args, **kwargs):
        return unet(**dict(zip(names, args, strict=False)), **kwargs)

    assert torch.equal(call_case(case, call), by_position)


@every_model
def test_the_global_rng_is_left_alone_and_equal_seeds_give_equal_bits(one: Family):
    model = one.build()
    tome_core.apply_patch(model, seed=3)
    state = torch.get_rng_state()
    first = one.call(model, timestep=321)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(17)
    one.call(model, timestep=5)
    assert torch.equal(one.call(model, timestep=321), first)
    tome_core.apply_patch(model, seed=4)
    assert not torch.equal(one.call(model, timestep=321), first)


@every_family_in_time
def test_conditional_and_unconditional_passes_may_run_apart(case: ModelCase, monkeypatch):
    """Same destinations, and a difference no larger than last-bit noise in the input makes."""
    drawn = []

    def split_and_note(*args):
        drawn.append(split_grid(*args))
        return drawn[-1]

    monkeypatch.setattr(bipartite, "split_grid", split_and_note)
    model = case.build()
    tome_core.apply_patch(model, ratio=0.5)
    together = call_case(case, model)
    apart = call_case(case, model, batch=1)
    for (whole, _), (part, _) in zip(drawn[: len(drawn) // 2], drawn[len(drawn) // 2 :], strict=True):
        assert torch.equal(whole[:1], part[:1])
    difference = largest_difference(apart, together[:1])
    noise = max(largest_difference(_call_with_noise(case, model, seed), together[:1]) for seed in range(8))
    assert difference <= max(4 * noise, 1e-5)


def _call_with_noise(case: ModelCase, model, seed: int) -> torch.Tensor:
    x, text = inputs(case.in_channels, 1, 16, 16, frames=case.frames)
    bits = torch.randint(-1, 2, x.shape, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        return case.call(model, x * (1 + bits * 2.0**-23), 500, text)


# --- off --------------------------------------------------------------------------------------------------------------


@every_model
def test_where_nothing_is_to_merge_no_bit_changes(one: Family):
    model = one.build()
    vanilla = one.call(model)
    for settings in (
        {"ratio": 0.0, "merge_crossattn": True, "merge_mlp": True, "max_downsample": 8}, {"merge_attn": False},
        {"min_timestep": 999.0},
    ):  # fmt: skip
        with tome_core.patch(model, **settings) as handle:
            assert torch.equal(one.call(model), vanilla)
        assert not handle.report().merged_anything
    with tome_core.patch(model) as handle, handle.unmerged():
        assert torch.equal(one.call(model), vanilla)


@every_model
def test_removing_restores_every_bit_and_leaves_nothing_behind(one: Family):
    model = one.build()
    before, held, vanilla = traces(model), attributes(model), one.call(model)
    with tome_core.patch(model, ALL_LEVELS) as handle:
        one.call(model)
        assert model.state_dict().keys() == one.build().state_dict().keys() and handle.is_installed
    assert not handle.is_installed and not tome_core.report(model).patched
    assert traces(model) == before and torch.equal(one.call(model), vanilla)
    for _ in range(3):
        tome_core.apply_patch(model, **EVERYTHING)
        one.call(model)
    assert tome_core.remove_patch(model) is model
    assert traces(model) == before and attributes(model) == held and torch.equal(one.call(model), vanilla)
    assert tome_core.remove_patch(model) is model


@every_model
def test_a_patch_over_a_patch_is_the_second_alone(one: Family):
    once, twice = one.build(), one.build()
    tome_core.apply_patch(once, ratio=0.25)
    tome_core.apply_patch(twice, ratio=0.75, merge_mlp=True)
    tome_core.apply_patch(twice, ratio=0.25)
    assert torch.equal(one.call(once), one.call(twice))
    assert traces(once) == traces(twice)


@every_model
def test_leaving_a_with_brings_back_what_was_there(one: Family):
    model = one.build()
    vanilla = one.call(model)
    tome_core.apply_patch(model, ratio=0.25)
    outer = one.call(model)
    with tome_core.patch(model, MergeConfig(ratio=0.5)):
        middle = one.call(model)
        with tome_core.patch(model, MergeConfig(ratio=0.75)):
            inner = one.call(model)
        assert torch.equal(one.call(model), middle)
        tome_core.apply_patch(model, ratio=0.6)
    assert torch.equal(one.call(model), outer)
    tome_core.remove_patch(model)
    assert torch.equal(one.call(model), vanilla)
    assert len({picture.sum().item() for picture in (vanilla, outer, middle, inner)}) == 4


@every_model
def test_a_handle_that_is_entered_again_is_there_again(one: Family):
    model = one.build()
    handle = tome_core.patch(model, MergeConfig())
    merged = one.call(model)
    handle.remove()
    with handle:
        with tome_core.patch(model, MergeConfig(ratio=0.25)):
            pass
        assert torch.equal(one.call(model), merged)
    handle.remove()
    assert not handle.is_installed and not torch.equal(one.call(model), merged)


@every_model
def test_an_exception_in_mid_forward_leaves_the_patch_usable(one: Family):
    model = one.build()
    vanilla = one.call(model)
    handle = tome_core.patch(model, ALL_LEVELS)
    merged = one.call(model)
    last = [module for module in model.modules() if hasattr(module, "to_q")][-1]
    hook = last.to_q.register_forward_pre_hook(_raise)
    with pytest.raises(RuntimeError, match="interrupted"):
        one.call(model)
    hook.remove()
    assert is_idle(handle)
    assert torch.equal(one.call(model), merged)
    handle.remove()
    assert torch.equal(one.call(model), vanilla)


def _raise(*_):
    raise RuntimeError("interrupted")


# --- what is no model -------------------------------------------------------------------------------------------------


def latte() -> nn.Module:
    """Whose frames lie within its batch."""
    return LatteTransformer3DModel(
        in_channels=4, out_channels=4, num_layers=1, attention_head_dim=16, num_attention_heads=2, sample_size=8,
        patch_size=2, cross_attention_dim=32, caption_channels=32, norm_type="ada_norm_single",
        num_embeds_ada_norm=1000, video_length=2,
    )  # fmt: skip


def sana() -> nn.Module:
    """Whose attention is linear."""
    return SanaTransformer2DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=1,
        num_cross_attention_heads=2, cross_attention_head_dim=16, cross_attention_dim=32, caption_channels=32,
        sample_size=8,
    )  # fmt: skip


@pytest.mark.parametrize("build, found", [
    (latte, "where a picture's tokens lie in its sequences, and what its timestep means; found 3 Attention"),
    (sana, "no attention function that is known is called by SanaLinearAttnProcessor2_0; found 2 Attention"),
    (lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "no attention function that is known is called in it"),
], ids=["Latte", "Sana", "layers"])  # fmt: skip
def test_a_model_that_is_not_known_is_refused_with_what_was_found(build, found):
    class Pipeline:
        transformer = build()

    for model in (Pipeline.transformer, Pipeline()):
        with pytest.raises(tome_core.UnsupportedModelError) as caught:
            tome_core.patch(model)
        text = str(caught.value)
        assert found in text and all(known in text for known in ("BasicTransformerBlock", "Stable Diffusion", "Flux"))
        assert text.startswith(f"{type(Pipeline.transformer).__name__} is not known: ")
        assert not tome_core.report(model).patched and tome_core.remove_patch(model) is model


@pytest.mark.parametrize("thing", [None, 3, "runwayml/stable-diffusion-v1-5", object()])
def test_what_is_no_model_is_a_type_error(thing):
    with pytest.raises(TypeError, match="has to be a UNet, a diffusers pipeline or an LDM model"):
        tome_core.apply_patch(thing)
    assert tome_core.remove_patch(thing) is thing
    assert str(tome_core.report(thing)) == "Token merging: not applied to this model."
