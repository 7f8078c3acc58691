"""Laws of the Triton kernels: what torch's operators give, they give. Run by test_kernels.py and test_cuda.py.

Where ``TRITON_INTERPRET=1`` Triton's interpreter runs the kernels on the CPU, else they are compiled for the GPU.
"""

from __future__ import annotations

import itertools
import os

import pytest
import torch
import torch.nn.functional as F

from tests import kernel_twins as twins
from tome_core import MergePlan, kernels
from tome_core.attention.core import corrected
from tome_core.attention.correction import Correction, _attended, _by_head, first_order, fitted
from tome_core.grid import Grid
from tome_core.methods import METHODS, MatchOptions
from tome_core.methods.base import Best, Rows, best_keys, taken
from tome_core.methods.likeness import searched_rows
from tome_core.metric import _of_unit_spread

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INF = float("inf")
# batch, tokens, queries, keys, channels: one tile and less, whole tiles, tails of every axis, a real width
SHAPES = [(1, 1, 1, 1, 1), (3, 80, 64, 64, 32), (2, 200, 130, 65, 33), (1, 70, 5, 130, 320)]


def _why_not() -> str:
    """Why Triton's interpreter cannot run a kernel with a loop here (3.6 cannot with numpy 2.4); empty where it can."""
    import triton

    @triton.jit
    def count(stop):
        for _ in range(0, stop, 2):
            pass

    try:
        count[(1,)](5)
    except Exception as error:
        return f"Triton {triton.__version__}'s interpreter does not run with this numpy: {error}"
    return ""


if INTERPRETED and (reason := _why_not()):
    pytest.skip(reason, allow_module_level=True)


@pytest.fixture(autouse=True)
def used(monkeypatch):
    """Names of the kernels that ran; a test in which none did, or one could not, has tested nothing and fails."""
    if INTERPRETED:
        monkeypatch.setattr(kernels, "DEVICES", ("cpu",))
        _repair_the_interpreter(monkeypatch)
    module, calls = kernels._module(), []
    for name in twins.NAMES:
        launch = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, launch=launch, name=name: (calls.append(name), launch(*a)))
    monkeypatch.setattr(kernels, "_give_up", _fail)
    yield calls
    assert calls


def _fail(error):
    raise error


def _repair_the_interpreter(monkeypatch):
    """It multiplies the bit patterns of bfloat16 (seen in 3.5.0 and 3.9.0): give it their values."""
    from triton import language as tl
    from triton.runtime.interpreter import InterpreterBuilder

    dot = InterpreterBuilder.create_dot

    def value(self, x):
        return self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x

    def repaired(self, a, b, *rest):
        return dot(self, value(self, a), value(self, b), *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", repaired)


def noise(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def case(shape, dtype=torch.float32):
    """Rows to take, and directions to compare them with."""
    batch, tokens, queries, keys, channels = shape
    rows = torch.randint(tokens, (1, queries), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    keys = F.normalize(noise(batch, keys, channels, seed=2), dim=-1)
    return Rows(noise(batch, tokens, channels, dtype=dtype), rows), keys


def biases(batch, keys):
    some = noise(batch, keys, seed=3)
    hidden = some.masked_fill(noise(batch, keys, seed=4) > 0, -INF)
    hidden[:, -1] = 0
    return {"no bias": None, "a bias": some, "hidden keys": hidden}


def assert_best(found: Best, queries: torch.Tensor, keys: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Score and key are the best, compared with the sum in double precision: the key may be another near tie."""
    queries, keys = queries.double(), keys.double()
    scores = queries @ keys.transpose(1, 2) + (0 if bias is None else bias.double()[:, None])
    allowed = 1e-6 * (queries.norm(dim=-1) * keys.norm(dim=-1).amax(-1, keepdim=True) + 1)
    best = scores.amax(-1)
    assert found.score.dtype == torch.float32 and found.index.dtype == torch.int64
    assert ((found.score - best).abs() <= allowed).all()
    assert (best - scores.gather(2, found.index[..., None])[..., 0] <= allowed).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["no bias", "a bias", "hidden keys"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_best_key_is_that_of_the_exact_scores(shape, kind, dtype):
    rows, keys = case(shape, dtype)
    bias = biases(shape[0], shape[3])[kind]
    found = best_keys(rows, shape[2], keys, bias)
    assert_best(found, taken(rows, 0, shape[2]), keys, bias)
    with kernels.without():
        plain = best_keys(rows, shape[2], keys, bias)
    assert torch.allclose(found.score, plain.score, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("kind", ["no bias", "a bias", "hidden keys"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_keys_of_the_queries_own_dtype_are_multiplied_exactly(shape, kind, dtype):
    rows, keys = case(shape, dtype)
    bias, keys = biases(shape[0], shape[3])[kind], keys.to(dtype)
    found = best_keys(rows, shape[2], keys, bias)
    assert_best(found, taken(rows, 0, shape[2]), keys, bias)
    exact = best_keys(rows, shape[2], keys.float(), bias)
    assert torch.equal(found.index, exact.index) and torch.equal(found.score, exact.score)


def test_queries_taken_slice_by_slice_are_found_the_same():
    rows, keys = case(SHAPES[2])
    direct, called = best_keys(rows, 130, keys), best_keys(lambda i, j: taken(rows, i, j), 130, keys)
    assert torch.equal(direct.score, called.score) and torch.equal(direct.index, called.index)


def test_no_rows_are_all_rows():
    rows, keys = case(SHAPES[2], torch.float16)
    assert_best(best_keys(Rows(rows.x), 200, keys), rows.x, keys, None)


def test_no_queries_are_no_results(used):
    rows, keys = case((2, 8, 0, 8, 4))
    found = best_keys(rows, 0, keys)
    assert found.score.shape == found.index.shape == (2, 0)


def test_one_tensor_serves_samples_with_rows_of_their_own():
    x, keys = noise(1, 50, 20), noise(4, 9, 20, seed=1)
    rows = Rows(x, torch.arange(28, device=DEVICE).view(4, 7))
    assert torch.equal(taken(rows, 2, 5), torch.stack([x[0, 7 * sample + 2 : 7 * sample + 5] for sample in range(4)]))
    assert_best(best_keys(rows, 7, keys), taken(rows, 0, 7), keys, None)


def test_any_strides_will_do():
    x, keys = noise(2, 40, 70).transpose(1, 2), noise(1, 33, 80, seed=1)[..., ::2].expand(2, -1, -1)
    bias = noise(66, seed=2)[::2].expand(2, -1)
    rows = torch.arange(69, -1, -1, device=DEVICE)[None, ::2].expand(2, -1)
    queries = Rows(x, rows)
    assert not x.is_contiguous() and x.shape == (2, 70, 40)
    assert_best(best_keys(queries, 35, keys, bias), taken(queries, 0, 35), keys, bias)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_of_equal_scores_the_first_wins(dtype):
    one = F.normalize(noise(1, 90, 16), dim=-1).to(dtype)
    twice = torch.cat([one, one], 1).float()  # equal keys in one tile and in two
    found = best_keys(Rows(one), 90, twice)
    with kernels.without():
        assert torch.equal(found.index, best_keys(Rows(one), 90, one.float()).index)


def test_a_row_of_zeros_takes_the_first_key_that_is_not_hidden():
    keys, bias = noise(1, 70, 8), torch.zeros(1, 70, device=DEVICE)
    bias[:, :66] = -INF
    zeros = Rows(torch.zeros(1, 3, 8, device=DEVICE))
    assert best_keys(zeros, 3, keys).index.tolist() == [[0, 0, 0]]
    found = best_keys(zeros, 3, keys, bias)
    assert found.index.tolist() == [[66, 66, 66]] and found.score.tolist() == [[0, 0, 0]]


def test_where_all_keys_are_hidden_the_answer_is_torchs():
    rows, keys = case((1, 9, 3, 70, 8))
    bias = torch.full((1, 70), -INF, device=DEVICE)
    found = best_keys(rows, 3, keys, bias)
    assert found.score.tolist() == [[-INF] * 3] and found.index.tolist() == [[0] * 3]


def test_a_query_that_is_no_number_gets_a_key_there_is_and_harms_no_other():
    rows, keys = case(SHAPES[2])
    clean = best_keys(rows, 130, keys)
    rows.x[:, rows.rows[0, 3]] = float("nan")
    found = best_keys(rows, 130, keys)
    others = (rows.rows != rows.rows[0, 3]).expand(2, -1)
    assert ((found.index >= 0) & (found.index < 65)).all()
    assert torch.equal(found.index[others], clean.index[others])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_querys_result_has_the_same_bits_alone_as_among_others(dtype):
    rows, keys = case(SHAPES[2], dtype)
    together, again = best_keys(rows, 130, keys), best_keys(rows, 130, keys)
    alone = best_keys(Rows(rows.x[1:], rows.rows[:, 70:80]), 10, keys[1:])
    for name in ("score", "index"):
        assert torch.equal(getattr(together, name), getattr(again, name))
        assert torch.equal(getattr(together, name)[1:, 70:80], getattr(alone, name))


@pytest.mark.parametrize(
    "method, more", [("bipartite", {}), ("bipartite", {"refine": 1}), ("cluster", {})]
)
def test_a_match_is_as_good_as_that_of_torchs_operators(method, more):
    x, options = noise(2, 64, 40, dtype=torch.float16), MatchOptions(0.5, 2, 2, **more)
    plan = METHODS[method].match(x, Grid(8, 8), options)
    with kernels.without():
        plain = METHODS[method].match(x, Grid(8, 8), options)
        errors = [(one.unmerge(one.merge(x)) - x).float().norm().item() for one in (plan, plain)]
    assert errors[0] == pytest.approx(errors[1], rel=1e-3)


# how the groups of 150 tokens are made: some groups empty, one that holds all, sizes around the kernel's eight rows
GROUPS = {
    "random": lambda: torch.randint(40, (2, 150), generator=torch.Generator().manual_seed(5)),
    "all in the last": lambda: torch.full((2, 150), 39),
    "one map for all": lambda: torch.randint(3, (1, 150), generator=torch.Generator().manual_seed(5)) * 7,
    "sizes 7, 8, 9": lambda: torch.arange(25).repeat_interleave(torch.tensor([7, 8, 9]).repeat(9)[:25])[None, :150],
}


@pytest.mark.parametrize(
    "groups, dtype, channels",
    [*itertools.product(GROUPS, DTYPES, [40]), ("random", torch.float16, 1), ("random", torch.float16, 300)],
)
def test_means_are_those_of_torchs_operators(groups, dtype, channels):
    plan, x = MergePlan(GROUPS[groups]().to(DEVICE), 40), noise(2, 150, channels, dtype=dtype)
    found = plan.merge(x)
    with kernels.without():
        plain = plan.merge(x)
    assert found.dtype == dtype and found.shape == plain.shape
    last_bits = 2 * torch.finfo(dtype).eps
    assert torch.allclose(found.float(), plain.float(), atol=last_bits, rtol=last_bits)
    assert (found[(plan.sizes == 0).expand(2, -1)] == 0).all()
    assert torch.equal(plan.merge(x), found)


def test_means_of_halves_are_summed_in_float32():
    x = torch.full((1, 1024, 4), 1000.0, dtype=torch.float16, device=DEVICE)
    assert (MergePlan(torch.zeros(1, 1024, dtype=torch.int64, device=DEVICE), 1).merge(x) == 1000).all()


def test_means_of_tensors_that_lie_otherwise_in_memory():
    plan, x = MergePlan(GROUPS["random"]().to(DEVICE), 40), noise(2, 20, 150)
    assert torch.equal(plan.merge(x.transpose(1, 2)), plan.merge(x.transpose(1, 2).contiguous()))


def test_where_a_gradient_is_asked_for_torchs_operators_give_it(used):
    plan, x = MergePlan(GROUPS["random"]().to(DEVICE), 40), noise(2, 150, 6).requires_grad_()
    weight = noise(2, 40, 6, seed=1)
    (plan.merge(x) * weight).sum().backward()
    assert "mean_rows" not in used
    shares = plan.unmerge(weight / plan.sizes.clamp(min=1)[..., None])
    assert torch.allclose(x.grad, shares, atol=1e-6)
    with torch.no_grad():
        plan.merge(x)
    assert used[-1] == "mean_rows"


# --- each kernel beside its twin in torch -----------------------------------------------------------------------------


def beside_twin(name, arguments, *outputs):
    """What the kernel and its twin put into tensors of these shapes and dtypes, after the inputs."""
    found = []
    for module in (kernels._module(), twins):
        own = [torch.full(shape, -7, dtype=dtype, device=DEVICE) for shape, dtype in outputs]
        getattr(module, name)(*arguments(own))
        found.append(own)
    return zip(*found, strict=True)


def close(found, expected, dtype, scale=1.0):
    torch.testing.assert_close(found.float(), expected.float(), rtol=4 * torch.finfo(dtype).eps,
                               atol=scale * 4 * torch.finfo(dtype).eps)  # fmt: skip


COUNTS = {  # rows, tokens, groups: one of each, tails of both tiles, more groups than tokens, many tiles
    "one": (1, 1, 1), "tails": (2, 600, 33), "more groups": (1, 20, 70), "whole tiles": (3, 1024, 32),
}  # fmt: skip


@pytest.mark.parametrize("rows, tokens, groups", COUNTS.values(), ids=COUNTS)
def test_counting_gives_what_sorting_gives(rows, tokens, groups, used):
    group = torch.randint(groups, (rows, tokens), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    long, real = torch.int64, torch.float32
    outputs = [((rows * tokens,), long), ((rows * groups + 1,), long), ((rows, groups), real), ((rows, groups), real)]
    *exact, logs = beside_twin("segments", lambda own: (group, *own, -1000.0), *outputs)
    assert all(torch.equal(*pair) for pair in exact)
    torch.testing.assert_close(*logs, rtol=1e-6, atol=1e-6)
    plan = MergePlan(group, groups)
    found = (*plan._sorted(), plan.sizes, plan.empty, plan.finite_logits)
    assert used == ["segments"] * 2, "once beside its twin, once for the plan"
    with kernels.without():
        other = MergePlan(group, groups)
        assert all(map(torch.equal, found[:4], (*other._sorted(), other.sizes, other.empty)))
        torch.testing.assert_close(found[4], other.finite_logits, rtol=1e-6, atol=1e-6)


def test_beyond_its_bound_counting_leaves_it_to_sorting(monkeypatch, used):
    monkeypatch.setattr(kernels, "_COUNTED_UP_TO", 599)
    plan = MergePlan(torch.zeros(1, 60, dtype=torch.int64, device=DEVICE), 10)
    assert plan.merge(noise(1, 60, 3)).shape == (1, 10, 3)
    assert used == ["mean_rows"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels", [5, 1100])
def test_centres_know_their_lengths_and_which_are_empty(dtype, channels):
    plan, x = MergePlan(GROUPS["one map for all"]().to(DEVICE), 40), noise(3, 150, channels, dtype=dtype)
    mean, bias = plan.centres(x)
    assert torch.equal(bias == -INF, plan.empty.expand(3, -1))
    lengths = mean.double().square().sum(-1) / -2
    torch.testing.assert_close(bias.double()[~plan.empty.expand(3, -1)], lengths[~plan.empty.expand(3, -1)],
                               rtol=1e-5, atol=1e-6)  # fmt: skip
    rounded, exact = plan.merge_exactly(x)
    close(mean, exact, dtype)
    assert exact.dtype == torch.float32 and torch.equal(rounded, mean)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_found_as_centres_without_being_copied_first(dtype):
    x, rows = noise(2, 60, 21, dtype=dtype), torch.tensor([[59, 0, 7]], device=DEVICE)
    keys, bias = searched_rows(x, rows, True)
    assert torch.equal(keys, x[:, rows[0]])
    torch.testing.assert_close(bias, x[:, rows[0]].float().square().sum(-1) / -2, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_score_can_know_its_querys_length(dtype):
    rows, keys = case(SHAPES[2], dtype)
    plain = best_keys(rows, 130, keys)
    score, index = kernels.best_keys(rows.x, rows.rows, keys, None, lengths=True)
    lengths = taken(rows, 0, 130).square().sum(-1)
    assert torch.equal(index, plain.index)
    torch.testing.assert_close(score, plain.score - lengths / 2, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape, parts", [((2, 70, 40), 2), ((1, 2100, 12), 1), ((3, 1, 6), 2), ((1, 33, 300), 2)])
def test_what_is_spread_to_one_is_what_torch_spreads(shape, parts, dtype):
    x = (noise(*shape) * 3 + 20).to(dtype)
    x[..., shape[2] // parts :] *= 0.125
    found = _of_unit_spread(x, parts)
    centred = (x.double() - x.double().mean(1, keepdim=True)).unflatten(-1, (parts, -1))
    unit = centred.square().mean((1, 3), keepdim=True).sqrt().clamp(min=torch.finfo(dtype).tiny)
    close(found, (centred / unit).flatten(2), dtype, 4.0)
    assert found.dtype == dtype and torch.equal(found, _of_unit_spread(x, parts))
    assert torch.equal(found, _of_unit_spread(x.transpose(1, 2).contiguous().transpose(1, 2), parts))


def test_what_does_not_vary_is_spread_to_zero():
    assert not _of_unit_spread(torch.full((1, 64, 8), 3.0, device=DEVICE), 2).any()


@pytest.mark.parametrize("removed", [1, 150, 299, 300])
@pytest.mark.parametrize("samples", [1, 2])
def test_tokens_are_placed_as_torch_places_them(removed, samples):
    order = torch.stack([torch.randperm(300, generator=torch.Generator().manual_seed(n)) for n in (1, 2)]).to(DEVICE)
    tokens = torch.stack([torch.randperm(340, generator=torch.Generator().manual_seed(n)) for n in range(samples)])
    sources, destinations = tokens.to(DEVICE).expand(2, -1).split([300, 40], 1)
    index = torch.randint(40, (2, 300), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    outputs = [((2, 340), torch.int64), ((2, 340 - removed), torch.int64)]
    for found, expected in beside_twin(
        "placed", lambda own: (order, index, sources, destinations, removed, *own), *outputs
    ):
        assert torch.equal(found, expected)


def attention(heads, width, tokens, dtype):
    """Queries that are asked, keys and values side by side, far from zero, in a plan with empty and single groups."""
    q, k, v = (noise(2, tokens, heads * width, seed=seed) for seed in range(3))
    group = torch.randint(9, (1, tokens), generator=torch.Generator().manual_seed(4)).to(DEVICE)
    group[0, 0] = 10
    return q[:, ::2].to(dtype), torch.cat([k + 3, v - 2], -1).to(dtype), MergePlan(group, 11)


HEADS = [(1, 3, 40), (2, 16, 70), (3, 40, 130), (1, 64, 600)]  # heads, width, tokens


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("heads, width, tokens", HEADS)
def test_of_first_order_it_is_what_torch_sums(heads, width, tokens, dtype):
    _, both, plan = attention(heads, width, tokens, dtype)
    found = first_order(both, plan, heads, 0.3)
    expected = first_order(both.double(), plan, heads, 0.3)
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert torch.equal(found, first_order(both, plan, heads, 0.3))


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("heads, width, tokens", HEADS)
def test_a_correction_is_that_of_torchs_operators(heads, width, tokens, dtype, used):
    q, both, plan = attention(heads, width, tokens, dtype)
    found = fitted(q, both, plan, heads, width**-0.5)
    assert {"first_order", "ridge"} <= set(used)
    with kernels.without():
        plain = fitted(q, both, plan, heads, width**-0.5)
    assert all(one.dtype == dtype and one.shape == other.shape for one, other in zip(found, plain, strict=True))
    bias = plan.finite_logits.to(dtype)[:, None, None]
    answers = _attended(_by_head(q, heads), plan.merge(both), heads, width**-0.5, bias).transpose(1, 2).flatten(2)
    given, expected = (
        corrected(answers.double(), q.double(), Correction(*(part.double() for part in one))) - answers
        for one in (found, plain)
    )  # weights alone may differ: answers are all but linear in queries
    # stored in bfloat16, as torch's operators store it too, the matrix is up to 0.18 off; unstored it is held below
    assert (given - expected).norm() <= (0.02 if dtype == torch.float16 else 0.5) * expected.norm()


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("count", [3, 32, 77])
def test_the_equations_are_solved_as_a_solver_does(count, dtype):
    q, merged, full = noise(2, count, 3 * 20) + 4, noise(2, 3, count, 20, seed=1) * 0.1, noise(2, 3, count, 20, seed=2)
    first = noise(4, 6, 20, 20, seed=3) * 0.02
    first[:, 1] = 0
    q, merged, full = (one.to(dtype) for one in (q, merged, full))
    outputs = [((6, 40, 20), torch.float32), ((6, 1, 20), torch.float32)]
    found = list(beside_twin("ridge", lambda own: (q, merged, full, first, *own), *outputs))
    for one, other in found:
        assert (one - other).abs().max() <= 4 * torch.finfo(dtype).eps * other.abs().max()
        assert not one[1].any() and one[0].any(), "where nothing was lost, nothing is given"


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("heads, width, tokens", HEADS)
def test_it_is_added_as_torch_adds_it(heads, width, tokens, dtype, used):
    q, out = noise(2, tokens, heads * width, dtype=dtype), noise(2, tokens, heads * width, seed=1, dtype=dtype)
    matrix, constant = (noise(2 * heads, rows, width, seed=rows, dtype=dtype) * 0.2 for rows in (2 * width, 1))
    found = corrected(out, q, Correction(matrix, constant))
    assert used == ["corrected"] and found.is_contiguous()
    with kernels.without():
        plain = corrected(out.double(), q.double(), Correction(matrix.double(), constant.double()))
    close(found, plain, dtype, 2.0)
    assert torch.equal(found, corrected(out.mT.contiguous().mT, q, Correction(matrix, constant)))
