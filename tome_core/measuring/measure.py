"""Unmerged and merged calls of a UNet, timed in turns: what merging gains over the steps of a picture.

Some steps match anew, some use what is kept. So each kind of step is timed a few times, and its median counts as often
as a picture has it. Nothing is timed in anybody's sampling, so the device may be waited for, and arguments are made up
from the UNet's shape.
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
from ..models.unet_blocks import Place, is_compiled
from ..models.wrap import others_on
from .pays import widths_of

ROUNDS, STEPS = 3, 20
_FIRST = 999.0  # timestep of a picture's first step
_TEXT_TOKENS = 77
_TIMES = 6  # sizes and crops that SDXL is told

CallUNet = Callable[[torch.Tensor, torch.Tensor], Any]


def why_not_now(unet: nn.Module, places: Sequence[Place], is_called: bool, handed: Any) -> str:
    """Why the UNet's calls cannot be timed, and what to do about it; "" if they can. handed: see `patch`."""
    if is_called:
        return "a sampling goes on; measure before it or after it"
    if is_compiled(unet, places, handed):
        return "the UNet is compiled, and compiled calls are not measured; measure before compiling it"
    if others_on(unet) is not None:
        return "somebody else's wrapper lies on the UNet and would take this for steps of a picture; measure before it"
    return ""


def whereabouts(unet: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Where the UNet computes, and in what; accelerate brings one there only for its calls."""
    weight = next(one for one in unet.parameters() if one.is_floating_point())
    device = getattr(getattr(unet, "_hf_hook", None), "execution_device", None)
    return torch.device(weight.device if device is None else device), weight.dtype


def steps_of(clock: Clock, steps: int) -> list[tuple[float, Hashable]]:
    """The steps of a picture, evenly spaced, as (timestep, kind): steps of one kind take equally long.

    A kind is by which rules a step merges, and whether it matches anew for it; None where no rule holds. Where rules
    keep their matches for different times, a step at which any of them matches counts as one that does.
    """
    found, before, matched = [], None, 0.0
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
        found.append((timestep, kind))
    return found


def time_calls(
    patch: Any, call: CallUNet, latents: torch.Tensor, steps: int = STEPS, rounds: int = ROUNDS
) -> tuple[float, float, float]:
    """Seconds of an unmerged call, and of a merged one on the average of a picture's steps; saved: see `Gain`.

    patch: a `Patch` that is installed. call: of (latents ``[B, C, H, W]``, timesteps ``[B]``).
    """
    clock, pictures = clock_for(latents.device), pictures_in(len(latents))
    picture = steps_of(patch.clock, steps)
    first: dict[Hashable, float] = {}  # the timestep at which a picture has a kind first
    for timestep, kind in picture:
        if kind is not None:
            first.setdefault(kind, timestep)
    seconds: dict[Hashable, list[float]] = defaultdict(list)  # of calls of a kind; None: unmerged
    saved: Counter[Hashable] = Counter()  # by a call of a kind

    def time_call(kind: Hashable, timestep: float) -> None:
        timesteps = torch.full((len(latents),), timestep, device=latents.device)
        latents[0, 0, 0, 0].item()  # a device is waited for
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

    # kernels of a card are chosen or compiled, and its memory is taken, at the first call of each kind
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
    """On one thread of a CPU the process's own time, which another program's load costs its evenness, not its value."""
    return time.process_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter


def pictures_in(batch: int) -> int:
    """An even batch holds every picture twice, as guidance asks for a prompt and a negative one."""
    return batch // 2 if batch % 2 == 0 else batch


def noise_for(unet: nn.Module, batch: int, height: int, width: int) -> torch.Tensor:
    """Latents ``[B, C, H, W]`` of `pictures_in` the batch, from a generator of their own."""
    channels = next(one.in_channels for one in unet.modules() if isinstance(one, nn.Conv2d))
    pictures = pictures_in(batch)
    noise = torch.randn(pictures, channels, height, width, generator=torch.Generator().manual_seed(0))
    return noise.repeat(batch // pictures, 1, 1, 1)


def call_of(unet: nn.Module, place: Place, latents: torch.Tensor) -> CallUNet:
    """``(latents [B, C, H, W], timesteps [B])`` to whatever the UNet's forward makes of them.

    place: any block of it. Its forward is called, so that others' hooks are told of no step.
    Raises ValueError for a UNet that wants to be told more than prompts and sizes.
    """
    batch, width = len(latents), widths_of(place.block)[1]
    text = torch.randn(batch, _TEXT_TOKENS, width, generator=torch.Generator().manual_seed(1)).to(latents)
    if place.family.name == "diffusers":
        more = _added(unet, latents)
        return lambda x, timesteps: unet.forward(x, timesteps, encoder_hidden_states=text, **more)
    classes = _classes(unet, latents)
    return lambda x, timesteps: unet.forward(x, timesteps, text, **classes)


def _added(unet: nn.Module, latents: torch.Tensor) -> dict[str, Any]:
    """What diffusers' SDXL is told."""
    config = unet.config
    kind = getattr(config, "addition_embed_type", None)
    asks = [name for name in ("class_embed_type", "num_class_embeds", "encoder_hid_dim_type", "time_cond_proj_dim")
            if getattr(config, name, None) is not None]  # fmt: skip
    if kind not in (None, "text_time") or "Motion" in type(unet).__name__:
        asks.append(kind or "frames")
    if asks:
        raise ValueError(
            f"{type(unet).__name__} wants to be told more than a prompt ({', '.join(asks)}): give measure() a call= of "
            "latents and timesteps that calls the UNet's forward"
        )
    if kind is None:
        return {}
    width = config.projection_class_embeddings_input_dim - _TIMES * config.addition_time_embed_dim
    text_embeds, time_ids = (latents.new_zeros(len(latents), one) for one in (width, _TIMES))
    return {"added_cond_kwargs": {"text_embeds": text_embeds, "time_ids": time_ids}}


def _classes(unet: nn.Module, latents: torch.Tensor) -> dict[str, Any]:
    """SDXL's vector in its original form, or a class's number."""
    embedding = getattr(unet, "label_emb", None)
    if embedding is None:
        return {}
    first = next((one for one in embedding.modules() if isinstance(one, nn.Linear)), None)
    if first is None:
        return {"y": latents.new_zeros(len(latents), dtype=torch.int64)}
    return {"y": latents.new_zeros(len(latents), first.in_features)}
