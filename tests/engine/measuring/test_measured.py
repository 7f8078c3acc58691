"""A measurement disturbs nobody, and decides from then on: merging that does not pay is off, entirely."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import tome_core
from tests import tiny_transformers
from tests.models import BY_NAME, call_case, call_unet, inputs, sd15, small
from tests.traces import traces
from tome_core import MergeConfig, gains
from tome_core.engine.time import Clock
from tome_core.measuring import measure
from tome_core.measuring.measure import steps_of
from tome_core.reporting.gains import KNOWN

CASE = BY_NAME["sd15"]
_TEXT = 77
TABLE_LEAVES_ALONE, TABLE_MERGES = 16, 32  # sides of latents on a CPU
PLAIN = MergeConfig(ratio=0.5, side="kv", use_rand=False)


@pytest.fixture(autouse=True)
def nothing_is_known():
    KNOWN.forget()
    yield
    KNOWN.forget()


@pytest.fixture
def price(monkeypatch):
    """Makes a clock that goes on by 1 for each self-attention, and by ``merged`` if that merges its keys."""
    attention = F.scaled_dot_product_attention

    def make(merged):
        clock = SimpleNamespace(now=0.0)

        def charged(q, k, v, *args, **kwargs):
            queries, keys = q.shape[-2], k.shape[-2]
            if keys != _TEXT and len(q) > 1:  # of one sample it is only tried, once
                clock.now += 1.0 if keys == queries else merged
            return attention(q, k, v, *args, **kwargs)

        monkeypatch.setattr(F, "scaled_dot_product_attention", charged)
        return clock

    return make


def picture(model, side=TABLE_MERGES, timestep=500):
    return call_case(CASE, model, height=side, width=side, timestep=timestep)


def on_host(model, name="balanced", **more):
    """A patch that asks whether it pays."""
    return tome_core.patch(model, name, host_clock=True, **more)


def measured(handle, clock, side=TABLE_MERGES, **more):
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(measure, "clock_for", lambda device: lambda: clock.now)
        return handle.measure(8 * side, 8 * side, rounds=1, **more)


# --- what was measured decides ----------------------------------------------------------------------------------------


def test_if_merging_is_measured_to_pay_it_merges_whatever_the_table_says(price):
    model = small()
    plain, handle = picture(model, TABLE_LEAVES_ALONE), on_host(model)
    assert torch.equal(picture(model, TABLE_LEAVES_ALONE), plain)
    gain = measured(handle, price(0.5), TABLE_LEAVES_ALONE)
    assert gain.pays and gain.line == f"128x128: about {gain.ratio:.1f}x faster" and 0 < gain.saved < 1
    assert not torch.equal(picture(model, TABLE_LEAVES_ALONE), plain) and handle.report().gains == (gain,)
    assert torch.equal(picture(model, 12), picture(small(), 12)), "of another size nothing is known"
    handle.reset_counts()
    picture(model, 12)
    assert handle.report().gains == (), "a gain is of the pictures since the counts began"


def test_if_it_is_measured_not_to_pay_it_is_off_and_says_why(price):
    model = small()
    plain, handle = picture(model), on_host(model)
    assert not torch.equal(picture(model), plain)
    gain = measured(handle, price(3.0))
    handle.reset_counts()
    assert torch.equal(picture(model), plain)
    report = handle.report()
    assert not report.merged_anything and gain.why_not in str(report) and report.gains == (gain,)
    assert handle.why_not(256, 256) == gain.why_not and gain.why_not.endswith("at 32x32")


def test_a_gain_is_what_the_clock_says_and_rules_that_do_not_ask_merge_whatever_it_is(price):
    model = small()
    handle = tome_core.patch(model, PLAIN)
    before = picture(model)
    for merged in (0.5, 3.0):
        gain = measured(handle, price(merged))
        assert gain.unmerged == 4 and gain.merged == pytest.approx(1 + 3 * merged), "three at the finest level merge"
    assert torch.equal(picture(model), before) and handle.report().gains == (gain,)


def test_what_is_measured_meanwhile_changes_no_patch_that_is_on(price):
    """Nor a picture half way: somebody may measure, or load a file, while another's steps go on."""
    model = small()
    plain, handle = picture(model), on_host(model)
    before = picture(model)
    measured(on_host(small()), price(3.0))
    assert KNOWN and torch.equal(picture(model), before)
    handle.install()  # hosts do so at each step
    assert torch.equal(picture(model), before)
    handle.uninstall()
    handle.install()
    assert torch.equal(picture(model), plain) and not torch.equal(before, plain)


def test_a_gain_is_asked_for_without_a_call(price):
    model, calls = small(), []
    handle = on_host(model, "fast")
    assert handle.gain_for(256, 256) is None
    gain = measured(handle, price(0.5))
    model.conv_in.register_forward_hook(lambda *_: calls.append(1))
    assert handle.gain_for(256, 256) == handle.gain_for(256, 256, batch=8) == gain
    assert handle.gain_for(256, 512) is on_host(model, "max").gain_for(256, 256) is None
    assert on_host(model, "fast", seed=5).gain_for(256, 256) == gain, "a seed costs no time"
    other = small()
    for weight in other.parameters():
        weight.data.mul_(1.5)
    assert on_host(other, "fast").gain_for(256, 256) == gain, "weights do not count"
    assert on_host(sd15(), "fast").gain_for(256, 256) is None, "shapes do"
    assert not calls


# --- the kinds of steps -----------------------------------------------------------------------------------------------


def test_a_match_is_as_old_as_it_may_be_before_a_step_renews_it():
    clock = Clock(replace(PLAIN, keep=499.5), [1])  # half of a picture of two steps
    assert [kind[1] for _, kind in steps_of(clock, 2)] == ["new", "kept"]
    assert [kind[1] for _, kind in steps_of(Clock(replace(PLAIN, keep=499.0), [1]), 2)] == ["new", "renewed"]


def test_the_kinds_of_steps_are_those_of_a_picture():
    """Held against a picture's own calls, in which a match leaves a plan of that very time."""
    model, (x, text) = small(), inputs(4, 1, TABLE_MERGES, TABLE_MERGES)
    handle = on_host(model)
    told = steps_of(handle.clock, 20)
    for timestep, kind in told:
        handle.set_time(timestep=timestep, sampling="picture", pictures=1)
        with torch.no_grad():
            call_unet(model, x, timestep, text)
        made = any(kept.timestep == timestep for kept in handle.time._sampling._plans.values())
        assert made == (kind[1] != "kept"), timestep
    share = Counter(kind for _, kind in told)
    assert share.total() == 20 and sum(n for kind, n in share.items() if kind[1] == "kept") >= 8


def test_kinds_count_as_often_as_a_picture_has_them(price, monkeypatch):
    """Each call of a kind has a price of its own here; dear ones are rare."""
    model, clock, costs = small(), price(0.0), {999.0: 10.0, 500.0: 1.0}
    kinds = [(999.0, "dear"), *[(500.0, "cheap")] * 18, (0.0, None)]
    monkeypatch.setattr(measure, "steps_of", lambda run, steps: kinds)

    def call(x, timesteps):
        before = clock.now
        model(x, timesteps, torch.zeros(len(x), _TEXT, 32))
        if clock.now - before < 4:  # merged
            clock.now += costs[timesteps[0].item()]

    gain = measured(tome_core.patch(model, PLAIN), clock, call=call)
    assert gain.unmerged == 4 and gain.merged == pytest.approx((1 * 11 + 18 * 2 + 1 * 4) / 20)


# --- it disturbs nobody -----------------------------------------------------------------------------------------------


def test_a_measurement_leaves_everything_as_it_was(price):
    """Also of a UNet that nobody called `eval` on, which draws from no generator of others."""
    model, hooked = small().train(), []
    model.register_forward_hook(lambda *_: hooked.append(1))
    handle = tome_core.patch(model, PLAIN)
    handle.keep_maps()
    before = picture(model)
    handle.set_time(timestep=500.0)
    dropout = next(module for module in model.modules() if isinstance(module, torch.nn.Dropout))
    dropout.p = 0.1
    left, counts, generator = traces(model), handle.report(), torch.get_rng_state()
    measured(handle, price(0.5))
    assert hooked == [1], "what counts steps is not told of a call"
    assert model.training and torch.equal(torch.get_rng_state(), generator) and traces(model) == left
    after = handle.report()
    assert (after.calls, after.levels) == (counts.calls, counts.levels) and handle.maps()
    dropout.p = 0.0
    assert handle.is_installed and torch.equal(picture(model), before)


def test_a_measurement_that_fails_leaves_everything_as_it_was():
    model = small()
    before, handle = traces(model), tome_core.patch(model, PLAIN)
    handle.uninstall()
    with pytest.raises(ZeroDivisionError):
        handle.measure(256, 256, call=lambda x, timesteps: 1 / 0)
    assert traces(model) == before and not KNOWN


def test_a_measurement_is_refused_if_it_would_disturb_or_mislead():
    model = small()
    handle = on_host(model)
    with handle.sampling(), pytest.raises(RuntimeError, match="a sampling goes on"):
        handle.measure()
    handle.set_time(timestep=500.0, sampling="a host's")
    with pytest.raises(RuntimeError, match="a sampling goes on"):
        handle.measure()
    handle.set_time()
    model.forward = lambda *args, **kwargs: type(model).forward(model, *args, **kwargs)  # a step cacher
    with pytest.raises(RuntimeError, match="another program has wrapped"):
        handle.measure()
    del model.forward
    for bad in ({"height": 7}, {"width": 512.0}, {"batch": 0}, {"rounds": True}, {"steps": -1}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            handle.measure(**bad)
    with pytest.raises(ValueError, match="nothing merges at 8x8"):
        handle.measure(8, 8)
    compiled = torch.compile(small(), backend="eager")
    model.compile(backend="eager")
    for patched in (handle, tome_core.patch(compiled)):
        with pytest.raises(RuntimeError, match="compiled"):
            patched.measure()
    assert not KNOWN


def test_a_transformer_is_not_measured_and_says_so():
    model, arguments = tiny_transformers.make("SD3.5")
    handle = tome_core.patch(model, "balanced")
    with torch.no_grad():
        tiny_transformers.call(model, arguments)
    KNOWN.remember(gains.Gain(*("",) * 7, 64, 64, 2, 1.0, 0.5))
    assert handle.gain_for(512, 512) is None and handle.why_not(512, 512) == ""
    with pytest.raises(RuntimeError, match="of UNets alone"):
        handle.measure()


@pytest.mark.parametrize("name", ["ldm_sd1", "sgm_double", "sdxl", "ip_adapter", "motion"])
def test_a_family_is_measured_or_says_what_it_wants(name):
    handle = tome_core.patch(BY_NAME[name].build(), MergeConfig(ratio=0.5))
    if name in ("ip_adapter", "motion"):
        with pytest.raises(ValueError, match="call="):
            handle.measure(128, 128, rounds=1)
        return
    gain = handle.measure(128, 128, rounds=1, steps=2)
    assert gain.unmerged > 0 and gain.merged > 0 and handle.gain_for(128, 128) == gain
