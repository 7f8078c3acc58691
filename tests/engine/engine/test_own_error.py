"""The engine's own error: how it is told, when it is read, and how a strength bounds it."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import tome_core
from tests.small_models.families import MODELS
from tests.small_models.unets import inputs, on_small, sdxl, small
from tome_core import MergeConfig, MergePlan, MergeRule
from tome_core.engine import own_error
from tome_core.engine.merged_tokens import RIDGE, MergedTokens
from tome_core.engine.own_error import ATTN, BLOCK, Noted, OwnError, allowed, typical
from tome_core.reporting.ledger import TOO_WRONG
from tome_core.settings.presets import EARLY_SHARE

pytestmark = pytest.mark.bounded
RULE = replace(tome_core.strength(1.0).rules[0], max_error=1e-3)
STEPS = (900.0, 800.0, 700.0, 600.0, 500.0)


def noted(timestep, error, kind=ATTN, rule=RULE):
    return Noted(kind, 0, timestep, 1 - rule.effective_ratio, torch.tensor([[error, 1.0], [error, 1.0]]))


@torch.no_grad()
def test_what_a_stretch_leaves_of_its_samples_is_what_a_map_fitted_to_the_others_leaves():
    dice = torch.Generator().manual_seed(3)
    x, added = (torch.randn(2, 64, 5, generator=dice, dtype=torch.float64) for _ in range(2))
    plan, samples, notes = MergePlan(torch.arange(64)[None] // 8, 8), torch.arange(3, 64, 7), []
    tokens = MergedTokens.of(x, plan, samples, notes.append)
    changes = torch.cat([plan.merge(added), added[:, samples]], 1)
    tokens.unmerge(tokens.merged + changes)
    apart, lost = (tensor - plan.unmerge(plan.merge(tensor)) for tensor in (x, added))
    few, lost, left = apart[:, samples], lost[:, samples], []
    unit = few.square().sum(2).mean(1)[:, None, None]
    for one in range(len(samples)):
        others = torch.arange(len(samples)) != one
        known, wanted = few[:, others], lost[:, others]
        penalty = RIDGE * unit * torch.eye(5, dtype=x.dtype)
        found = torch.linalg.solve(known.mT @ known + penalty, known.mT @ wanted)
        left.append(lost[:, one] - (few[:, [one]] @ found)[:, 0])
    (squares,) = notes
    torch.testing.assert_close(squares[:, 0], torch.stack(left, 1).square().mean((1, 2)), rtol=1e-4, atol=0)
    torch.testing.assert_close(squares[:, 1], added[:, samples].square().mean((1, 2)))


def test_a_step_follows_what_was_read_before_the_step_before_it_and_only_with_a_new_match():
    kept = []
    for wrong_at in (*STEPS, None):
        own = OwnError()
        rules = []
        for timestep in STEPS:
            own.begin(timestep)
            own.begin(timestep)  # the other half of guidance
            rules.append(own.rule_for(ATTN, 0, RULE, timestep, 1.0))
            if rules[-1] is not None:
                own.note(noted(timestep, 0.9 if timestep == wrong_at else 0.0))
        kept.append([rule is RULE for rule in rules])
    T, F = True, False
    assert kept == [[T, T, F, T, T], [T, T, T, F, T], [T, T, T, T, F], [T] * 5, [T] * 5, [T] * 5]
    own = OwnError()
    for timestep in (900.0, 880.0, 860.0, 850.0):
        own.begin(timestep)
        assert own.rule_for(ATTN, 0, RULE, timestep, 1.0) is RULE, "its match is kept"
        own.note(noted(timestep, 0.9))


def test_a_device_is_waited_for_a_whole_step_after_its_copy_began_and_also_beside_a_report(monkeypatch):
    log, far = [], [noted(900.0, error) for error in (0.5, 0.25, 0.125)]

    def copy(x):
        log.append(len(x))
        return x.clone(), SimpleNamespace(synchronize=lambda: log.append("wait"))

    monkeypatch.setattr(own_error, "_SENDS", ("cpu",))
    monkeypatch.setattr(own_error, "_begin_copy", copy)
    own = OwnError()
    own.begin(900.0)
    for one in far:
        own.note(one)
    own.begin(900.0)
    assert not log
    own.begin(800.0)
    assert log == [6], "three times two heads"
    assert far[0].read() == 0.5, "by a report"
    own.begin(700.0)
    assert log == [6, "wait"] and [one.read() for one in far] == [0.5, 0.25, 0.125]


def test_it_keeps_the_fewest_keys_that_the_error_allows_then_all_and_a_transformer_tries_once():
    def kept(factor, weight=1.0, rule=RULE, kind=ATTN):
        own = OwnError()
        for timestep in (500.0, 400.0, 300.0):
            own.begin(timestep)
            if timestep == 500:
                error = factor * typical(kind, timestep, 1 - rule.effective_ratio)
                own.note(noted(timestep, error, kind, rule))
        return own.rule_for(kind, 0, rule, 300.0, weight)

    most, shares = RULE.max_error * allowed(ATTN, 300.0), []
    for factor in (0.1, 0.5, 1.0, 2.0, 3.0, 5.0, 8.0):
        rule = kept(factor)
        shares.append(1.0 if rule is None else 1 - rule.effective_ratio)
        assert rule is None or factor * typical(ATTN, 300.0, shares[-1]) <= most
        assert rule is kept(factor), "one object, by which plans are kept"
    assert shares == sorted(shares) and shares[0] == EARLY_SHARE and len(set(shares)) > 4
    assert kept(100.0) is None and kept(100.0, weight=1e-3) is RULE
    blocks = MergeRule(merge_attn=False, merge_blocks=True, ratio=15 / 16, sx=4, sy=4, max_error=0.05, keep=60.0)
    assert kept(1.0, rule=blocks, kind=BLOCK) is blocks and kept(50.0, rule=blocks, kind=BLOCK) is None
    assert kept(5.0, rule=blocks, kind=BLOCK).ratio in (0.875, 0.75, 0.5)


def draw(model, config, *samplings, family="sd15", sizes=(1.0,), steps=STEPS):
    """The last prediction of the last sampling, and the report. sizes: factors of each sampling's latent."""
    x, text = inputs(4, 1, 16, 16)
    with tome_core.patch(model, config, host_clock=True) as handle, torch.no_grad():
        for sampling, size in zip(samplings, sizes, strict=True):
            for timestep in steps:
                handle.set_time(timestep=timestep, sampling=sampling, timesteps=steps)
                out = MODELS[family].forward(model, size * x, torch.tensor(timestep), text)
        return out, handle.report()


def test_if_the_error_exceeds_max_error_more_keys_are_kept_then_all_and_the_report_says_so():
    """A limit far below the error of random weights, 2e-5, is met only by more keys, at last by all."""
    model, balanced = small(), on_small("balanced")
    config = replace(balanced, max_error=2e-5)
    out, report = draw(model, config, "one")
    (first, *_), finest = STEPS, report.levels[0]
    told = finest.fits.keys()
    assert {share for _, timestep, share in told if timestep == first} == {round(1 / 64, 4)}
    assert finest.bounded and max(share for _, share in finest.bounded) == 1.0
    assert finest.reasons[f"attn: {TOO_WRONG}"] and TOO_WRONG in report.hindered
    assert "merging changes this model much, so more keys were kept in" in str(report)
    (level, *_) = report.as_data()["levels"]
    assert level["bounded"] and all(told["error"] > 0 for told in level["errors"])
    plain, unbounded = draw(model, replace(config, max_error=None), "one")
    assert not unbounded.levels[0].bounded and not torch.equal(out, plain)
    x, text = inputs(4, 1, 16, 16)
    whole = MODELS["sd15"].forward(model, x, STEPS[-1], text)
    assert (out - whole).norm() < (plain - whole).norm()


def test_equal_samplings_are_equal_whatever_ran_before():
    model, config = small(), on_small("balanced")
    alone, _ = draw(model, config, "one")
    assert torch.equal(draw(model, config, "other", "one", sizes=(2.0, 1.0))[0], alone)


def test_whole_blocks_that_change_too_much_run_on_all_tokens():
    rule = MergeRule(merge_attn=False, merge_blocks=True, ratio=0.75, use_rand=False, side="kv", min_downsample=4,
                     keep=60.0, max_error=1e-6)  # fmt: skip
    _, report = draw(sdxl(), MergeConfig(rules=(rule,)), "one", family="sdxl")
    coarse = report.levels[-1]
    assert [timestep for part, timestep, _ in coarse.fits if part == "block"] == [900.0, 800.0]
    assert coarse.bounded == {("block", 1.0): 3} and coarse.reasons[f"block: {TOO_WRONG}"]
    assert "more tokens were kept in 3 model calls (all in 3)" in str(report)


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_model_keeps_as_many_keys_in_the_same_graph():
    config, found = replace(on_small("balanced"), max_error=2e-5), []
    for backend in (None, CompileCounter()):
        model = small()
        if backend is not None:
            model.compile(backend=backend, fullgraph=True)
        out, report = draw(model, config, "one")
        found.append((out, [level.bounded for level in report.levels]))
    (eager, bounded), (compiled, same) = found
    assert bounded == same and bounded[0]["attn", 1.0] and backend.frame_count == 1
    torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-5)


def test_attention_that_keeps_all_tokens_is_not_taken_for_blocks_that_do(monkeypatch):
    whole = {900.0: "attn", 800.0: "block"}
    monkeypatch.setattr(OwnError, "rule_for",
                        lambda own, kind, level, rule, timestep, weight: None if whole[timestep] == kind else rule)
    rules = [MergeRule(ratio=0.75, use_rand=False, side="kv", min_downsample=4, keep=60.0, max_error=1e-3, **of)
             for of in ({"metric": "keys+values"}, {"merge_attn": False, "merge_blocks": True})]  # fmt: skip
    _, report = draw(sdxl(), MergeConfig(rules=tuple(rules)), "one", family="sdxl", steps=tuple(whole))
    merged = {(part, timestep) for part, timestep, _ in report.levels[-1].fits}
    assert merged == {("block", 900.0), ("attn", 800.0)}
