"""Timing of unmerged and merged calls of a UNet, in turns, for the gain over the steps of a picture.

Each kind of step, such as those with a new match, is timed several times; its median counts as often as the kind occurs
in a picture. Timed calls are no part of the user's pictures, so they may wait for the device.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import nn

from ..engine.time import Clock
from ..models.unet_blocks import BlockPlace, is_compiled
from ..models.wrap import foreign_method_on
from .pays import widths_of

_FIRST = 999.0  # the timestep of a picture's first step
_TEXT_TOKENS = 77
_TIMES = 6  # the number of SDXL's size and crop conditions

CallUNet = Callable[[torch.Tensor, torch.Tensor], Any]


def why_not_now(unet: nn.Module, places: Sequence[BlockPlace], is_called: bool, patched_object: Any) -> str:
    """Return why the UNet cannot be timed now, with a remedy; "" if it can.

    It cannot if it is in use (`is_called`), compiled, or if another program wrapped the UNet's own ``forward``.
    `places`, its blocks, and `patched_object`, what `patch` got, or None, only show whether it is compiled.
    """
    if is_called:
        return "a sampling goes on; measure before it or after it"
    if is_compiled(unet, places, patched_object):
        return "the UNet is compiled, and compiled calls are not measured; measure before compiling it"
    if foreign_method_on(unet) is not None:
        return "another program has wrapped the UNet and would take this for steps of a picture; measure before that"
    return ""


def device_and_dtype_of(unet: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Return the device of a UNet's calls, accelerate's if that moves the UNet, and its first float weight's dtype."""
    weight = next(parameter for parameter in unet.parameters() if parameter.is_floating_point())
    device = getattr(getattr(unet, "_hf_hook", None), "execution_device", None)
    return torch.device(weight.device if device is None else device), weight.dtype


def steps_of(clock: Clock, steps: int) -> list[tuple[float, Hashable]]:
    """Return a picture's steps in order as (timestep, kind), 999 / `steps` apart from timestep 999 down.

    Steps of one kind take equally long: equal rules are in force, and the match is new, renewed (if any rule renews its
    own) or kept. The kind is None if no rule is in force.
    """
    picture, before, matched = [], None, 0.0
    for number in range(steps):
        timestep = _FIRST * (1 - number / steps)
        now = clock.at(clock.moment(timestep))
        if not now.live:
            before, kind = None, None
        elif now is not before:
            before, matched, kind = now, timestep, (id(now), "new")
        elif matched - timestep > min(rule.keep for rule in now.live):
            matched, kind = timestep, (id(now), "renewed")
        else:
            kind = (id(now), "kept")
        picture.append((timestep, kind))
    return picture


def time_calls(patch: Any, call: CallUNet, latents: torch.Tensor, steps: int, rounds: int) -> tuple[float, ...]:
    """Time merged calls, each kind of step `rounds` times, between unmerged ones. Time and counts of `patch` change.

    `call` takes `latents` ``[B, C, H, W]`` and timesteps ``[B]``. A picture has `steps` steps, of which each kind is
    timed and counts as often as it occurs (see `steps_of`); a step without a rule in force counts as an unmerged call.
    Return median seconds of an unmerged call, mean seconds of a call over all steps of a picture with the patch, and
    the share of self-attention work that they save, 0 to 1; three zeros if no rule is in force at any step.
    """
    clock, pictures = clock_for(latents.device), pictures_in(len(latents))
    picture = steps_of(patch.clock, steps)
    first: dict[Hashable, float] = {}  # the first timestep of each kind in a picture
    for timestep, kind in picture:
        if kind is not None:
            first.setdefault(kind, timestep)
    seconds: dict[Hashable, list[float]] = defaultdict(list)  # by kind; None: unmerged
    saved: Counter[Hashable] = Counter()  # the saved share of work, by kind

    def time_call(kind: Hashable, timestep: float) -> None:
        timesteps = torch.full((len(latents),), timestep, device=latents.device)
        latents[0, 0, 0, 0].item()  # waits for the device
        start = clock()
        call(latents, timesteps)
        latents[0, 0, 0, 0].item()
        seconds[kind].append(clock() - start)

    def time_unmerged() -> None:
        with patch.unmerged():
            time_call(None, _FIRST)

    def time_round() -> None:
        sampling = object()
        for number, (kind, timestep) in enumerate(first.items()):
            if number % 2 == 0:
                time_unmerged()
            patch.set_time(timestep=timestep, sampling=sampling, pictures=pictures)
            full, left = patch.report().work
            time_call(kind, timestep)
            full, left = (now - before for now, before in zip(patch.report().work, (full, left), strict=True))
            saved[kind] = 1 - left / full if full else 0.0

    # a GPU selects or compiles kernels, and allocates memory, at the first call of each kind
    warm_up = time_unmerged if latents.device.type == "cpu" else time_round
    warm_up()
    seconds.clear()
    for _ in range(rounds):
        time_round()
    if not first:
        return 0.0, 0.0, 0.0
    plain, share = statistics.median(seconds[None]), Counter(kind for _, kind in picture)
    whole = sum(count * statistics.median(seconds[kind]) for kind, count in share.items())
    return plain, whole / steps, sum(count * saved[kind] for kind, count in share.items()) / steps


def clock_for(device: torch.device) -> Callable[[], float]:
    """Return the function that gives seconds: process time, the least disturbed, on one CPU thread, else real time."""
    return time.process_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter


def pictures_in(batch: int) -> int:
    """Return the number of pictures in a batch: half of an even batch, which is taken to hold each twice; else all."""
    return batch // 2 if batch % 2 == 0 else batch


def noise_for(unet: nn.Module, batch: int, height: int, width: int) -> torch.Tensor:
    """Return fixed random latents ``[batch, C, height, width]``, float32 on the CPU.

    `height` and `width` are latent cells. C are the channels that the UNet takes. An even batch is two equal halves.
    """
    channels = next(module.in_channels for module in unet.modules() if isinstance(module, nn.Conv2d))
    pictures = pictures_in(batch)
    noise = torch.randn(pictures, channels, height, width, generator=torch.Generator().manual_seed(0))
    return noise.repeat(batch // pictures, 1, 1, 1)


def call_of(unet: nn.Module, place: BlockPlace, latents: torch.Tensor) -> CallUNet:
    """Return a function of latents ``[B, C, H, W]`` and timesteps ``[B]`` that calls the UNet's forward without hooks.

    The prompt is random, other conditions are zeros. `place` is any block of the UNet, which shows the host and the
    prompt's width. All calls have batch, device and dtype of the example `latents`. Raises ValueError if the UNet needs
    other inputs.
    """
    batch, width = len(latents), widths_of(place.block)[1]
    text = torch.randn(batch, _TEXT_TOKENS, width, generator=torch.Generator().manual_seed(1)).to(latents)
    if place.family.name == "diffusers":
        more = _added_conditions(unet, latents)
        return lambda x, timesteps: unet.forward(x, timesteps, encoder_hidden_states=text, **more)
    classes = _classes(unet, latents)
    return lambda x, timesteps: unet.forward(x, timesteps, text, **classes)


def _added_conditions(unet: nn.Module, latents: torch.Tensor) -> dict[str, Any]:
    """Return a diffusers UNet's keywords: zeros for SDXL, {} if none. Raises ValueError if it needs other inputs."""
    config = unet.config
    kind = getattr(config, "addition_embed_type", None)
    needs = [name for name in ("class_embed_type", "num_class_embeds", "encoder_hid_dim_type", "time_cond_proj_dim")
             if getattr(config, name, None) is not None]  # fmt: skip
    if kind not in (None, "text_time") or "Motion" in type(unet).__name__:
        needs.append(kind or "frames")
    if needs:
        raise ValueError(f"{type(unet).__name__} needs other inputs than a prompt ({', '.join(needs)}): give measure() "
                         "a call= of latents and timesteps that calls the UNet's forward")
    if kind is None:
        return {}
    width = config.projection_class_embeddings_input_dim - _TIMES * config.addition_time_embed_dim
    text_embeds, time_ids = (latents.new_zeros(len(latents), size) for size in (width, _TIMES))
    return {"added_cond_kwargs": {"text_embeds": text_embeds, "time_ids": time_ids}}


def _classes(unet: nn.Module, latents: torch.Tensor) -> dict[str, Any]:
    """Return {"y": zeros} for an LDM UNet: vectors if ``label_emb`` has a linear layer, else class 0; {} without it."""
    embedding = getattr(unet, "label_emb", None)
    if embedding is None:
        return {}
    first = next((module for module in embedding.modules() if isinstance(module, nn.Linear)), None)
    if first is None:
        return {"y": latents.new_zeros(len(latents), dtype=torch.int64)}
    return {"y": latents.new_zeros(len(latents), first.in_features)}
