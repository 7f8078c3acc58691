"""The law of a merged attention: merged keys give what the unpatched module, in float64 and without any code of the
engine, gives if each token's projected key and value are exchanged for the means of its group."""

import contextlib
import copy
import importlib
import re
import sys
from collections.abc import Iterator
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map_only

import tome_core
from tests.small_models.sd_block import SpatialTransformer, UNet
from tome_core import MergeConfig, MergePlan

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# shares of the output's length: the logarithms of sizes are float32 at best, in half precision off by half a last bit
TOLERANCE = {torch.float64: 5e-7, torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
# the tested attentions: their width and heads, the side of a square of tokens, and the number of merged keys
CHANNELS, HEADS, SIDE, GROUPS = 32, 4, 8, 13
KV = MergeConfig(correction=False, side="kv", ratio=0.75, use_rand=False, max_downsample=8)


def ragged(batch: int, tokens: int, groups: int, seed: int = 0) -> MergePlan:
    """A plan with ragged sizes and empty groups: of three or more the last, and in every second sample the first."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for sample in range(batch):
        first, last = (sample % 2, groups - 1) if groups >= 3 else (0, groups)
        drawn = torch.rand(tokens, generator=generator) ** (2 + sample % 3)  # most tokens are in few groups
        rows.append(first + (drawn * (last - first)).long())
    return MergePlan(torch.stack(rows), groups)


@contextlib.contextmanager
def merging_by(alike: bool = False, engine: ModuleType = tome_core) -> Iterator[None]:
    """In this context every match of this copy of the engine is `ragged`. alike: the same in all samples."""
    methods = importlib.import_module(f"{engine.__name__}.merging.methods").METHODS

    def match(x: torch.Tensor, grid: Any, options: Any) -> Any:
        plan = ragged(1 if alike else x.shape[0], grid.height * grid.width, GROUPS)
        return engine.MergePlan(plan.group, GROUPS)

    with mock.patch.dict(methods, bipartite=methods["bipartite"]._replace(match=match)):
        yield


def means(x: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """Exchange each token of ``[B, N, ...]`` for the mean of its group, ``[B or 1, N]``."""
    share = F.one_hot(group).to(x)
    return (share @ (share.mT @ x.flatten(2) / share.sum(1).clamp(min=1)[..., None])).view(x.shape)


@contextlib.contextmanager
def grouped(module: nn.Module, plan: MergePlan, roles: str) -> Iterator[None]:
    """Inside, an attention's projections of these roles, also its processor's, give each token its group's mean."""

    def exchange(name: str, layer: nn.Module, args: tuple, out: torch.Tensor) -> torch.Tensor:
        letters = name.split("_")[1]  # "qkv", if they are fused
        parts = zip(letters, out.chunk(len(letters), -1), strict=True)
        return torch.cat([means(part, plan.group) if role in roles else part for role, part in parts], -1)

    with contextlib.ExitStack() as hooks:
        for path, layer in module.named_modules():
            if re.match(r"to_(q|k|v|qkv)(_|$)", name := path.rpartition(".")[2]):
                hooks.enter_context(layer.register_forward_hook(partial(exchange, name)))
        yield


def far(out: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest distance of a sample from the expected output, as a share of that output's length."""
    assert out.shape == expected.shape and torch.isfinite(out).all()
    difference = (out.double() - expected.double()).flatten(1).norm(dim=1)
    return (difference / expected.double().flatten(1).norm(dim=1)).max().item()


def assert_repeated(module: nn.Module, args: tuple, kwargs: dict[str, Any], out: torch.Tensor, plan: MergePlan,
                    tolerance: float | None = None, roles: str = "kv") -> None:  # fmt: skip
    """Assert that the unpatched module, in float64, gives this with repeated keys. args[0]: tokens ``[B, N, C]``."""
    tolerance = tolerance or TOLERANCE[args[0].dtype]
    exact = copy.deepcopy(module).double()  # a module that casts by itself (``upcast_attention``) still casts
    args, kwargs = tree_map_only(torch.Tensor, lambda it: it.double() if it.is_floating_point() else it, (args, kwargs))
    with torch.no_grad(), grouped(exact, plan, roles):
        error = far(out, exact(*args, **kwargs))
    assert error <= tolerance, f"off by {error:.1e} of the output, {tolerance:.0e} allowed"


class BasicTransformerBlock(nn.Module):
    """A block with self-attention alone. kwargs: the attention's further arguments."""

    def __init__(self, attention: nn.Module, kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.attn1, self.kwargs = attention, kwargs

    def forward(self, x: torch.Tensor, context: None = None) -> torch.Tensor:
        return self.attn1(x, **self.kwargs)


class UNetOf(UNet):
    """A UNet of one self-attention. kwargs: the attention's further arguments."""

    def __init__(self, attention: nn.Module, **kwargs: Any) -> None:
        transformer = SpatialTransformer(depth=0)
        transformer.transformer_blocks.append(BasicTransformerBlock(attention, kwargs))
        super().__init__([[transformer]])


def tokens(batch: int, dtype: torch.dtype = torch.float32, count: int = SIDE**2, seed: int = 0) -> torch.Tensor:
    return torch.randn(batch, count, CHANNELS, generator=torch.Generator().manual_seed(seed)).to(dtype)


def run(unet: nn.Module, x: torch.Tensor) -> torch.Tensor:
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


def way(module: nn.Module, dtype: torch.dtype = torch.float32, *, batch: int = 3, tolerance: float | None = None,
        alike: bool = False, queries: bool = False, engine: ModuleType = tome_core,
        settings: dict[str, Any] | None = None, **kwargs: Any) -> str:  # fmt: skip
    """Compare an attention with repeated keys; return how it got the sizes. alike: one plan serves all samples."""
    unet, before, x = UNetOf(module, **kwargs), copy.deepcopy(module), tokens(batch, dtype)
    config = {"correction": False, "side": "qkv" if queries else "kv", "ratio": 0.75, "use_rand": False}
    with merging_by(alike, engine), engine.patch(unet, **config, **(settings or {})) as handle:
        out = run(unet, x)
    (level,) = handle.report().levels
    left = GROUPS if queries else SIDE**2
    assert level.calls_merged == 1 and level.tokens == ((SIDE**2, left, GROUPS),), handle.report()
    plan = ragged(1 if alike else batch, SIDE**2, GROUPS)
    assert_repeated(before, (x,), kwargs, out, plan, tolerance, config["side"])
    (only,) = level.sized_by
    return only


def attention(processor: Any = None, dtype: torch.dtype = torch.float32, **settings: Any) -> nn.Module:
    """A self-attention of diffusers with this processor, or with the processor that diffusers chooses."""
    from diffusers.models.attention_processor import Attention  # a webui's Python may lack it

    module = telling(Attention(CHANNELS, **{"heads": HEADS, "dim_head": CHANNELS // HEADS, **settings}), dtype)
    if isinstance(processor, nn.Module):
        telling(processor, dtype)
    if type(processor).__name__.startswith("Fused"):  # as `fuse_qkv_projections` does
        module.fuse_projections()
    if processor is not None:
        module.set_processor(processor)
    return module


def why_left_alone(module: nn.Module, batch: int = 3, config: MergeConfig = KV, **kwargs: Any) -> str:
    """The reason why an attention is left alone; its output keeps every bit."""
    unet, x = UNetOf(module, **kwargs), tokens(batch, next(module.parameters()).dtype)
    out = run(unet, x)
    with tome_core.patch(unet, config) as handle:
        assert torch.equal(run(unet, x), out)
    assert not handle.report().merged_anything
    (reason,) = handle.report().levels[0].reasons
    return reason


# xformers, which is for GPUs
def memory_efficient_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_bias: Any = None,
                               p: float = 0.0, scale: float | None = None, *,
                               op: Any = None) -> torch.Tensor:  # fmt: skip
    """A double of xformers' function, for ``[B, N, d]`` or ``[B, N, H, d]``, equally strict with a bias."""
    assert query.dtype == key.dtype == value.dtype
    by_head = [tensor[:, None] if query.dim() == 3 else tensor.transpose(1, 2) for tensor in (query, key, value)]
    if attn_bias is not None:
        full = (*query.shape[:2], key.shape[1]) if query.dim() == 3 else (*by_head[0].shape[:3], key.shape[1])
        if not torch.is_tensor(attn_bias):  # a description, such as LowerTriangularMask
            attn_bias = attn_bias.materialize(full, query.dtype)
        assert attn_bias.dtype == query.dtype, "xformers takes a bias in the dtype of the queries"
        assert tuple(attn_bias.shape) == full, "xformers broadcasts no bias"
        attn_bias = attn_bias.view(*by_head[0].shape[:3], -1)
    out = torch._C._nn.scaled_dot_product_attention(*by_head, attn_bias, scale=scale)
    return out[:, 0] if query.dim() == 3 else out.transpose(1, 2)


def with_xformers(monkeypatch: Any, *modules: ModuleType) -> None:
    """Pretend to these modules, which looked for xformers at their import, that it is installed."""
    ops, package = ModuleType("xformers.ops"), ModuleType("xformers")
    ops.memory_efficient_attention, ops.AttentionOpBase = memory_efficient_attention, SimpleNamespace
    package.ops, package.__version__ = ops, "0.0.30"
    monkeypatch.setitem(sys.modules, "xformers", package)
    monkeypatch.setitem(sys.modules, "xformers.ops", ops)
    for module in modules:
        monkeypatch.setattr(module, "xformers", package, raising=False)
