"""Laws of the Triton kernels: what torch's operators give, they give. Run by test_kernels.py and test_cuda.py.

Where ``TRITON_INTERPRET=1`` Triton's interpreter runs the kernels on the CPU, else they are compiled for the GPU.
"""

from __future__ import annotations

import itertools
import os

import pytest
import torch
import torch.nn.functional as F

from tome_core import MergePlan, kernels
from tome_core.grid import Grid
from tome_core.methods import METHODS, MatchOptions
from tome_core.methods.base import Best, Rows, best_keys, taken

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
    for name in ("best_keys", "mean_rows"):
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
    assert used == []
    shares = plan.unmerge(weight / plan.sizes.clamp(min=1)[..., None])
    assert torch.allclose(x.grad, shares, atol=1e-6)
    with torch.no_grad():
        plan.merge(x)
    assert used == ["mean_rows"]
