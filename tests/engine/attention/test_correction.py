"""The correction: exactly nothing where nothing was lost, of first order nothing is left, and the rest is fitted."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import product

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import tome_core
from benchmarks.subjects import SCENE_MODELS, SceneSubject
from tests.conformance import ragged
from tests.models import BY_NAME, call_case, call_unet, four_levels, inputs, on_small, small
from tests.thoroughness import THOROUGH, some_quick
from tome_core import MergeConfig, MergePlan, MergeRule
from tome_core.attention.correction import Correction, _inverse, _ridge, first_order, fit_correction, pick_asked
from tome_core.attention.correction import _by_head as by_head
from tome_core.attention.merged import Merge, add_correction
from tome_core.engine import state
from tome_core.merging.grid import Grid

KV = {"side": "kv", "ratio": 0.75}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
run = partial(call_case, BY_NAME["sd15"], timestep=100)


def drawn(batch: int, tokens: int, channels: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """q, k and v; keys far from zero, as a trained model's are."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(batch, tokens, channels, generator=generator, dtype=torch.float64) for _ in range(3))
    return [one.to(dtype) for one in (q, k + 3, v - 2)]


def oracle(k: torch.Tensor, v: torch.Tensor, plan: MergePlan, heads: int, scale: float) -> torch.Tensor:
    """The matrix by its definition: group by group, in float64."""
    batch, tokens, _ = k.shape
    k, v = by_head(k.double(), heads), by_head(v.double(), heads)
    out = torch.zeros(batch, heads, k.shape[-1], k.shape[-1], dtype=torch.float64)
    for sample, group in enumerate(plan.group.expand(batch, -1)):
        for number, head in product(group.unique(), range(heads)):
            keys, values = k[sample, head, group == number], v[sample, head, group == number]
            out[sample, head] += (keys - keys.mean(0)).T @ (values - values.mean(0)) * scale / tokens
    return out


def closed_form(made: tuple[torch.Tensor, torch.Tensor], plan: MergePlan, heads: int, scale: float) -> torch.Tensor:
    return first_order(*made, plan.merge_pair(*made, exact=True)[2], plan, heads, scale)


def test_groups_of_one_token_are_corrected_by_exactly_nothing():
    order = torch.stack([torch.randperm(17, generator=torch.Generator().manual_seed(n)) for n in range(3)])
    for dtype, rows in product(DTYPES, (1, 3)):
        q, k, v = drawn(3, 17, 12, dtype)
        plan = MergePlan(order[:rows], 17)
        assert not closed_form((k, v), plan, 3, 0.5).any()
        assert not any(one.any() for one in fit_correction(q[:, ::3], (k, v), plan, 3, 0.5)[0][:2])
        pairs = MergePlan(order.div(2, rounding_mode="floor"), 9)
        assert closed_form((k, v), pairs, 3, 0.5).all()
        assert all(one.all() for one in fit_correction(q[:, ::3], (k, v), pairs, 3, 0.5)[0][:2])


@settings(max_examples=200 if THOROUGH else 30, deadline=None, derandomize=not THOROUGH)
@given(
    batch=st.integers(1, 3), tokens=st.integers(1, 40), groups=st.integers(1, 12), heads=st.integers(1, 4),
    width=st.integers(1, 6), shared=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_it_is_what_its_definition_gives(batch, tokens, groups, heads, width, shared, seed):
    """Ragged groups, empty ones, one map for all samples."""
    _, k, v = drawn(batch, tokens, heads * width, torch.float64, seed)
    plan = ragged(1 if shared else batch, tokens, groups, seed)
    found, exact = closed_form((k, v), plan, heads, 0.3), oracle(k, v, plan, heads, 0.3)
    torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-12)


def test_it_is_summed_in_float32_whatever_keys_and_values_are():
    """Of 4,096 tokens half precision would keep hardly a digit, and keys lie far from zero."""
    plan = ragged(1, 4096, 64)
    for dtype in DTYPES[1:]:
        _, k, v = drawn(1, 4096, 16, dtype)
        found, exact = closed_form((k, v), plan, 2, 0.25), oracle(k, v, plan, 2, 0.25)
        assert found.dtype == torch.float32
        assert (found.double() - exact).abs().max() <= 1e-4 * exact.abs().max(), dtype


def add_flat(out: torch.Tensor, q: torch.Tensor, correction: Correction, heads: int) -> torch.Tensor:
    return add_correction(*(one.unflatten(2, (heads, -1)) for one in (out, q)), correction).flatten(2)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, logs: torch.Tensor | None = None):
    q, k, v = (by_head(one, heads) for one in (q, k, v))
    logits = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    if logs is not None:
        logits = logits + logs[:, None, None]
    return (logits.softmax(-1) @ v).transpose(1, 2).flatten(2)


def test_where_logits_are_small_the_error_falls_with_their_square():
    """Without the correction it falls with themselves."""
    heads, errors = 2, {True: [], False: []}
    q, k, v = drawn(2, 60, 16, torch.float64)
    plan = ragged(2, 60, 7)
    logs = plan.sizes.double().log()
    steps = (3e-2, 1e-2, 3e-3)  # the logarithms of sizes are float32 to the engine
    for small_q in (q * step for step in steps):
        full = attention(small_q, k, v, heads)
        merged = attention(small_q, plan.merge(k), plan.merge(v), heads, logs)
        correction = fit_correction(small_q[:, ::4], (k, v), plan, heads, 8**-0.5)[0]
        for with_it, out in ((False, merged), (True, add_flat(merged, small_q, correction, heads))):
            errors[with_it].append((out - full).abs().max().item())
    for with_it, power in ((False, 1), (True, 2)):
        falls = [math.log(errors[with_it][n] / errors[with_it][n + 1]) for n in range(2)]
        expected = [power * math.log(steps[n] / steps[n + 1]) for n in range(2)]
        assert falls == pytest.approx(expected, abs=0.15 * power)


def test_it_is_added_head_by_head():
    for dtype in DTYPES:
        q, out, _ = drawn(2, 9, 12, dtype)
        matrix, constant = (torch.randn(2, 3, rows, 4, generator=torch.Generator().manual_seed(rows)).to(dtype)
                            for rows in (8, 1))  # fmt: skip
        found = add_flat(out, q, Correction(matrix.flatten(0, 1), constant.flatten(0, 1)), 3)
        assert found.dtype == dtype
        asked, given = (one.double().unflatten(2, (3, 4)).transpose(1, 2) for one in (q, out))
        expected = given + torch.cat([asked, given], -1) @ matrix.double() + constant.double()
        atol = 8 * torch.finfo(dtype).eps * 32
        torch.testing.assert_close(found.double(), expected.transpose(1, 2).flatten(2), rtol=0, atol=atol)


@settings(max_examples=100 if THOROUGH else 20, deadline=None, derandomize=not THOROUGH)
@given(batch=st.integers(1, 2), heads=st.integers(1, 3), count=st.integers(2, 60), width=st.integers(1, 8),
       seed=st.integers(0, 99))  # fmt: skip
def test_the_fit_is_ridge_regression(batch, heads, count, width, seed):
    """Against a solver's, on unit variances, with the penalty as many samples as unknowns; far fewer samples too.

    Less than a thousandth of its size is not scaled to more than that.
    """
    generator = torch.Generator().manual_seed(seed)
    q, merged, left = (
        torch.randn(batch, heads, count, width, generator=generator, dtype=torch.float64) * size + 5
        for size in (3.0, 0.1, 0.01)
    )
    weights, constant = _ridge(q, merged, left)
    for sample, head in product(range(batch), range(heads)):
        wholes, y = [one[sample, head] for one in (q, merged)], left[sample, head]
        parts = [one - one.mean(0) for one in wholes]
        scales = [torch.maximum(part.square().mean(), whole.square().mean() * 1e-6).rsqrt()
                  for part, whole in zip(parts, wholes, strict=True)]  # fmt: skip
        x = torch.cat([one * scale for one, scale in zip(parts, scales, strict=True)], 1)
        penalty = 2 * width * torch.eye(2 * width, dtype=x.dtype)
        solved = torch.linalg.solve(x.T @ x + penalty, x.T @ (y - y.mean(0)))
        found = torch.cat(wholes, 1) @ weights[sample, head] + constant[sample, head]
        torch.testing.assert_close(found, x @ solved + y.mean(0), rtol=0, atol=1e-5 * y.abs().max().item())


def test_an_inverse_by_products_is_the_inverse_in_float32():
    """Of a condition as bad as the ridge lets one be."""
    x = torch.randn(3, 2, 256, 80, generator=torch.Generator().manual_seed(2)) * torch.logspace(0, -3, 80)
    x = x / x.square().mean((2, 3), keepdim=True).sqrt()
    normal, penalty = x.transpose(2, 3) @ x / 256, 80 / 256
    found, exact = _inverse(normal, penalty, 80), (normal.double() + penalty * torch.eye(80)).inverse()
    assert (found.double() - exact).abs().max() < 1e-4 * exact.abs().max()


def test_the_tokens_that_are_asked_lie_evenly():
    grids = [(64, 64), (96, 64), (32, 128), (8, 8), (3, 5), (1, 7), (128, 128)]
    for (height, width), channels in product(grids, (16, 40)):
        places = pick_asked(Grid(height, width), channels, torch.device("cpu"))[0][0].tolist()
        most = 128 if channels <= 32 else 256
        assert len(set(places)) == len(places) and min(places) >= 0 and max(places) < height * width
        assert len(places) <= max(32, min(most, height * width // 16))
        if min(height, width) >= 32:
            assert len(places) >= 120 * min(most // 128, height * width // 2048)
        rows, columns = ([place // width for place in places], [place % width for place in places])
        assert abs(sum(rows) / len(rows) - (height - 1) / 2) <= 0.5
        assert abs(sum(columns) / len(columns) - (width - 1) / 2) <= 0.5


@pytest.mark.parametrize("which", some_quick([(0, 600), (-1, 100)]), ids=str)
def test_it_halves_what_a_trained_model_loses_at_a_sixty_fourth_of_the_keys(which: tuple[int, int]):
    (model, time) = which
    subject = SceneSubject(SCENE_MODELS[model], torch.device("cpu"))
    noised = subject.add_noise(0, 6, time)
    rule = MergeRule(**KV | {"ratio": 63 / 64, "sx": 8, "sy": 8, "refine": 1, "metric": "keys+values"}, use_rand=False)
    with torch.no_grad():
        plain, apart = subject.predict(noised), []
        for one in (rule, replace(rule, correction=False)):
            with tome_core.patch(subject.network, MergeConfig(rules=(one,))):
                apart.append((subject.predict(noised) - plain).square().mean())
    assert apart[0] < 0.5 * apart[1]


# --- in a UNet --------------------------------------------------------------------------------------------------------


@pytest.fixture
def found(monkeypatch) -> list[Merge]:
    """How every attention merged, in the order of their calls."""
    used, attend = [], state.attend
    monkeypatch.setattr(state, "attend", lambda attention, how, made: used.append(how) or attend(attention, how, made))
    return used


def test_it_is_made_if_merged_keys_know_their_sizes(found):
    model = small()
    corrected = (
        MergeRule(**KV), MergeRule(**KV, metric="keys+values", refine=1, sx=4, sy=4),
        MergeRule(**KV, method="cluster"), MergeRule(side="qkv", metric="keys+values"),
    )  # fmt: skip
    # tomesd's way, without sizes, not wanted
    plain = MergeRule(), MergeRule(**KV, proportional=False), MergeRule(**KV, correction=False)
    for rule in (*corrected, *plain):
        found.clear()
        with tome_core.patch(model, MergeConfig(rules=(rule,))):
            merged = run(model)
        assert found and merged.isfinite().all()
        assert all((how.correction is not None and how.correction.matrix.any()) == (rule in corrected) for how in found)
        if rule in corrected:
            with tome_core.patch(model, MergeConfig(rules=(replace(rule, correction=False),))):
                assert not torch.equal(run(model), merged)


def test_it_is_kept_with_its_plan_and_made_anew_with_it(found):
    model = small()
    with tome_core.patch(model, on_small("balanced"), host_clock=True) as handle:
        for timestep in (240, 200, 40):  # late in every preset
            handle.set_time(timestep=timestep, sampling="one")
            run(model, timestep=timestep)
    blocks = len(found) // 3
    first, kept, renewed = (found[n * blocks : (n + 1) * blocks] for n in range(3))
    for one, same, other in zip(first, kept, renewed, strict=True):
        assert one.correction is same.correction is not None
        assert other.correction is not one.correction and other.plan is not one.plan


def test_gradients_flow_through_it():
    """As through the rest of the block: what is trained on merged tokens is trained on this function."""
    model = small().double()
    x, text = (one.double() for one in inputs(4, 1, 8, 8))
    target = next(m for n, m in model.named_modules() if n.endswith("attn1.to_v"))

    def loss():
        return call_unet(model, x, 100, text).pow(2).sum()

    with tome_core.patch(model, MergeConfig(**KV)):
        (gradient,) = torch.autograd.grad(loss(), target.weight)
        place, step = divmod(int(gradient.abs().argmax()), gradient.shape[1]), 1e-6
        with torch.no_grad():
            target.weight[place] += step
            up = loss()
            target.weight[place] -= 2 * step
            down = loss()
    assert ((up - down) / (2 * step)).item() == pytest.approx(gradient[place].item(), rel=1e-4)


def test_gradients_of_half_precision_are_of_full_ones_size_if_all_keys_are_one():
    """Rounding alone was once scaled to more than rounding, and its gradient grew level by level."""
    norms = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = four_levels().to(dtype)
        x, text = (one.to(dtype) for one in inputs(4, 1, 12, 12))
        with tome_core.patch(model, MergeConfig(**{**KV, "ratio": 63 / 64, "sx": 8, "sy": 8, "max_downsample": 8})):
            out = call_unet(model, x.requires_grad_(), 100, text)
            (gradient,) = torch.autograd.grad(out.float().square().mean(), x)
        norms[dtype] = gradient.float().norm().item()
    assert norms[torch.bfloat16] == pytest.approx(norms[torch.float32], rel=0.2)
