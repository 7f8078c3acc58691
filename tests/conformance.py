"""What an attention has to do to count as merged: merged keys give what their tokens, each by itself, would give.

The slow and obvious thing is the module itself, unpatched and in float64, with every token's key and value, after their
projections, exchanged for the means of its group: that is each merged key as often as it has tokens. No line of the
engine is asked for it, and whatever the module calls comes to see what it stands for.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import operator
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import tome_core
from tome_core import MergeConfig, MergePlan

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# of the output's length. The logarithms of sizes are float32 at best, and in half precision off by half of a last bit.
TOLERANCE = {torch.float64: 5e-7, torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
# what attentions are held with: their width and heads, a square of tokens, and how many keys are left
CHANNELS, HEADS, SIDE, GROUPS = 32, 4, 8, 13
KV = MergeConfig(correction=False, side="kv", ratio=0.75, use_rand=False, max_downsample=8)


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


@contextlib.contextmanager
def merging_by(groups: int = GROUPS, alike: bool = False, engine: ModuleType = tome_core) -> Iterator[None]:
    """Inside it every match of the engine, whatever its settings, is `ragged`. alike: the same in all samples."""
    methods = importlib.import_module(f"{engine.__name__}.merging.methods").METHODS
    before = methods["bipartite"]

    def match(x: torch.Tensor, grid: Any, options: Any) -> Any:
        plan = ragged(1 if alike else x.shape[0], grid.height * grid.width, groups)
        return engine.MergePlan(plan.group, groups)

    methods["bipartite"] = before._replace(match=match)
    try:
        yield
    finally:
        methods["bipartite"] = before


# --- the oracle -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def grouped(
    layers: dict[str, nn.Module], plan: MergePlan, queries: bool = False, evenly: bool = False
) -> Iterator[None]:
    """Inside it every token's key and value, as an attention's function gets them, is its group's mean.

    layers: the attention's, as of `layers_called`. queries: every query is, too. evenly: keys and values are as if all
    groups that have tokens had about equally many.
    """
    own = plan.group
    full = [one.unique() for one in own]  # the groups of each sample that have tokens
    even = torch.stack([one[torch.arange(own.shape[1]) % len(one)] for one in full])

    def exchange(role: str, is_last: bool, out: torch.Tensor) -> torch.Tensor:
        if not is_last or (role == "q" and not queries):
            return out
        by_head = out.dim() == 4 and out.shape[1] != plan.group.shape[1]
        found = means(out.transpose(1, 2) if by_head else out, own, even if evenly and role != "q" else own)
        return found.transpose(1, 2) if by_head else found

    def hook(name: str, layer: nn.Module, args: tuple, out: torch.Tensor) -> torch.Tensor:
        kind, roles = name.split("_")[:2]
        last = [kind == "norm" or f"norm_{role}" not in layers for role in roles]  # "qkv", if they are fused
        return torch.cat(list(map(exchange, roles, last, out.chunk(len(roles), -1))), -1)

    hooks = [one.register_forward_hook(partial(hook, name)) for name, one in layers.items()]
    try:
        yield
    finally:
        for one in hooks:
            one.remove()


def means(x: torch.Tensor, group: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Each token's of ``[B, N, ...]`` exchanged for the mean of the group that is wanted; both are ``[B or 1, N]``."""
    share = F.one_hot(group).to(x)
    found = share.mT @ x.flatten(2) / share.sum(1).clamp(min=1)[..., None]
    rows = wanted.expand(len(x), -1)[..., None].expand(-1, -1, found.shape[2])
    return found.gather(1, rows).view(x.shape)


def layers_called(module: nn.Module, call: Callable[[], Any]) -> dict[str, nn.Module]:
    """Name -> layer from which queries, keys and values come in a call: projections, also a processor's own, and norms
    that follow them.
    """
    called: dict[str, nn.Module] = {}
    hooks = []
    for path, one in module.named_modules():
        name = path.rpartition(".")[2]
        if re.match(r"to_(q|k|v|qkv)(_|$)|norm_[qk]$", name):
            hooks.append(one.register_forward_hook(lambda layer, *_, name=name: called.update({name: layer})))
    call()
    for one in hooks:
        one.remove()
    return called


def far(out: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest over the samples of the difference's length, as a share of the expected output's."""
    assert out.shape == expected.shape and torch.isfinite(out).all()
    difference = (out.double() - expected.double()).flatten(1).norm(dim=1)
    return (difference / expected.double().flatten(1).norm(dim=1)).max().item()


def assert_repeated(
    module: nn.Module, args: tuple, told: dict[str, Any], out: torch.Tensor, plan: MergePlan,
    tolerance: float | None = None, queries: bool = False,
) -> None:  # fmt: skip
    """The output is what repeated keys give, by far nearer than what keys without sizes would give.

    module: not patched; asked in float64, so that only the engine's own error is seen. args, told: of its call, whose
    first argument are the tokens ``[B, N, C]``. queries: they merge beside keys.
    """
    dtype = args[0].dtype
    # what it casts by itself (``upcast_attention``) it goes on casting
    exact, found = copy.deepcopy(module).double(), []
    call = partial(exact, *_doubled(args), **_doubled(told))
    with torch.no_grad():
        layers = layers_called(exact, call)
        for evenly in (False, True):
            with grouped(layers, plan, queries, evenly):
                found.append(call())
    expected, unsized = found
    tolerance = TOLERANCE[dtype] if tolerance is None else tolerance
    error, blind = far(out, expected), far(unsized, expected)
    assert error <= tolerance, f"off by {error:.1e} of the output, {tolerance:.0e} allowed; without sizes {blind:.1e}"
    assert blind > 5 * tolerance, "the inputs do not tell proportional attention from plain attention"


def _doubled(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_doubled, value))
    if isinstance(value, dict):
        return {name: _doubled(one) for name, one in value.items()}
    return value.double() if torch.is_tensor(value) and value.is_floating_point() else value


# --- an attention in a UNet that has nothing else ---------------------------------------------------------------------


class BasicTransformerBlock(nn.Module):
    """Its self-attention alone. told: what this is given beside its tokens."""

    def __init__(self, attention: nn.Module, told: dict[str, Any]) -> None:
        super().__init__()
        self.attn1, self.told = attention, told

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[B, N, C]``."""
        return self.attn1(x, **self.told)


class SpatialTransformer(nn.Module):
    """Its blocks alone."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.transformer_blocks = nn.ModuleList([block])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[B, C, H, W]``."""
        return self.transformer_blocks[0](x.flatten(2).mT.contiguous()).mT.unflatten(2, x.shape[2:])


class UNetOf(nn.Module):
    """A UNet of one self-attention; for the rest see `BasicTransformerBlock`."""

    def __init__(self, attention: nn.Module, **told: Any) -> None:
        super().__init__()
        self.input_blocks = nn.ModuleList([SpatialTransformer(BasicTransformerBlock(attention, told))])
        self.middle_block = nn.Identity()

    def forward(self, x: torch.Tensor, timesteps: Any = None) -> torch.Tensor:
        """``[B, C, H, W]``."""
        return self.input_blocks[0](x)


def tokens(batch: int, dtype: torch.dtype = torch.float32, count: int = SIDE**2, seed: int = 0) -> torch.Tensor:
    """``[batch, count, CHANNELS]``, random."""
    return torch.randn(batch, count, CHANNELS, generator=torch.Generator().manual_seed(seed)).to(dtype)


def run(unet: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What a `UNetOf` gives for ``tokens``, and of them."""
    with torch.no_grad():
        return unet(x.mT.unflatten(2, (SIDE, SIDE))).flatten(2).mT


def telling(module: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The attention with random weights, and with logits that tell one key from another."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in module.parameters():
            deviation = 2 * weight.shape[-1] ** -0.5 if weight.dim() > 1 else 0.1
            weight.copy_(torch.randn(weight.shape, generator=generator) * deviation)
    return module.to(dtype).requires_grad_(False).eval()


def way(
    module: nn.Module, dtype: torch.dtype = torch.float32, *, batches: tuple[int, ...] = (1, 3),
    tolerance: float | None = None, alike: bool = False, queries: bool = False, engine: ModuleType = tome_core,
    plain: nn.Module | None = None, **told: Any,
) -> str:  # fmt: skip
    """Hold an attention against repeated keys. Returns the way in which the engine told it of sizes.

    alike: one plan serves all samples. queries: they merge too. engine: which copy of it merges. plain: the module for
    the oracle, if others have put something on the one that merges. told: the other arguments of its call.
    """
    unet, found = UNetOf(module, **told), set()
    config = engine.MergeConfig(correction=False, side="qkv" if queries else "kv", ratio=0.75, use_rand=False)
    for batch in batches:
        x, plan = tokens(batch, dtype), ragged(1 if alike else batch, SIDE**2, GROUPS)
        before = copy.deepcopy(module) if plain is None else plain
        with merging_by(GROUPS, alike, engine), engine.patch(unet, config) as handle:
            out = run(unet, x)
        (level,) = handle.report().levels
        left = GROUPS if queries else SIDE**2
        assert level.calls_merged == 1 and level.tokens == ((SIDE**2, left, GROUPS),), handle.report()
        assert_repeated(before, (x,), told, out, plan, tolerance, queries)
        found |= level.sized_by.keys()
    (only,) = found
    return only


def attention(processor: Any = None, dtype: torch.dtype = torch.float32, **settings: Any) -> nn.Module:
    """A self-attention of diffusers with this processor, or with the one that diffusers chooses for it."""
    from diffusers.models.attention_processor import Attention  # which a webui's Python may lack

    module = telling(Attention(CHANNELS, **{"heads": HEADS, "dim_head": CHANNELS // HEADS, **settings}), dtype)
    if isinstance(processor, nn.Module):
        telling(processor, dtype)
    if type(processor).__name__.startswith("Fused"):  # as `fuse_qkv_projections` does
        with torch.no_grad():
            module.fuse_projections()
    if processor is not None:
        module.set_processor(processor)
    return module


def why_left_alone(module: nn.Module, batch: int = 3, config: MergeConfig = KV, **told: Any) -> str:
    """The reason why an attention is not merged, which gives the same bits then."""
    unet, x = UNetOf(module, **told), tokens(batch, next(module.parameters()).dtype)
    out = run(unet, x)
    with tome_core.patch(unet, config) as handle:
        assert torch.equal(run(unet, x), out)
    assert not handle.report().merged_anything
    (reason,) = handle.report().levels[0].reasons
    return reason


# --- xformers, which is for GPUs --------------------------------------------------------------------------------------


LASTING = SimpleNamespace(  # patches like monkeypatch's that last
    setitem=operator.setitem, setattr=lambda target, name, value, raising=True: setattr(target, name, value)
)


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
