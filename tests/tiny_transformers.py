"""Tiny transformers of diffusers' real classes with random weights, and how each is called.

By the names of their classes, because an older diffusers lacks some of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import diffusers
import torch
from torch import nn

HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
# settings that merge as hard as a preset's early steps
STRONG = {"ratio": 15 / 16, "side": "kv", "metric": "keys+values", "sx": 4, "sy": 4, "use_rand": False}
WORDS, SIDE = 20, 32  # text tokens; tokens along a picture's side
Arguments = dict[str, Any]


class Tiny(NamedTuple):
    """kind: the transformer's class; settings: what it is made with; arguments: makes those of a call."""

    kind: str
    settings: dict[str, Any]
    arguments: Callable[[], Arguments]


def _text(batch: int = 1) -> torch.Tensor:
    return torch.randn(batch, WORDS, 32)


def _mask(seen: int = WORDS) -> torch.Tensor:
    return (torch.arange(WORDS) < seen).long()[None]


def flux_ids(height: int, width: int) -> torch.Tensor:
    """As its pipeline makes them, ``[height * width, 3]``."""
    grid = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack([torch.zeros(height, width), *grid], -1).flatten(0, 1).float()


def _flux(batch: int = 1, reference: bool = False) -> Arguments:
    ids = flux_ids(SIDE, SIDE)
    if reference:
        more = flux_ids(8, 8)
        more[:, 0] = 1
        ids = torch.cat([ids, more])
    return {
        "hidden_states": torch.randn(batch, len(ids), 16), "encoder_hidden_states": _text(batch),
        "pooled_projections": torch.randn(batch, 32), "timestep": torch.full((batch,), 0.5),
        "img_ids": ids, "txt_ids": torch.zeros(WORDS, 3),
    }  # fmt: skip


def _qwen(seen: int = WORDS) -> Arguments:
    return {
        "hidden_states": torch.randn(1, SIDE * SIDE, 16), "encoder_hidden_states": _text(),
        "encoder_hidden_states_mask": _mask(seen), "timestep": torch.tensor([0.5]), "img_shapes": [[(1, SIDE, SIDE)]],
    }  # fmt: skip


_FLUX = Tiny("FluxTransformer2DModel", {
    "patch_size": 1, "in_channels": 16, "num_layers": 1, "num_single_layers": 2, "joint_attention_dim": 32,
    "pooled_projection_dim": 32, "axes_dims_rope": [4, 4, 8], **HEADS,
}, _flux)  # fmt: skip
_QWEN = Tiny("QwenImageTransformer2DModel", {
    "patch_size": 2, "in_channels": 16, "out_channels": 4, "num_layers": 2, "joint_attention_dim": 32,
    "axes_dims_rope": (4, 4, 8), **HEADS,
}, _qwen)  # fmt: skip
MODELS = {
    "Flux": _FLUX,
    "Flux, two pictures": _FLUX._replace(arguments=partial(_flux, batch=2)),
    "Flux, a reference": _FLUX._replace(arguments=partial(_flux, reference=True)),
    "SD3.5": Tiny("SD3Transformer2DModel", {
        "sample_size": 64, "patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 2,
        "joint_attention_dim": 32, "caption_projection_dim": 32, "pooled_projection_dim": 32, "pos_embed_max_size": 64,
        "dual_attention_layers": (0,), "qk_norm": "rms_norm", **HEADS,
    }, lambda: {
        "hidden_states": torch.randn(2, 4, 64, 64), "encoder_hidden_states": _text(2),
        "pooled_projections": torch.randn(2, 32), "timestep": torch.tensor([500.0, 500.0]),
    }),
    "Qwen-Image": _QWEN,
    "Qwen-Image, padded": _QWEN._replace(arguments=partial(_qwen, 15)),
    "Wan": Tiny("WanTransformer3DModel", {
        "patch_size": (1, 2, 2), "in_channels": 4, "out_channels": 4, "text_dim": 32, "freq_dim": 32, "ffn_dim": 64,
        "num_layers": 2, "rope_max_seq_len": 64, **HEADS,
    }, lambda: {
        "hidden_states": torch.randn(1, 4, 3, 32, 32), "encoder_hidden_states": _text(),
        "timestep": torch.tensor([500.0]),
    }),
    "Z-Image": Tiny("ZImageTransformer2DModel", {
        "all_patch_size": (2,), "all_f_patch_size": (1,), "in_channels": 4, "dim": 32, "n_layers": 2,
        "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2, "cap_feat_dim": 32, "axes_dims": [4, 4, 8],
        "axes_lens": [256, 64, 64],
    }, lambda: {"x": [torch.randn(4, 1, 64, 64)], "t": torch.tensor([0.5]), "cap_feats": [_text()[0]]}),
    "Lumina 2": Tiny("Lumina2Transformer2DModel", {
        "sample_size": 64, "patch_size": 2, "in_channels": 4, "hidden_size": 48, "num_layers": 2,
        "num_refiner_layers": 1, "num_attention_heads": 3, "num_kv_heads": 1, "multiple_of": 16,
        "axes_dim_rope": (4, 4, 8), "axes_lens": (128, 64, 64), "cap_feat_dim": 32,
    }, lambda: {
        "hidden_states": torch.randn(1, 4, 64, 64), "timestep": torch.tensor([0.5]), "encoder_hidden_states": _text(),
        "encoder_attention_mask": _mask().bool(),
    }),
    "HunyuanVideo": Tiny("HunyuanVideoTransformer3DModel", {
        "in_channels": 4, "out_channels": 4, "num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 1,
        "patch_size": 2, "patch_size_t": 1, "text_embed_dim": 32, "pooled_projection_dim": 32,
        "rope_axes_dim": (4, 4, 8), "guidance_embeds": True, **HEADS,
    }, lambda: {
        "hidden_states": torch.randn(1, 4, 3, 32, 32), "timestep": torch.tensor([500]),
        "encoder_hidden_states": _text(), "encoder_attention_mask": _mask(15),
        "pooled_projections": torch.randn(1, 32), "guidance": torch.tensor([1000.0]),
    }),
    "LTX": Tiny("LTXVideoTransformer3DModel", {
        "in_channels": 4, "out_channels": 4, "cross_attention_dim": 32, "num_layers": 2, "caption_channels": 32,
        **HEADS,
    }, lambda: {
        "hidden_states": torch.randn(1, 3 * 16 * 16, 4), "encoder_hidden_states": _text(),
        "timestep": torch.tensor([500]), "encoder_attention_mask": torch.ones(1, WORDS), "num_frames": 3, "height": 16,
        "width": 16,
    }),
    "PixArt": Tiny("PixArtTransformer2DModel", {
        "in_channels": 4, "out_channels": 8, "num_layers": 2, "cross_attention_dim": 32, "sample_size": 64,
        "patch_size": 2, "caption_channels": 32, "norm_num_groups": 1, **HEADS,
    }, lambda: {
        "hidden_states": torch.randn(2, 4, 64, 64), "encoder_hidden_states": _text(2),
        "timestep": torch.tensor([500, 500]), "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }),
}  # fmt: skip
PRESENT = [name for name, one in MODELS.items() if hasattr(diffusers, one.kind)]


def make(name: str) -> tuple[nn.Module, Arguments]:
    """The model, ready for inference, and the arguments of a call."""
    kind, settings, given = MODELS[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, arguments = getattr(diffusers, kind)(**settings), given()
        with torch.no_grad():
            for one in model.parameters():  # some start as zeros, behind which nothing of an attention would show
                if not one.any():
                    one.normal_(std=0.1)
    return model.eval(), arguments


def build(name: str) -> nn.Module:
    """The model alone."""
    return make(name)[0]


@cache
def arguments_of(name: str) -> Arguments:
    """Those of a call. Do not write into them."""
    return make(name)[1]


@torch.no_grad()
def call(model: nn.Module, arguments: Arguments) -> torch.Tensor:
    """What the model gives, as one tensor."""
    out = model(**arguments, return_dict=False)[0]
    return out if torch.is_tensor(out) else torch.stack(list(out))


def call_at(name: str, model: nn.Module, timestep: float = 500) -> torch.Tensor:
    """The same at a time of Stable Diffusion's schedule."""
    return call(model, at(arguments_of(name), timestep / 500))


def at(arguments: Arguments, share: float) -> Arguments:
    """The same call at this share of its time."""
    return {key: one * share if key in ("timestep", "t") else one for key, one in arguments.items()}


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Of the other's size."""
    return float((one - other).norm() / other.norm())
