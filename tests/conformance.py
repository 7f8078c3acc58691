"""What an attention has to do to count as known: merged keys give what their tokens, each by itself, would give.

The slow and obvious thing is the module's own, unpatched function over keys in which each merged one is repeated as
often as it has tokens, and a group without tokens is not there. By itself (`held`), and inside a UNet (`watched`).
"""

from __future__ import annotations

import contextlib
import copy
import math
import operator
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

import tome_core
from tome_core import MergePlan
from tome_core.attention import known_of, name_of
from tome_core.attention.core import attend_merged
from tome_core.attention.correction import Correction
from tome_core.merging.methods import METHODS
from tome_core.running.matching import Matcher

Own = Callable[[nn.Module, torch.Tensor, torch.Tensor | None], torch.Tensor]  # module, x, context (None: x itself)

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# of the output's length. The logarithms of sizes are float32 at best, and in half precision off by half of a last bit.
TOLERANCE = {torch.float64: 5e-7, torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


# --- plans by hand --------------------------------------------------------------------------------------------------


def ragged(batch: int, tokens: int, groups: int, seed: int = 0) -> MergePlan:
    """A plan whose sizes differ within a sample and between samples, with groups that are empty.

    Of three groups or more the last has no token in any sample, and the first none in every second one.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for sample in range(batch):
        first, last = (sample % 2, groups - 1) if groups >= 3 else (0, groups)
        drawn = torch.rand(tokens, generator=generator) ** (2 + sample % 3)  # most tokens are in few groups
        rows.append(first + (drawn * (last - first)).long())
    return MergePlan(torch.stack(rows), groups)


def merge_by(monkeypatch: Any, groups: int) -> None:
    """From now on every match of the engine, whatever its settings, is `ragged`, with so many groups."""

    def match(x: torch.Tensor, grid: Any, options: Any) -> MergePlan:
        return ragged(x.shape[0], grid.height * grid.width, groups)

    monkeypatch.setitem(METHODS, "bipartite", METHODS["bipartite"]._replace(match=match))


# --- the oracle -----------------------------------------------------------------------------------------------------


def over_repeated(
    own: Own, module: nn.Module, x: torch.Tensor, keys: torch.Tensor, sizes: torch.Tensor
) -> torch.Tensor:
    """The module's own attention of ``x [B, N, C]`` to keys ``[B, G, C]``, each repeated ``sizes [B, G]`` times.

    One sample at a time, because each has another number of keys in all.
    """
    return torch.cat([own(module, one[None], key.repeat_interleave(size, 0)[None])
                      for one, key, size in zip(x, keys, sizes, strict=True)])  # fmt: skip


def far(out: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest over the samples of the difference's length, as a share of the expected output's."""
    assert out.shape == expected.shape and torch.isfinite(out).all()
    difference = (out.double() - expected.double()).flatten(1).norm(dim=1)
    return (difference / expected.double().flatten(1).norm(dim=1)).max().item()


def assert_sized(
    own: Own, module: nn.Module, x: torch.Tensor, keys: torch.Tensor, sizes: torch.Tensor, out: torch.Tensor,
    tolerance: float | None = None,
) -> None:  # fmt: skip
    """The output is what repeated keys give, by far nearer than what keys without sizes would give.

    module: not patched, of the dtype of ``x``; asked in float64, so that only the engine's own error is seen.
    """
    # what it casts by itself (``upcast_attention``) it goes on casting
    exact, x64, keys64 = copy.deepcopy(module).double(), x.double(), keys.double()
    with torch.no_grad():
        expected = over_repeated(own, exact, x64, keys64, sizes)
        unsized = over_repeated(own, exact, x64, keys64, sizes.clamp(max=1))
    tolerance = TOLERANCE[x.dtype] if tolerance is None else tolerance
    error, blind = far(out, expected), far(unsized, expected)
    assert error <= tolerance, f"off by {error:.1e} of the output, {tolerance:.0e} allowed; without sizes {blind:.1e}"
    assert blind > 5 * tolerance, "the inputs do not tell proportional attention from plain attention"


# --- an attention by itself -----------------------------------------------------------------------------------------


def held(
    own: Own, module: nn.Module, x: torch.Tensor, keys: torch.Tensor, plan: MergePlan, tolerance: float | None = None,
    **kwargs: Any,
) -> set[str]:  # fmt: skip
    """Hold what is known of the module against repeated keys, in every way that its description offers.

    x: queries ``[B, N, C]``; keys: ``[B, G, C]``, which the plan is taken to have merged; kwargs: the call's other
    arguments. Returns the ways.
    """
    known = known_of(module)
    assert known is not None, f"{name_of(module)} is not known"
    assert known.problem(module, kwargs) is None
    no_bias = copy.copy(known)
    no_bias.takes_bias = lambda *_: False
    ways = set()
    for one in (known, no_bias):
        with torch.no_grad():
            out, way = attend_merged(one, module, x, keys, keys, plan, kwargs)
        assert_sized(own, module, x, keys, plan.sizes.expand(len(x), -1), out, tolerance)
        assert_corrected(one, module, x, keys, plan, out, kwargs)
        ways.add(way)
    return ways


def held_with_hooks(
    own: Own, make: Callable[[], nn.Module], roles: list[str], x: torch.Tensor, keys: torch.Tensor
) -> None:
    """What was put on projections counts: LoRA replaces them, offloading wraps their forward, others hook them."""
    module, plain, asked, plan = make(), make(), [], ragged(2, 60, 7)
    for role in roles:
        module.get_submodule(role).register_forward_hook(
            lambda layer, args, out, role=role: (asked.append(role), out * 1.25)[1]
        )  # fmt: skip
        for parameter in plain.get_submodule(role).parameters():
            parameter.data.mul_(1.25)
    with torch.no_grad():
        out = attend_merged(known_of(module), module, x, keys, keys, plan, {}).out
    assert set(asked) == set(roles)
    assert_sized(own, plain, x, keys, plan.sizes, out)


def assert_corrected(
    known: Any, module: nn.Module, x: torch.Tensor, keys: torch.Tensor, plan: MergePlan, out: torch.Tensor,
    kwargs: dict[str, Any],
) -> None:  # fmt: skip
    """A correction adds each head's product of its queries, before the output projection, on every way."""
    with torch.no_grad():
        q, heads = known.queries(module, x, kwargs), known.heads(module)
        width = q.shape[-1] // heads
        of_query = torch.randn(len(x), heads, width, width, generator=torch.Generator().manual_seed(5)).to(q.dtype)
        matrix = torch.cat([of_query, of_query * 0], 2)
        correction = Correction(matrix.flatten(0, 1), of_query[:, :, :1].flatten(0, 1))
        found, _ = attend_merged(known, module, x, keys, keys, plan, kwargs, correction)
        more = torch.einsum("bnhd,bhde->bnhe", q.double().unflatten(-1, (heads, -1)), of_query.double())
        more = (more + of_query[:, :, 0].double()[:, None]).flatten(2).to(q.dtype)
        expected = known.finish(module, more) - known.finish(module, torch.zeros_like(q))  # it has a bias
    allowed = 60 * torch.finfo(q.dtype).eps * max(1, float(out.abs().max()))
    assert far(found.double() - out.double(), expected) <= allowed


# what hosts' attentions are held with: their width and heads, queries, and keys
CHANNELS, HEADS, TOKENS, GROUPS = 32, 4, 40, 9
LASTING = SimpleNamespace(  # patches like monkeypatch's, where nobody takes them back
    setitem=operator.setitem, setattr=lambda target, name, value, raising=True: setattr(target, name, value)
)


def own(module: nn.Module, x: torch.Tensor, context: torch.Tensor | None) -> torch.Tensor:
    """The unpatched module, as `Own`."""
    return module(x, context=context)


def tokens(batch: int, count: int = TOKENS, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """``[batch, count, CHANNELS]``, random."""
    return torch.randn(batch, count, CHANNELS, generator=torch.Generator().manual_seed(seed)).to(dtype)


def telling(module: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The attention with random weights, and with logits that tell one key from another."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in module.parameters():
            deviation = 2 * weight.shape[-1] ** -0.5 if weight.dim() > 1 else 0.1
            weight.copy_(torch.randn(weight.shape, generator=generator) * deviation)
    return module.to(dtype).requires_grad_(False).eval()


def ways(
    module: nn.Module, dtype: torch.dtype = torch.float32, batches: tuple[int, ...] = (1, 2, 5, 6),
    tolerance: float | None = None, **kwargs: Any,
) -> set[str]:  # fmt: skip
    """Those of `held` that an attention takes, the same for batches of all these sizes."""
    found = []
    for batch in batches:
        x, keys = tokens(batch, TOKENS, dtype), tokens(batch, GROUPS, dtype, seed=1)
        found.append(held(own, module, x, keys, ragged(batch, TOKENS, GROUPS), tolerance, **kwargs))
    assert all(one == found[0] for one in found)
    return found[0]


# --- inside a UNet --------------------------------------------------------------------------------------------------


class Seen(NamedTuple):
    """One call of a self-attention, as its block saw it.

    plan: by which the engine merged; None: it did not.
    """

    name: str
    x: torch.Tensor
    kwargs: dict[str, Any]
    out: torch.Tensor
    plan: MergePlan | None


@contextlib.contextmanager
def watched(model: nn.Module) -> Iterator[list[Seen]]:
    """Everything that blocks ask of ``attn1``, seen from outside of whatever was patched on.

    Plans are right where self-attention is the only part that merges.
    """
    seen: list[Seen] = []
    latest: list[MergePlan | None] = [None]
    find = Matcher.find

    def finding(*args: Any, **kwargs: Any) -> Any:
        plans = find(*args, **kwargs)
        latest[0] = plans.plan
        return plans

    def note(name: str, args: tuple, kwargs: dict, out: torch.Tensor) -> None:
        seen.append(Seen(name, args[0].detach(), kwargs, out.detach(), latest[0]))

    hooks: list[Any] = []
    for name, module in self_attentions(model).items():
        block = model.get_submodule(name.rsplit(".", 1)[0])
        hooks.append(block.register_forward_pre_hook(lambda *_: latest.__setitem__(0, None)))
        hooks.append(module.register_forward_hook(
            lambda module, args, kwargs, out, name=name: note(name, args, kwargs, out), with_kwargs=True
        ))  # fmt: skip
    Matcher.find = finding
    try:
        yield seen
    finally:
        Matcher.find = find
        for hook in hooks:
            hook.remove()


def self_attentions(model: nn.Module) -> dict[str, nn.Module]:
    """By path, the ``attn1`` of every block."""
    return {name: module for name, module in model.named_modules() if name.rsplit(".", 1)[-1] == "attn1"}


def given(model: nn.Module, **more: Any) -> None:
    """From now on every ``attn1`` is called with these arguments too, as some hosts' extensions do."""
    for module in self_attentions(model).values():
        module.register_forward_pre_hook(lambda module, args, kwargs: (args, {**kwargs, **more}), with_kwargs=True)


def _merged(plain: nn.Module, seen: list[Seen]) -> Iterator[tuple[Seen, nn.Module]]:
    """Each call, all of which have merged, and its module without a patch."""
    assert seen
    modules = self_attentions(plain)
    for call in seen:
        assert call.plan is not None, "the engine did not merge"
        yield call, modules[call.name]


def assert_all_sized(own: Own, plain: nn.Module, seen: list[Seen]) -> None:
    """Each call gave what repeated keys give. plain: the model without a patch."""
    for call, module in _merged(plain, seen):
        sizes = call.plan.sizes.expand(len(call.x), -1)
        assert_sized(own, module, call.x, call.plan.merge(call.x), sizes, call.out)


def assert_all_together(own: Own, plain: nn.Module, seen: list[Seen]) -> None:
    """Each call gave what the module gives for merged tokens, q, k and v together; at most half were merged away."""
    for call, module in _merged(plain, seen):
        assert call.x.shape[1] > call.plan.num_groups >= math.floor(call.x.shape[1] / 2)
        with torch.no_grad():
            expected = call.plan.unmerge(own(module, call.plan.merge(call.x), None))
        assert far(call.out, expected) <= TOLERANCE[call.x.dtype]


def assert_equal_calls(seen: list[Seen], plain: list[Seen]) -> None:
    """Call by call the same bits."""
    assert len(seen) == len(plain) > 0
    for one, other in zip(seen, plain, strict=True):
        assert one.name == other.name and torch.equal(one.x, other.x) and torch.equal(one.out, other.out)


def assert_left_alone(call: Callable[[nn.Module], torch.Tensor], model: nn.Module, config: Any, why: str = "") -> None:
    """Merging changes neither the model's output nor what its attentions are called with, and says why."""
    with watched(model) as plain:
        out = call(model)
    with tome_core.patch(model, config) as handle, watched(model) as seen:
        assert torch.equal(call(model), out)
    assert_equal_calls(seen, plain)
    assert any(why in reason for reason in reasons_of(handle)), handle.report()


def routes_of(handle: Any) -> list[str]:
    """The ways of proportional attention, over all levels of a report."""
    return [route for level in handle.report().levels for route in level.routes]


def reasons_of(handle: Any) -> list[str]:
    """Why something was left alone, over all levels of a report."""
    return [reason for level in handle.report().levels for reason in level.reasons]


# --- xformers, which is for GPUs --------------------------------------------------------------------------------------


def memory_efficient_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_bias: torch.Tensor | None = None,
    p: float = 0.0, scale: float | None = None, *, op: Any = None,
) -> torch.Tensor:  # fmt: skip
    """What xformers computes, for ``[B, N, d]`` or ``[B, N, H, d]``, and as strict as it is with a bias.

    A bias has the dtype of the queries and every one of its sizes: nothing is broadcast.
    """
    assert query.dtype == key.dtype == value.dtype
    flat = query.dim() == 3
    q, k, v = (one[:, :, None] if flat else one for one in (query, key, value))
    assert q.shape[2:] == k.shape[2:] and k.shape[:3] == v.shape[:3]
    logits = torch.einsum("bnhd,bghd->bhng", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if attn_bias is not None:
        full = (q.shape[0], q.shape[1], k.shape[1]) if flat else tuple(logits.shape)
        assert attn_bias.dtype == query.dtype, "xformers takes a bias in the dtype of the queries"
        assert tuple(attn_bias.shape) == full, "xformers broadcasts no bias"
        logits = logits + attn_bias.view(logits.shape)
    out = torch.einsum("bhng,bghd->bnhd", logits.softmax(-1), v)
    return out[:, :, 0] if flat else out


def with_xformers(monkeypatch: Any, *modules: ModuleType) -> None:
    """As if xformers were installed, for these modules, which asked for it when they were imported."""
    ops = ModuleType("xformers.ops")
    ops.memory_efficient_attention = memory_efficient_attention
    ops.AttentionOpBase = SimpleNamespace
    package = ModuleType("xformers")
    package.ops, package.__version__ = ops, "0.0.30"
    monkeypatch.setitem(sys.modules, "xformers", package)
    monkeypatch.setitem(sys.modules, "xformers.ops", ops)
    for module in modules:
        monkeypatch.setattr(module, "xformers", package, raising=False)
