"""The attention processors of diffusers, known by their classes' names: this package imports torch alone.

Each is diffusers' `Attention` with what one processor computes in it. The processor itself is not called.
"""

from __future__ import annotations

import importlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import registry
from .known import KnownAttention, Kwargs, LeftAlone

_WHERE = "diffusers.models.attention_processor"


class _Processor(KnownAttention):
    """What all of them share: the class, and what follows attention."""

    def problem(self, module: nn.Module, kwargs: Kwargs) -> str | None:
        """What attentions outside of transformer blocks have."""
        norms = module.group_norm is not None or module.spatial_norm is not None or module.norm_cross is not None
        more = norms or module.residual_connection or module.rescale_output_factor != 1.0
        return "it norms, scales or adds its input" if more else None

    def finish(self, module: nn.Module, out: Tensor) -> Tensor:
        projection, dropout = module.to_out
        return dropout(projection(out))


class _ByTorch(_Processor):
    """``AttnProcessor2_0``: heads are normed where the module has norms, then torch's function."""

    adds_bias = True

    def queries(self, module: nn.Module, x: Tensor, kwargs: Kwargs) -> Tensor:
        return _normalize(module, module.norm_q, module.to_q(x))

    def keys_and_values(self, module: nn.Module, keys: Tensor, values: Tensor, kwargs: Kwargs) -> tuple[Tensor, Tensor]:
        return _normalize(module, module.norm_k, module.to_k(keys)), module.to_v(values)

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, kwargs: Kwargs) -> Tensor:
        batch, heads = q.shape[0], module.heads
        q, k, v = (one.view(batch, -1, heads, one.shape[-1] // heads).transpose(1, 2) for one in (q, k, v))
        mask = None if bias is None else bias[:, None]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.0, is_causal=False)
        return out.transpose(1, 2).reshape(batch, -1, heads * v.shape[-1]).to(q.dtype)


class _Fused(_ByTorch):
    """``FusedAttnProcessor2_0``: one projection makes queries, keys and values."""

    def queries(self, module: nn.Module, x: Tensor, kwargs: Kwargs) -> Tensor:
        return _normalize(module, module.norm_q, _part(module.to_qkv, x, 0))

    def keys_and_values(self, module: nn.Module, keys: Tensor, values: Tensor, kwargs: Kwargs) -> tuple[Tensor, Tensor]:
        fused = module.to_qkv
        return _normalize(module, module.norm_k, _part(fused, keys, 1)), _part(fused, values, 2)


class _Invoke(_ByTorch):
    """InvokeAI's: diffusers' own for self-attention; masks of regions and image prompts are of the prompt's."""

    def problem(self, module: nn.Module, kwargs: Kwargs) -> str | None:
        """Norms of heads are among them, which it does not apply."""
        normed = module.norm_q is not None or module.norm_k is not None
        return "its heads have norms" if normed else super().problem(module, kwargs)


class _ByScores(_Processor):
    """``AttnProcessor``: the module's own scores, then one product."""

    by_attribute = adds_bias = True

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, kwargs: Kwargs) -> Tensor:
        q, k, v = (module.head_to_batch_dim(one) for one in (q, k, v))
        if bias is not None:  # ``[B*H, 1, G]``, in the dtype that the module's scores have
            bias = (bias.float() if module.upcast_attention else bias).repeat_interleave(module.heads, 0)
        return module.batch_to_head_dim(self._weigh(module, q, k, v, bias))

    def _weigh(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        return torch.bmm(module.get_attention_scores(q, k, bias), v)


class _InSlices(_ByScores):
    """``SlicedAttnProcessor``: so many heads at once as its ``slice_size`` says."""

    def _weigh(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        step, parts = module.processor.slice_size, []
        for start in range(0, q.shape[0], step):
            piece = slice(start, start + step)
            pieces = q[piece], k[piece], v[piece], None if bias is None else bias[piece]
            parts.append(super()._weigh(module, *pieces))
        return torch.cat(parts)


class _ByXformers(_Processor):
    """``XFormersAttnProcessor``, which gives xformers the module's scale, and never a bias."""

    by_attribute = True

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, kwargs: Kwargs) -> Tensor:
        attention = importlib.import_module("xformers.ops").memory_efficient_attention
        q, k, v = (module.head_to_batch_dim(one).contiguous() for one in (q, k, v))
        out = attention(q, k, v, attn_bias=None, op=module.processor.attention_op, scale=module.scale)
        return module.batch_to_head_dim(out.to(q.dtype))


def _part(fused: nn.Module, x: Tensor, number: int) -> Tensor:
    """One third of what a projection makes: 0 is queries, 1 keys, 2 values. Cut off where something was put on it."""
    if type(fused) is not nn.Linear or "forward" in vars(fused) or fused._forward_hooks or fused._forward_pre_hooks:
        return fused(x).chunk(3, -1)[number]
    bias = None if fused.bias is None else fused.bias.chunk(3)[number]
    return F.linear(x, fused.weight.chunk(3)[number], bias)


def _normalize(module: nn.Module, norm: nn.Module | None, flat: Tensor) -> Tensor:
    """Each head, where there is a norm for it."""
    if norm is None:
        return flat
    heads = flat.unflatten(-1, (module.heads, -1)).transpose(1, 2)
    return norm(heads).transpose(1, 2).flatten(2)


_KNOWN = {"AttnProcessor": _ByScores, "AttnProcessor2_0": _ByTorch, "SlicedAttnProcessor": _InSlices,
          "XFormersAttnProcessor": _ByXformers, "FusedAttnProcessor2_0": _Fused}  # fmt: skip
# by the full name of the function that computes: a class of the same name is no proof, and a method may be replaced
_BY_CALL: dict[str, registry.Description] = {f"{_WHERE}.{name}.__call__": kind() for name, kind in _KNOWN.items()}

# of InvokeAI, in force where prompts have regions or images
_INVOKE = "invokeai.backend.stable_diffusion.diffusion.custom_atttention.CustomAttnProcessor2_0"
_BY_CALL[f"{_INVOKE}.__call__"] = _Invoke()

# perturbed-attention guidance: where tokens of the unattended part merge, what guides is a blur
for _name in ("PAGIdentitySelfAttnProcessor2_0", "PAGCFGIdentitySelfAttnProcessor2_0"):
    _BY_CALL[f"{_WHERE}.{_name}.__call__"] = LeftAlone("leaves a part of the batch unattended, token by token")

# self-attention guidance, where diffusers has it and where it had it
for _folder in ("stable_diffusion_sag", "deprecated.stable_diffusion_sag"):
    _SAG = f"diffusers.pipelines.{_folder}.pipeline_stable_diffusion_sag.CrossAttnStoreProcessor.__call__"
    _BY_CALL[_SAG] = LeftAlone("keeps a map that has to hold every token")


def _of_processor(module: nn.Module) -> registry.Description:
    kind = type(module.processor)
    call = kind.__call__
    own = getattr(call, "__qualname__", "") == f"{kind.__qualname__}.__call__"
    return _BY_CALL.get(registry.function_name(call)) if own else None


def register() -> None:
    """Describe diffusers' attention, whose processor decides."""
    registry.register(f"{_WHERE}.Attention.forward", _of_processor)
