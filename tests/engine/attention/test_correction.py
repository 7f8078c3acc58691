"""The correction: exactly zero if nothing was lost; the first order of the error is removed, and the rest is fitted."""

from functools import partial
from itertools import product

import pytest
import torch

import tome_core
from tests.engine.attention.conformance import means, ragged
from tests.small_models.families import MODELS
from tests.small_models.unets import call_unet, inputs, small
from tome_core import MergeConfig, MergePlan
from tome_core.attention.correction import PENALTY, _ridge, first_order, fit_correction
from tome_core.attention.correction import _by_head as by_head

KV = {"side": "kv", "ratio": 0.75}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
run = partial(MODELS["sd15"].call, timestep=100)


def drawn(batch: int, tokens: int, channels: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """q, k and v; keys far from zero, as a trained model's are."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(batch, tokens, channels, generator=generator, dtype=torch.float64) for _ in range(3))
    return [tensor.to(dtype) for tensor in (q, k + 3, v - 2)]


def every_third(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries of three heads, and the numbers of those that are answered."""
    return by_head(q, 3).transpose(1, 2), torch.arange(0, q.shape[1], 3)


def closed_form(pair: tuple[torch.Tensor, torch.Tensor], plan: MergePlan, heads: int, scale: float) -> torch.Tensor:
    return first_order(*pair, plan.merge_pair(*pair, exact=True)[2], plan, heads, scale)


def test_groups_of_one_token_are_corrected_by_exactly_nothing():
    order = torch.stack([torch.randperm(17, generator=torch.Generator().manual_seed(n)) for n in range(3)])
    for dtype, rows in product(DTYPES, (1, 3)):
        q, k, v = drawn(3, 17, 12, dtype)
        plan = MergePlan(order[:rows], 17)
        assert not closed_form((k, v), plan, 3, 0.5).any()
        assert not any(part.any() for part in fit_correction(*every_third(q), (k, v), plan, 0.5)[0][:2])
        pairs = MergePlan(order.div(2, rounding_mode="floor"), 9)
        assert closed_form((k, v), pairs, 3, 0.5).all()
        assert all(part.all() for part in fit_correction(*every_third(q), (k, v), pairs, 0.5)[0][:2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_what_its_definition_gives_summed_in_float32_at_least(dtype):
    """Groups are ragged or empty, or one map serves all. A half-precision sum of 4,096 tokens keeps hardly a digit."""
    for batch, tokens, groups, heads, width, rows in ((1, 1, 1, 1, 1, 1), (2, 40, 12, 3, 4, 2), (3, 17, 3, 1, 6, 1),
                                                      (1, 4096, 64, 2, 8, 1)):  # fmt: skip
        _, k, v = drawn(batch, tokens, heads * width, dtype)
        plan = ragged(rows, tokens, groups)
        matrix = closed_form((k, v), plan, heads, 0.3)
        k, v = (by_head(x - means(x, plan.group), heads) for x in (k.double(), v.double()))
        exact = k.mT @ v * 0.3 / tokens  # from every token's distance from its group's mean
        assert matrix.dtype == torch.promote_types(dtype, torch.float32)
        tolerance = 1e-9 if dtype == torch.float64 else 1e-4
        assert (matrix - exact).abs().max() <= tolerance * exact.abs().max() + 1e-12


@pytest.mark.parametrize("heads, count, width", [(1, 2, 1), (3, 60, 8), (2, 5, 8), (1, 40, 3)])
def test_the_fit_is_ridge_regression(heads, count, width):
    """A solver gives the same fit; a part that hardly varies is not scaled to more than a thousandth of its size."""
    generator = torch.Generator().manual_seed(count)
    for spread in (0.1, 1e-4):
        q, merged, left = (torch.randn(2, heads, count, width, generator=generator, dtype=torch.float64) * size + 5
                           for size in (3.0, spread, 0.01))  # fmt: skip
        weights, constant, error = _ridge(q, merged, left)
        parts = []
        for x in (q, merged):
            centred, least = x - x.mean(2, keepdim=True), 1e-6 * x.square().mean((2, 3), keepdim=True)
            parts.append(centred * torch.maximum(centred.square().mean((2, 3), keepdim=True), least).rsqrt())
        x, mean = torch.cat(parts, 3), left.mean(2, keepdim=True)
        penalty = PENALTY * 2 * width * torch.eye(2 * width, dtype=x.dtype)
        expected = x @ torch.linalg.solve(x.mT @ x + penalty, x.mT @ (left - mean)) + mean
        predicted = torch.cat([q, merged], 3) @ weights + constant
        torch.testing.assert_close(predicted, expected, rtol=0, atol=1e-5 * left.abs().max().item())
        alone = []  # what a fit to all other queries leaves of each, with the features scaled as before
        for one in range(count):
            others = torch.arange(count) != one
            centre, mean = (tensor[..., others, :].mean(2, keepdim=True) for tensor in (x, left))
            some, rest = x[..., others, :] - centre, left[..., others, :] - mean
            found = torch.linalg.solve(some.mT @ some + penalty, some.mT @ rest)
            alone.append(left[..., one, :] - ((x[..., [one], :] - centre) @ found + mean)[..., 0, :])
        torch.testing.assert_close(error, torch.stack(alone, 2).square().mean((2, 3)), rtol=1e-4, atol=0)


@pytest.mark.parametrize("width, block", [(16, 16), (40, 10), (64, 16), (80, 16), (128, 16), (160, 16)])
def test_the_channels_of_a_wide_head_are_fitted_in_blocks(width, block):
    """Each block gets what a head of its own would get; other channels of the answer do not count."""
    tokens, heads = 96, 2
    q, k, v = drawn(1, tokens, heads * width, torch.float64)
    plan = ragged(1, tokens, 12)
    queries, places = by_head(q, heads).transpose(1, 2), torch.arange(0, tokens, 2)
    (matrix, constant, _, error), _ = fit_correction(queries, places, (k, v), plan, 0.1)
    fitted = matrix.clone()
    fitted[:, :width] -= closed_form((k, v), plan, heads, 0.1).flatten(0, 1)
    by_block = fitted.unflatten(1, (2, -1, block)).unflatten(4, (-1, block)).abs().amax((3, 5))
    assert torch.equal(by_block > 1e-9, torch.eye(width // block, dtype=torch.bool).expand_as(by_block))
    assert error.shape == (heads * width // block, 2) and constant.shape == (heads, 1, width)


@pytest.mark.parametrize("settings, is_made", [
    (KV, True), (KV | {"method": "cluster"}, True), ({"side": "qkv", "metric": "keys+values"}, True),
    ({}, False), (KV | {"proportional": False}, False),  # tomesd's settings, and keys without sizes
], ids=str)  # fmt: skip
def test_it_is_made_if_merged_keys_know_their_sizes(settings, is_made):
    model, pictures = small(), []
    for correction in (True, False):
        with tome_core.patch(model, MergeConfig(**settings, correction=correction)):
            pictures.append(run(model))
    assert torch.equal(*pictures) != is_made and pictures[0].isfinite().all()


def test_gradients_flow_through_it():
    """Training on merged tokens needs the gradient of the correction as well as of the block."""
    model = small().double()
    x, text = (tensor.double() for tensor in inputs(4, 1, 8, 8))
    with tome_core.patch(model, MergeConfig(**KV)):
        assert torch.autograd.gradcheck(lambda x: call_unet(model, x, 100, text), x.requires_grad_(), fast_mode=True)
