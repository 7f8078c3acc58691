"""Merging in diffusers' own form: a hook in the UNet's registry does what a patch does, beside the hooks of others."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import tome_core
from tests import models
from tests.checkout import ROOT
from tests.pipelines import assert_merged, differ, draw, every_kind
from tests.thoroughness import some_quick
from tests.traces import traces
from tome_core import MergeConfig, UnsupportedModelError
from tome_core.diffusers_hooks import TokenMergingConfig, apply_token_merging, remove_token_merging

hooks = pytest.importorskip("diffusers.hooks", reason="this diffusers has no hooks")
HookRegistry = hooks.HookRegistry

TIMES = (801, 781, 401, 381)  # both phases of a preset, in each a match that is kept for a step
PLAIN = {"ratio": 0.5, "use_rand": False}


def picture(unet: torch.nn.Module, times=TIMES, size: int = 32, seed: int = 0, batch: int = 1) -> torch.Tensor:
    """A loop of somebody's own: what all its calls give."""
    x, text = models.inputs(4, batch, size, size, seed)
    with torch.no_grad():
        for time in times:
            x = x - 0.1 * unet(x, torch.tensor(time), encoder_hidden_states=text).sample
    return x


@contextmanager
def as_one_sampling(unet: torch.nn.Module, config: Any = "balanced") -> Iterator[None]:
    with tome_core.patch(unet, config) as handle, handle.sampling():
        yield


@pytest.fixture(scope="module")
def alone() -> tuple[torch.Tensor, torch.Tensor]:
    """Pictures of a UNet without us, and under a patch."""
    plain = picture(unet := models.sd15())
    with as_one_sampling(unet):
        return plain, picture(unet)


@every_kind
def test_a_pipeline_draws_what_a_patch_of_its_unet_draws(build, kind: str):
    pipe = build(kind)
    plain, found = draw(pipe), traces(pipe.unet)
    with as_one_sampling(pipe.unet):
        merged = draw(pipe)
    with as_one_sampling(pipe.unet):
        other = draw(pipe, seed=1)
    handle = apply_token_merging(pipe.unet)
    assert torch.equal(draw(pipe), merged) and torch.equal(draw(pipe, seed=1), other)
    assert torch.equal(draw(pipe), merged) and differ(plain, merged, other)
    assert_merged(handle)
    remove_token_merging(pipe.unet)
    assert torch.equal(draw(pipe), plain) and traces(pipe.unet) == found


@pytest.mark.parametrize("config, same", [
    (TokenMergingConfig(), "balanced"),
    (TokenMergingConfig(strength=0.75), "fast"),
    (TokenMergingConfig(settings=PLAIN), MergeConfig(**PLAIN)),
    (TokenMergingConfig(strength=0), None),
])  # fmt: skip
def test_strength_and_settings_mean_what_they_mean_to_a_patch_and_0_is_off(alone, config, same):
    unet = models.sd15()
    merged, _ = alone
    if same is not None:
        with as_one_sampling(unet, same):
            merged = picture(unet)
    apply_token_merging(unet, config)
    assert torch.equal(picture(unet), merged) and torch.equal(merged, alone[0]) == (same is None)


@pytest.mark.parametrize("before", [{}, {"times": TIMES[:3]}, {"size": 48, "times": TIMES[:1]}])
def test_a_picture_does_not_depend_on_the_one_before_it(alone, before):
    """Nobody says in a loop of one's own where a picture ends: time that goes back, or another size, does."""
    unet = models.sd15()
    apply_token_merging(unet)
    picture(unet, seed=3, **before)
    assert torch.equal(picture(unet), alone[1])


def test_what_resets_stateful_hooks_begins_a_new_picture():
    unet, fresh = models.sd15(), models.sd15()
    for one in (unet, fresh):
        apply_token_merging(one)
    picture(unet, TIMES[:3], seed=3)
    unet._diffusers_hook.reset_stateful_hooks()
    assert torch.equal(picture(unet, TIMES[3:]), picture(fresh, TIMES[3:]))


class Doubled(hooks.ModelHook):
    """A hook of somebody else's, which changes what the UNet is given."""

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple, dict]:
        return (args[0] * 2, *args[1:]), kwargs


# not theirs first to come and first to leave: the registry of diffusers 0.42.1 then drops any hook above that has a
# `new_forward`, and brings the one that left back with the other's end
@pytest.mark.parametrize("ours_first, ours_leaves_first", [(True, True), *(
    pytest.param(*one, marks=pytest.mark.slow) for one in ((True, False), (False, True)))])  # fmt: skip
def test_hooks_of_others_come_and_go(alone, ours_first: bool, ours_leaves_first: bool):
    unet, other = models.sd15(), models.sd15()
    plain, merged = alone
    registry = HookRegistry.check_if_exists_or_initialize(unet)
    HookRegistry.check_if_exists_or_initialize(other).register_hook(Doubled(), "doubled")
    doubled = picture(other)
    with as_one_sampling(other):
        both = picture(other)
    for ours in (ours_first, not ours_first):
        apply_token_merging(unet) if ours else registry.register_hook(Doubled(), "doubled")
    assert torch.equal(picture(unet), both) and differ(plain, doubled, merged, both)
    for ours, left in ((ours_leaves_first, doubled if ours_leaves_first else merged), (not ours_leaves_first, plain)):
        remove_token_merging(unet) if ours else registry.remove_hook("doubled")
        assert torch.equal(picture(unet), left)


def _cast(unet: torch.nn.Module) -> None:
    hooks.apply_layerwise_casting(unet, torch.bfloat16, torch.float32)


def _offload_groups(unet: torch.nn.Module) -> None:
    cpu = torch.device("cpu")
    hooks.apply_group_offloading(unet, cpu, cpu, offload_type="leaf_level")


@pytest.mark.parametrize("apply", [_cast, _offload_groups])
@pytest.mark.parametrize("ours_first", some_quick([True, False]))
def test_casting_and_offloading_by_hooks_lie_beside_it(apply, ours_first: bool):
    unet, other = models.sd15(), models.sd15()
    apply(other)
    plain = picture(other)
    with as_one_sampling(other):
        merged = picture(other)
    for each in (apply_token_merging, apply) if ours_first else (apply, apply_token_merging):
        each(unet)
    assert torch.equal(picture(unet), merged) and differ(plain, merged)
    remove_token_merging(unet)
    assert torch.equal(picture(unet), plain)


def _broadcast(unet: torch.nn.Module) -> None:
    """Every second answer of a self-attention is the one before it."""
    config = hooks.PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2, current_timestep_callback=lambda: 500,
        spatial_attention_block_identifiers=("transformer_blocks",),
    )  # fmt: skip
    hooks.apply_pyramid_attention_broadcast(unet, config)


@pytest.mark.parametrize("ours_first", [True, False])
def test_a_cache_that_a_unet_can_take_goes_on_skipping(alone, ours_first: bool):
    """FirstBlockCache and others look for a list of blocks, which no UNet has; this one looks for attentions.

    Attentions on which it lay first are left whole, and the report says so.
    """
    unet, other, cached = models.sd15(), models.sd15(), models.sd15()
    _broadcast(cached)
    if ours_first:
        handle = apply_token_merging(unet)
        _broadcast(unet)
    else:
        _broadcast(unet)
        handle = apply_token_merging(unet)
        _broadcast(other)
    with as_one_sampling(other):
        if ours_first:
            _broadcast(other)
        wanted = picture(other)
    assert torch.equal(picture(unet), wanted)
    assert differ(alone[0], wanted) and torch.equal(picture(cached), wanted) != ours_first
    assert ours_first or "put on after merging, both work" in str(handle.report())


@pytest.mark.parametrize("ours_first", [True, False])
@pytest.mark.parametrize("ours_leaves_first", some_quick([True, False]))
def test_a_pipeline_may_offload_its_models(build, ours_first: bool, ours_leaves_first: bool):
    pytest.importorskip("accelerate", reason="offloading is accelerate's")
    pipe = build()
    plain = draw(pipe)
    with as_one_sampling(pipe.unet):
        merged = draw(pipe)
    if ours_first:
        apply_token_merging(pipe.unet)
    pipe.enable_model_cpu_offload(device="cpu")  # which poses as the accelerator
    if not ours_first:
        apply_token_merging(pipe.unet)
    for _ in range(3):
        assert torch.equal(draw(pipe), merged)
    for ours in (ours_leaves_first, not ours_leaves_first):
        remove_token_merging(pipe.unet) if ours else pipe.remove_all_hooks()
        assert torch.equal(draw(pipe), plain if ours or ours_leaves_first else merged)


def test_a_pipeline_may_be_moved_and_saved_while_it_is_on(build, tmp_path):
    pipe = build()
    keys = set(pipe.unet.state_dict())
    apply_token_merging(pipe.unet)
    merged = draw(pipe)
    pipe.to(torch.float64)
    pipe.to(torch.float32)
    assert torch.equal(draw(pipe), merged) and set(pipe.unet.state_dict()) == keys
    pipe.unet.save_pretrained(tmp_path)
    loaded = type(pipe.unet).from_pretrained(tmp_path).eval()
    remove_token_merging(pipe.unet)
    assert torch.equal(picture(loaded, batch=2), picture(pipe.unet, batch=2))


def test_what_it_was_taken_off_can_be_copied_and_pickled(alone):
    """While a hook is on, diffusers' registry holds a function of its own that no pickle takes."""
    unet = models.sd15()
    HookRegistry.check_if_exists_or_initialize(registered := models.sd15()).register_hook(Doubled(), "doubled")
    apply_token_merging(unet)
    for one in (registered, unet):
        with pytest.raises((AttributeError, pickle.PicklingError)):
            pickle.dumps(one)
    picture(unet)
    remove_token_merging(unet)
    for copied in (copy.deepcopy(unet), pickle.loads(pickle.dumps(unet))):
        assert torch.equal(picture(copied), alone[0])


def test_what_cannot_be_is_said_and_leaves_nothing():
    unet = models.sd15()
    before = traces(unet)
    with pytest.raises(ValueError, match="give one of them"):
        TokenMergingConfig(strength=0.5, settings=PLAIN)
    with pytest.raises(ValueError, match="no number from 0 to 1"):
        apply_token_merging(unet, TokenMergingConfig(strength=2))
    remove_token_merging(unet)
    assert traces(unet) == before
    with pytest.raises(UnsupportedModelError):
        apply_token_merging(flat := torch.nn.Sequential(torch.nn.Linear(2, 2)))
    assert "_diffusers_hook" not in vars(flat)
    handle = apply_token_merging(unet)
    with pytest.raises(ValueError, match="already exists"):
        apply_token_merging(unet)
    assert handle.is_installed


def test_diffusers_is_imported_when_it_is_called_and_not_before():
    code = "import sys, tome_core.diffusers_hooks as hooks; hooks.TokenMergingConfig(strength=0.3);" \
        "assert 'diffusers' not in sys.modules"  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
