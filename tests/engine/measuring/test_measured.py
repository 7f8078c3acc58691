"""A measurement changes nothing else, and then decides: if merging does not pay, it is off entirely."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import tome_core
from tests import tiny_transformers
from tests.families import MODELS
from tests.models import sd15, small
from tests.thoroughness import some_quick
from tests.traces import traces
from tome_core import MergeConfig
from tome_core.engine import state
from tome_core.measuring import measure
from tome_core.reporting.gains import KNOWN

_TEXT = 77
TABLE_LEAVES_ALONE, TABLE_MERGES = 16, 32  # sides of latents on a CPU
PLAIN = MergeConfig(ratio=0.5, side="kv", use_rand=False)


@pytest.fixture
def clock(monkeypatch):
    """A clock that advances by 1 for each self-attention, or by ``merged`` if its keys merge."""
    attention, clock = F.scaled_dot_product_attention, SimpleNamespace(now=0.0, merged=0.5)

    def charged(q, k, v, *args, **kwargs):
        queries, keys = q.shape[-2], k.shape[-2]
        if keys != _TEXT and len(q) > 1:  # a call of one sample is the engine's trial
            clock.now += 1.0 if keys == queries else clock.merged
        return attention(q, k, v, *args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", charged)
    monkeypatch.setattr(measure, "clock_for", lambda device: lambda: clock.now)
    return clock


def picture(model, side=TABLE_MERGES):
    return MODELS["sd15"].call(model, height=side, width=side)


def measured(handle, side=TABLE_MERGES, **more):
    return handle.measure(8 * side, 8 * side, rounds=1, **more)


def test_if_merging_is_measured_to_pay_it_merges_whatever_the_table_says(clock):
    model = small()
    plain, handle = picture(model, TABLE_LEAVES_ALONE), tome_core.patch(model)
    assert torch.equal(picture(model, TABLE_LEAVES_ALONE), plain)
    gain = measured(handle, TABLE_LEAVES_ALONE)
    assert gain.pays and gain.line == f"128x128: about {gain.ratio:.1f}x faster" and 0 < gain.saved < 1
    assert not torch.equal(picture(model, TABLE_LEAVES_ALONE), plain) and handle.report().gains == (gain,)
    assert torch.equal(picture(model, 12), picture(small(), 12)), "of another size nothing is known"
    handle.reset_counts()
    picture(model, 12)
    assert handle.report().gains == (), "a gain is of the pictures since the counts began"


def test_if_it_is_measured_not_to_pay_it_is_off_from_then_on_and_says_why(clock):
    """Another active patch keeps merging until it is put on again, because its picture may be half drawn."""
    model, other = small(), small()
    plain, handle, going_on = picture(model), tome_core.patch(model), tome_core.patch(other)
    merged = picture(other)
    clock.merged = 3.0
    gain = measured(handle)
    handle.reset_counts()
    assert torch.equal(picture(model), plain) and not torch.equal(merged, plain)
    report = handle.report()
    assert not report.merged_anything and gain.why_not in str(report) and report.gains == (gain,)
    assert handle.why_not(256, 256) == gain.why_not and gain.why_not.endswith("at 256x256")
    going_on.install()  # hosts do so at each step
    assert torch.equal(picture(other), merged)
    going_on.uninstall()
    going_on.install()
    assert torch.equal(picture(other), plain)


def test_a_gain_is_of_a_pictures_own_calls_and_rules_that_do_not_ask_merge_whatever_it_is(clock, monkeypatch):
    """A few calls make a costly match; the others renew it or use a kept match."""
    model, match = small(), state.match
    handle = tome_core.patch(model, ratio=0.5, side="kv", early_ratio=0.75, keep=60.0, refine=1, metric="keys+values")

    def charged(*args):
        clock.now += 10.0 if args[-1] is None else 3.0
        return match(*args)

    monkeypatch.setattr(state, "match", charged)
    gain, clock.now = measured(handle), 0.0
    x, text = torch.randn(1, 4, TABLE_MERGES, TABLE_MERGES), torch.zeros(2, _TEXT, 32)
    for step in range(20):
        handle.set_time(timestep=999.0 * (1 - step / 20), sampling="a", pictures=1)
        with torch.no_grad():
            model(x.repeat(2, 1, 1, 1), 0.0, text)
    assert gain.unmerged == 4 and gain.merged == pytest.approx(clock.now / 20) and not gain.pays
    assert handle.report().merged_anything and handle.report().gains == (gain,)


def test_a_gain_is_asked_for_without_a_call(clock):
    """Weights and seeds do not change the time; sizes, rules and shapes do."""
    model, calls, gain = small(), [], measured(tome_core.patch(small(), "fast"))
    model.conv_in.register_forward_hook(lambda *_: calls.append(1))
    model.conv_in.weight.data.mul_(1.5)
    handle = tome_core.patch(model, "fast", seed=5)
    assert handle.gain_for(256, 256) == handle.gain_for(256, 256, batch=8) == gain and not calls
    for name, unet, size in (("fast", small(), (256, 512)), ("max", small(), (256, 256)), ("fast", sd15(), (256, 256))):
        assert tome_core.patch(unet, name).gain_for(*size) is None


def test_a_measurement_leaves_everything_as_it_was(clock):
    model, hooked = small(), []
    model.register_forward_hook(lambda *_: hooked.append(1))
    handle = tome_core.patch(model, PLAIN)
    handle.keep_maps()
    picture(model)
    left, counts, generator = traces(model), handle.report(), torch.get_rng_state()
    measured(handle)
    after = handle.report()
    assert hooked == [1], "what counts steps is not told of a call"
    assert torch.equal(torch.get_rng_state(), generator) and traces(model) == left
    assert (after.calls, after.levels) == (counts.calls, counts.levels) and handle.maps() and handle.is_installed
    handle.uninstall()
    left = traces(model)
    with pytest.raises(ZeroDivisionError):
        handle.measure(512, 512, call=lambda x, timesteps: 1 / 0)
    assert traces(model) == left and handle.gain_for(512, 512) is None


def test_a_measurement_is_refused_if_it_would_disturb_or_mislead():
    def refused(error, words, **settings):
        with pytest.raises(error, match=words):
            handle.measure(**settings)

    model = small()
    handle = tome_core.patch(model)
    with handle.sampling():
        refused(RuntimeError, "a sampling goes on")
    handle.set_time(timestep=500.0, sampling="a host's")
    refused(RuntimeError, "a sampling goes on")
    handle.set_time()
    for bad in ({"height": 7}, {"width": 512.0}, {"batch": 0}, {"rounds": True}, {"steps": -1}):
        refused(ValueError, next(iter(bad)), **bad)
    refused(ValueError, "nothing merges at 8x8", height=8, width=8)
    model.forward = lambda *args, **kwargs: type(model).forward(model, *args, **kwargs)  # a step cacher
    refused(RuntimeError, "another program has wrapped")
    del model.forward
    model.compile(backend="eager")
    refused(RuntimeError, "compiled")
    handle = tome_core.patch(MODELS["ip_adapter"].build(), PLAIN)
    refused(ValueError, "call=")
    handle = tome_core.patch(tiny_transformers.make("SD3.5")[0], "balanced")
    refused(RuntimeError, "only UNets")
    assert handle.gain_for(512, 512) is None and handle.why_not(512, 512) == "" and not KNOWN


@pytest.mark.parametrize("name", some_quick(["ldm_sd1", "sdxl", "sgm_double"], 2))
def test_each_unet_is_measured(name):
    handle = tome_core.patch(MODELS[name].build(), MergeConfig(ratio=0.5))
    gain = handle.measure(128, 128, rounds=1, steps=2)
    assert gain.unmerged > 0 and gain.merged > 0 and handle.gain_for(128, 128) == gain
