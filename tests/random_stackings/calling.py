"""How a UNet is called: as users and hosts do, under torch's transforms, with gradients, by keywords they may give."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from tests.models import TEXT, ModelCase, inputs
from tests.random_stackings.drawing import Call
from tome_core.models.unet_blocks import find_unet


def keywords(kind: str, call: Call, dtype: torch.dtype) -> dict[str, Any]:
    """What some callers give beside the latent, the time and the text."""
    batch, tokens = call.batch, call.height * call.width
    residual = torch.ones(batch, 64, (call.height + 1) // 2, (call.width + 1) // 2, dtype=dtype)
    return {
        "": {},
        "encoder mask": {"encoder_attention_mask": torch.arange(7).expand(batch, -1) < 5},
        "attention mask": {"attention_mask": torch.arange(tokens).expand(batch, -1) < max(1, tokens - 2)},
        "scale": {"cross_attention_kwargs": {"scale": 0.5}},
        "class labels": {"class_labels": torch.zeros(batch, TEXT, dtype=dtype)},
        "residuals": {"mid_block_additional_residual": residual},
    }[kind]


def made(
    case: ModelCase, model: nn.Module, dtype: torch.dtype, call: Call, target: Callable[..., Any] | None = None
) -> torch.Tensor:
    """The picture. target: what is called in the UNet's place, a compiled one."""
    unet = find_unet(model)
    x, text = (one.to(dtype) for one in inputs(case.in_channels, call.batch, call.height, call.width, call.seed,
                                               case.frames))  # fmt: skip
    more = keywords(call.more, call, dtype)

    def run(*args: Any, **kwargs: Any) -> Any:
        return (target or unet)(*args, **kwargs, **more)

    if call.mode == "vmap":
        with torch.no_grad():
            def alone(latent: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
                time = call.timestep
                first = time[:1] if torch.is_tensor(time) and time.dim() else time
                return case.call(run, latent[None], first, words[None])[0]

            return torch.func.vmap(alone)(x, text)
    if call.mode == "functional":
        weights = {name: one.detach() for name, one in unet.named_parameters()}

        def target(*args: Any, **kwargs: Any) -> Any:
            return torch.func.functional_call(unet, weights, args, kwargs)
    if call.mode in ("grad", "checkpoint"):
        return _with_gradients(case, unet, call, run, x, text)
    around = torch.autocast("cpu", torch.bfloat16) if call.mode == "autocast" else nullcontext()
    with torch.inference_mode() if call.mode == "inference" else torch.no_grad(), around:
        return case.call(run, x, call.timestep, text)


def _with_gradients(
    case: ModelCase, unet: nn.Module, call: Call, run: Callable[..., Any], x: torch.Tensor, text: torch.Tensor
) -> torch.Tensor:
    """The picture and the latent's gradient in one tensor, where both are of one size."""
    checkpoints = call.mode == "checkpoint" and hasattr(unet, "enable_gradient_checkpointing")
    if checkpoints:
        unet.enable_gradient_checkpointing()
        unet.train()
    try:
        x.requires_grad_()
        out = case.call(run, x, call.timestep, text)
        (found,) = torch.autograd.grad(out.float().square().sum(), x)
        if out.dtype == torch.float16:  # whose gradients overflow without a scaler
            return out.detach()
        return torch.cat([out.detach(), found[:, : out.shape[1]].detach().to(out.dtype)])
    finally:
        if checkpoints:
            unet.disable_gradient_checkpointing()
            unet.eval()
