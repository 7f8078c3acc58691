"""Laws of the Triton kernels, on the CPU with ``TRITON_INTERPRET=1``, else on the GPU. `used` compares each launch with
torch's operators: laws have shapes, and what a comparison does not see (bits, NaN, gradients, the proof for users)."""

import itertools
import os

import pytest
import torch
import torch.nn.functional as F
import triton

import tome_core
from tests.small_models.sd_block import SpatialTransformer, UNet
from tome_core import MergePlan
from tome_core.attention.correction import Correction, block_of, fit_correction
from tome_core.attention.merged import add_correction
from tome_core.merging import kernels
from tome_core.merging.kernels import proof
from tome_core.merging.methods import bipartite
from tome_core.merging.methods.base import best_keys
from tome_core.merging.metric import keys_of_rows, of_unit_spread

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INF = float("inf")
NAMES = tuple(proof._CHECKS)
PROVES_ITSELF = kernels._proves_itself


def together(*axes):
    """Parametrize by all combinations on a GPU; in the slow interpreter, by each value of each axis at least once."""
    if not INTERPRETED:
        return list(itertools.product(*axes))
    longest = max(map(len, axes))
    return list(zip(*(itertools.islice(itertools.cycle(axis), longest) for axis in axes), strict=True))


@triton.jit
def _count(stop):
    for _ in range(0, stop, 2):
        pass


if INTERPRETED:
    try:
        _count[(1,)](5)
    except Exception as error:  # so fails Triton 3.6 with numpy 2.4
        why = f"Triton {triton.__version__}'s interpreter cannot run a loop with this numpy: {error}"
        pytest.skip(why, allow_module_level=True)


def _fail(name, why):
    raise AssertionError(f"{name}: {why}")


def _compare(key, arguments):
    """Replace a first launch's proof: compare every launch with torch's operators, and use its result."""
    if fault := kernels.find_fault(key[0], arguments):
        _fail(key[0], fault)
    return True


@pytest.fixture(autouse=True)
def used(monkeypatch):
    """Names of the kernels that ran; a test fails if none ran, or if one was wrong or could not run."""
    if INTERPRETED:
        monkeypatch.setattr(kernels, "DEVICES", ("cpu",))
        _repair_the_interpreter(monkeypatch)
    module, calls = kernels._module(), []
    for name in NAMES:
        launch = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, launch=launch, name=name: (calls.append(name), launch(*a)))
    monkeypatch.setattr(kernels, "_give_up", _fail)
    monkeypatch.setattr(kernels, "_verified", set())
    monkeypatch.setattr(kernels, "_proves_itself", _compare)
    yield calls
    assert calls


def _repair_the_interpreter(monkeypatch):
    """Triton's interpreter multiplies the bit patterns of bfloat16 (seen in 3.5.0 and 3.9.0): give it their values."""
    from triton.runtime.interpreter import InterpreterBuilder

    dot = InterpreterBuilder.create_dot

    def value(self, x):
        return self.cast_impl(x, triton.language.float32) if x.dtype.scalar == triton.language.bfloat16 else x

    def repaired(self, a, b, *rest):
        return dot(self, value(self, a), value(self, b), *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", repaired)


def noise(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def whole_numbers(most, *shape, seed):
    return torch.randint(most, shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


# batch, tokens, queries, keys, channels: one tile and less, whole tiles, tails of every axis, a real width
SHAPES = [(1, 1, 1, 1, 1), (3, 80, 64, 64, 32), (2, 200, 130, 65, 33), (1, 70, 5, 130, 320)]


def case(shape, dtype=torch.float32):
    """Tokens, the rows that are queries, and keys: directions to compare them with."""
    batch, tokens, queries, keys, channels = shape
    rows = whole_numbers(tokens, 1, queries, seed=1)
    return noise(batch, tokens, channels, dtype=dtype), rows, F.normalize(noise(batch, keys, channels, seed=2), dim=-1)


@pytest.mark.parametrize("tokens, channels, dtype", together([7, 64, 130, 300], [3, 40, 70], DTYPES), ids=str)
def test_keys_and_values_are_spread_in_one_launch_however_they_lie_in_memory(tokens, channels, dtype, used):
    keys, values = (noise(2, tokens, channels, seed=n, dtype=dtype) * size + 3 for n, size in ((1, 2.0), (2, 0.1)))
    features = of_unit_spread(keys, values)
    assert used == ["spread"] and features.dtype == dtype
    assert torch.equal(features, of_unit_spread(*torch.cat([keys, values], 2).chunk(2, 2)))
    values[:, -1] = 6e4  # far from the few
    assert of_unit_spread(values, values).isfinite().all()


@pytest.mark.parametrize("shape, has_bias, dtype", together(SHAPES, [False, True], DTYPES), ids=str)
def test_the_best_key_is_the_same_if_lengths_count_and_keys_of_the_queries_own_dtype_are_multiplied_exactly(
    shape, has_bias, dtype):  # fmt: skip
    (x, rows, keys), bias = case(shape, dtype), None
    if has_bias:
        bias = noise(*keys.shape[:2], seed=3)
        bias[:, 1::3] = -INF  # hidden
    assert torch.equal(kernels.best_keys(x, rows, keys, bias, lengths=True)[1], best_keys(x, rows, keys, bias)[1])
    keys = keys.to(dtype)
    assert all(map(torch.equal, best_keys(x, rows, keys, bias), best_keys(x, rows, keys.float(), bias)))


def test_inputs_may_lie_in_memory_by_any_strides():
    """Fixture `used` compares each launch with torch's operators."""
    x, rows = noise(2, 40, 70).transpose(1, 2), torch.arange(69, -1, -1, device=DEVICE)[None, ::2].expand(2, -1)
    best_keys(x, rows, noise(1, 33, 80)[..., ::2].expand(2, -1, -1), noise(66)[::2].expand(2, -1))


def test_a_query_that_is_no_number_gets_a_key_there_is_and_harms_no_other():
    x, rows, keys = case(SHAPES[2])
    clean = best_keys(x, rows, keys)
    x[:, rows[0, 3]] = float("nan")
    best = best_keys(x, rows, keys)
    others = (rows != rows[0, 3]).expand(2, -1)
    assert ((best[1] >= 0) & (best[1] < 65)).all()
    assert torch.equal(best[1][others], clean[1][others])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_querys_result_has_the_same_bits_alone_as_among_others(dtype):
    x, rows, keys = case(SHAPES[2], dtype)
    if INTERPRETED:  # numpy's sums may depend on a row's place: those of whole numbers do not
        x, keys = x.round(), (keys * 8).round()
    among, again = best_keys(x, rows, keys), best_keys(x, rows, keys)
    alone = best_keys(x[1:], rows[:, 70:80], keys[1:])
    for first, same, few in zip(among, again, alone, strict=True):
        assert torch.equal(first, same) and torch.equal(first[1:, 70:80], few)


# how the groups of 150 tokens are made: some groups empty, one that holds all, sizes around the kernels' rows
GROUPS = {
    "random": whole_numbers(40, 2, 150, seed=5),
    "all in the last": torch.full((2, 150), 39),
    "one map for all": whole_numbers(3, 1, 150, seed=5) * 7,
    "sizes 15, 16, 17": torch.arange(12).repeat_interleave(torch.tensor([15, 16, 17]).repeat(4))[None, :150],
    "sizes 31, 32, 33": torch.arange(5).repeat_interleave(torch.tensor([31, 32, 33, 31, 32]))[None, :150],
}


@pytest.mark.parametrize("groups, dtype, channels", together(list(GROUPS), DTYPES, [5, 40, 130]))
def test_keys_and_values_are_merged_at_once_as_each_alone_however_they_lie_in_memory(groups, dtype, channels, used):
    plan, both = MergePlan(GROUPS[groups].to(DEVICE), 40), noise(2, 2 * channels, 150, dtype=dtype).transpose(1, 2)
    keys, values = both.chunk(2, -1)
    of_keys, of_values, exact = plan.merge_pair(keys, values, exact=True)
    assert used.count("mean_rows") == 1 and all(tensor.is_contiguous() for tensor in (of_keys, of_values, exact))
    assert torch.equal(of_keys, plan.merge(keys.contiguous())) and torch.equal(of_values, plan.merge(values))
    assert exact.dtype == torch.float32 and torch.equal(exact, plan.merge(values.float()))


def test_torchs_operators_give_a_gradient_that_is_asked_for(used):
    plan, x = MergePlan(GROUPS["random"].to(DEVICE), 40), noise(2, 150, 6).requires_grad_()
    weight = noise(2, 40, 6, seed=1)
    (plan.merge(x) * weight).sum().backward()
    assert "mean_rows" not in used
    shares = plan.unmerge(weight / plan.sizes.clamp(min=1)[..., None])
    assert torch.allclose(x.grad, shares, atol=1e-6)
    with torch.no_grad():
        plan.merge(x)
    assert used[-1] == "mean_rows"


@pytest.mark.parametrize("dtype, channels", together(DTYPES, [5, 1100]), ids=str)
def test_centres_know_their_lengths_and_which_are_empty(dtype, channels):
    plan, x = MergePlan(GROUPS["one map for all"].to(DEVICE), 40), noise(3, 150, channels, dtype=dtype)
    _, bias = plan.centres(x)
    assert torch.equal(bias == -INF, plan.empty.expand(3, -1))
    rows = torch.tensor([[59, 0, 7]], device=DEVICE)
    assert torch.equal(keys_of_rows(x, rows, True)[0], x[:, rows[0]])  # rows are centres of their own


COUNTED = together([1, 2, 3], [1, 20, 2100], [1, 33, 70], DTYPES)


@pytest.mark.parametrize("rows, tokens, groups, dtype", COUNTED, ids=str)
def test_the_first_merge_sorts_and_counts_tokens_in_the_same_launch_and_the_next_does_not(
    rows, tokens, groups, dtype, used):  # fmt: skip
    """Both have equal bits, and fixture `used` compares what was counted with torch's operators."""
    plan, x = MergePlan(whole_numbers(groups, rows, tokens, seed=3), groups), noise(3, tokens, 700, dtype=dtype)
    x = x if rows in (1, 3) else x[:rows]
    merged = plan.merge(x)
    order, _ = plan._sorted_segments()
    assert plan.sizes.sum() == len(order) == rows * tokens and torch.equal(plan.empty, plan.sizes == 0)
    for one in (dtype, torch.float32):
        assert plan.log_sizes(one).dtype == one
    assert torch.equal(plan.merge(x), merged) and used == ["mean_rows"] * 2


@pytest.mark.parametrize("removed, samples", together([1, 150, 299], [1, 2]))
def test_tokens_are_placed_as_torch_places_them(removed, samples):
    score = noise(2, 300, seed=5).round(decimals=1)  # some are equal
    score[0, 7], score[1, 9:12] = float("nan"), torch.tensor([INF, -INF, -0.0], device=DEVICE)
    tokens = torch.stack([torch.randperm(340, generator=torch.Generator().manual_seed(n)) for n in range(samples)])
    sources, destinations = tokens.to(DEVICE).expand(2, -1).split([300, 40], 1)
    given = score, whole_numbers(40, 2, 300, seed=3), sources, destinations, removed
    plan = bipartite._plan(*given)
    with kernels.kernels_off():
        plain = bipartite._plan(*given)
    assert torch.equal(plan.group, plain.group) and plan.num_groups == plain.num_groups


# heads, width, tokens: tokens of one span, and of three; one block of channels, two and four
HEADS = [(1, 3, 40), (2, 16, 70), (3, 40, 130), (1, 64, 1100), (2, 80, 90), (1, 160, 80)]
every_size = pytest.mark.parametrize("dtype, size", together(DTYPES[1:], HEADS), ids=str)


@every_size
def test_a_correction_is_made_in_two_launches_however_keys_and_values_lie_in_memory(size, dtype, used):
    heads, width, tokens = size
    q, k, v = (noise(2, tokens, heads * width, seed=seed) for seed in range(3))
    pair = (k + 3).to(dtype), (v - 2).to(dtype)  # far from zero, as a trained model's are
    queries, places = q.to(dtype).unflatten(2, (heads, width)), torch.arange(tokens - 1, -1, -2, device=DEVICE)
    group = whole_numbers(9, 1, tokens, seed=4)  # group 9 is empty, group 10 has one token
    group[0, 0] = 10
    plan = MergePlan(group, 11)
    correction, merged = fit_correction(queries, places, pair, plan, width**-0.5)
    assert used[-2:] == ["answer", "ridge"] and correction.matrix.dtype == dtype
    assert correction.error.shape == (2 * heads * width // block_of(width), 2) and correction.error.min() > 0
    apart = torch.cat(pair, -1).chunk(2, -1)
    again, _ = fit_correction(by_head_first(queries), places, apart, plan, width**-0.5)
    assert all(map(torch.equal, correction[:2], again[:2]))
    assert all(map(torch.equal, merged, plan.merge_pair(*pair)))


def by_head_first(x):
    """The same rows with all of a head's side by side in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("count, dtype", together([3, 32, 77], DTYPES[1:]), ids=str)
def test_a_head_that_lost_nothing_is_given_nothing(count, dtype):
    first = noise(4, 6, 20, 20, seed=3) * 0.02
    first[:, 1] = 0
    answers = kernels.Answers(noise(6, count, 20, seed=1) * 0.1, noise(4, 6, count, 20, seed=2),
                              noise(4, 6, count, seed=4) * 3, first)  # fmt: skip
    q = (noise(2, count, 3, 20) + 4).to(dtype)
    matrix, constant, error = kernels.ridge(q, torch.arange(count, device=DEVICE), answers, 10, 9, 4 / count, 1e-6)
    for part in (matrix, constant, error[:, 0].view(6, 2)):
        assert [head.any().item() for head in part] == [True, False, True, True, True, True]


@every_size
def test_a_correction_is_added_in_one_launch_however_heads_lie_in_memory(size, dtype, used):
    heads, width, tokens = size
    block = block_of(width)
    q, out = (noise(2, tokens, heads, width, seed=seed, dtype=dtype) for seed in (0, 1))
    matrix, constant = (noise(2 * heads, rows, width, seed=rows, dtype=dtype) * 0.2 for rows in (2 * width, 1))
    number = torch.arange(width, device=DEVICE) // block
    matrix[:, width:] *= number[:, None] == number
    correction = Correction(matrix, constant)
    corrected = add_correction(out, q, correction)
    assert used == ["correct"] and corrected.is_contiguous()
    assert torch.equal(corrected, add_correction(by_head_first(out), by_head_first(q), correction))


# a kernel's proof of itself: it catches a wrong kernel at its first launch, and no right one
def _best():
    keys, bias = noise(2, 70, 40, seed=1), noise(2, 70, seed=2)
    bias[:, ::3] = -INF
    return best_keys(noise(2, 90, 40, dtype=torch.float16), None, keys.half().float(), bias)


def _spread():
    return (of_unit_spread(*noise(2, 130, 80, dtype=torch.float16).chunk(2, -1)),)


def _merged():
    """Two samples of 130 tokens in 40 groups, some of them empty."""
    plan = MergePlan(whole_numbers(38, 2, 130, seed=1), 40)
    means = plan.merge_pair(*noise(2, 130, 80, dtype=torch.float16).chunk(2, -1), exact=True)
    return (*means, *plan._sorted_segments(), plan.sizes, plan.log_sizes(torch.float32))


def _placed():
    index, order = whole_numbers(20, 2, 60, seed=3), torch.randperm(80, generator=torch.Generator().manual_seed(4))
    sources, destinations = order.to(DEVICE)[None].split([60, 20], 1)
    return (bipartite._plan(noise(2, 60), index, sources, destinations, 25).group,)


def _fit():
    heads, width, plan = 2, 16, MergePlan(torch.arange(130, device=DEVICE)[None] // 3, 50)
    keys, values, q = (noise(1, 130, heads * width, seed=seed, dtype=torch.float16) for seed in range(3))
    places = torch.arange(0, 130, 9, device=DEVICE)
    return fit_correction(q.unflatten(2, (heads, width)), places, (keys, values + 1), plan, 0.25)[0][:2]


def _corrected():
    q, out = (noise(2, 130, 2, 16, seed=seed, dtype=torch.float16) for seed in (0, 1))
    parts = (noise(4, rows, 16, seed=rows, dtype=torch.float16) * 0.2 for rows in (32, 1))
    return (add_correction(out, q, Correction(*parts)),)


WORK = {"spread": _spread, "best_keys": _best, "mean_rows": _merged, "assign_groups": _placed, "answer": _fit,
        "ridge": _fit, "correct": _corrected}  # fmt: skip


def _given(place, change):
    """Give the kernel another argument."""
    return lambda launch, *given: launch(*given[:place], change(given[place]), *given[place + 1 :])


def _gives(place, change):
    """Change the kernel's output."""
    return lambda launch, *given: (launch(*given), given[place] is None or given[place].copy_(change(given[place])))


def _stale(x):
    """Leave a tile with its last contents."""
    return torch.cat([x.flatten()[:-16], x.flatten()[:16]]).view_as(x)


PLANTED = {"spread: keys have the spread of values": ("spread", _given(0, lambda keys: keys * 1.1)),
           "best_keys: hidden keys are not": ("best_keys", _given(3, lambda bias: None)),
           "best_keys: a number that no key has": ("best_keys", _gives(5, lambda index: index + 70)),
           "mean_rows: a stale tile": ("mean_rows", _gives(5, _stale)),
           "mean_rows: one group further": ("mean_rows", _given(9, lambda group: (group + 1) % 40)),
           "assign_groups: one token more merges": ("assign_groups", _given(4, lambda removed: removed + 1)),
           "answer: groups of the tokens beside them": ("answer", _given(7, lambda group: group.roll(1, 1))),
           "answer: sizes are forgotten": ("answer", _given(6, torch.zeros_like)),
           "answer: one head's answers for another's": ("answer", _gives(11, lambda x: x.roll(1, 0))),
           "ridge: what is known is not taken off": ("ridge", _given(5, torch.zeros_like)),
           "ridge: half of the steps": ("ridge", _given(7, lambda steps: steps // 2)),
           "ridge: the constant is lost": ("ridge", _gives(11, torch.zeros_like)),
           "ridge: queries help to predict themselves": ("ridge", _gives(12, lambda error: error * 0.7)),
           "correct: a stale tile": ("correct", _gives(5, _stale))}  # fmt: skip


@pytest.fixture
def off(monkeypatch):
    """The kernels that are off, with reasons. A fault is handled as in a user's process, not as in other tests here."""
    reasons = {}
    monkeypatch.setattr(kernels, "_off", reasons)
    monkeypatch.setattr(kernels, "_give_up", reasons.__setitem__)
    monkeypatch.setattr(kernels, "_proves_itself", PROVES_ITSELF)
    return reasons


@pytest.mark.parametrize("name, wrong", PLANTED.values(), ids=PLANTED)
def test_a_wrong_kernel_is_caught_at_its_first_launch_and_torchs_operators_serve(name, wrong, off, monkeypatch):
    module = kernels._module()
    launch = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *given: wrong(launch, *given))
    results = WORK[name]()
    assert off.keys() == {name}
    with kernels.kernels_off():
        expected = WORK[name]()
    eps = torch.finfo(torch.float16).eps
    for result, other in zip(results, expected, strict=True):
        torch.testing.assert_close(result.float(), other.float(), rtol=4 * eps, atol=16 * eps)
    (note,) = kernels.notes()
    assert name in note and "where torch's operators have" in note and DEVICE in note


def test_a_right_kernel_proves_itself_once_and_waits_no_more(used, off, monkeypatch):
    proofs, find_fault = [], kernels.find_fault
    monkeypatch.setattr(kernels, "find_fault", lambda *given: (proofs.append(given[0]), find_fault(*given))[1])
    for work in dict.fromkeys(WORK.values()):
        first = work()
        seen = len(proofs)
        assert all(map(torch.equal, first, work())) and len(proofs) == seen
    assert set(proofs) == set(NAMES) and not off
    assert all(used.count(name) >= 2 for name in NAMES)


def test_inputs_that_are_not_finite_tell_nothing_of_a_kernel(off):
    keys, clean = noise(1, 9, 8), noise(1, 20, 8, seed=1)
    sick = clean.clone()
    sick[0, 0, 0] = float("nan")
    with kernels.kernels_off():
        expected = best_keys(sick, None, keys)
    assert torch.equal(best_keys(sick, None, keys)[1][:, 1:], expected[1][:, 1:])
    assert not kernels._verified
    for dtype in DTYPES:  # each kernel proves itself
        best_keys(clean.to(dtype), None, keys.to(dtype))
    assert {key[-1] for key in kernels._verified} == set(DTYPES) and not off


@pytest.mark.parametrize("dtype", DTYPES[1:2] if INTERPRETED else DTYPES, ids=str)
def test_with_kernels_and_without_a_models_pictures_differ_by_rounding_alone(dtype, used, off):
    """The three calls of a UNet in one sampling have a new match, a kept one and a late one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = UNet([[SpatialTransformer(16, 1, 8)]]).to(DEVICE, dtype).requires_grad_(False)
    x, text = noise(1, 16, 16, 16, dtype=dtype).repeat(2, 1, 1, 1), noise(2, 5, 8, dtype=dtype)

    def draw():
        with tome_core.patch(model, strength=0.5, only_if_it_pays=False, host_clock=True) as handle:
            pictures = []
            for time in (900.0, 880.0, 300.0):
                handle.set_time(timestep=time, sampling="a")
                pictures.append(model(x, None, text).float())
            return torch.stack(pictures)

    merged = draw()
    wanted = set(NAMES) if dtype.itemsize == 2 else {"spread", "best_keys", "mean_rows", "assign_groups"}
    assert wanted <= set(used) and not off
    with kernels.kernels_off():
        plain = draw()
    of_rounding = (3 if dtype.itemsize == 2 else 10) * torch.finfo(dtype).eps
    assert (merged - plain).norm() <= of_rounding * plain.norm()
