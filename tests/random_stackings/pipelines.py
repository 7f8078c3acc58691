"""Random pictures of diffusers' pipelines: schedulers, guidance, and neighbours that need a pipeline."""

from __future__ import annotations

import contextlib
import copy
import random
from collections import Counter
from typing import Any

import diffusers
import torch

import tome_core
from benchmarks.stack_beside import BESIDE, UNET
from benchmarks.stack_pipelines import RandomPipelines
from tests import models
from tests.random_stackings.drawing import a_wish, as_text, pristine
from tests.random_stackings.sessions import Fault, Thrown, alike, drop_own_methods, first_difference
from tests.traces import traces

SCHEDULERS = ("DDIMScheduler", "EulerDiscreteScheduler", "EulerAncestralDiscreteScheduler", "HeunDiscreteScheduler",
              "DPMSolverMultistepScheduler", "DPMSolverSinglestepScheduler", "UniPCMultistepScheduler", "PNDMScheduler",
              "LCMScheduler", "KDPM2DiscreteScheduler", "DEISMultistepScheduler", "LMSDiscreteScheduler",
              "EDMEulerScheduler")  # fmt: skip
FAMILIES = ("sd15", "one head", "four levels", "lora")
NEIGHBOURS = tuple(name for name, one in BESIDE.items() if one.kind == UNET)


def hold(dice: random.Random, repeats: bool) -> Counter:
    """Some pictures of one pipeline, held to the laws; raises Fault."""
    facts = _Facts(dice)
    pictures = _drawn(facts, True)
    if repeats and not all(map(alike, pictures, _drawn(facts, True))):
        raise Fault(f"other bits when the pictures are drawn again\n{facts}")
    if any(isinstance(one, BaseException) or not one.isfinite().all() for one in pictures):
        for ours, theirs in zip(pictures, _drawn(facts, False), strict=True):
            if isinstance(ours, BaseException) and torch.is_tensor(theirs):
                raise Fault(f"raises {type(ours).__name__}: {ours}; without merging it does not\n{facts}") from ours
            if torch.is_tensor(ours) and torch.is_tensor(theirs) and theirs.isfinite().all() > ours.isfinite().all():
                raise Fault(f"numbers that are not finite\n{facts}")
    return Counter("what it raises raises without merging" if isinstance(one, BaseException) else "pipeline's picture"
                   for one in pictures)  # fmt: skip


class _Facts:
    """What is drawn beforehand."""

    def __init__(self, dice: random.Random) -> None:
        self.family = dice.choice(FAMILIES)
        self.scheduler = dice.choice(SCHEDULERS)
        one = BESIDE[dice.choice(NEIGHBOURS)] if dice.random() < 0.4 else None
        self.beside = one if one is not None and one.is_there else None
        self.ours_first = dice.random() < 0.5
        self.wishes = [wish for wish in (a_wish(dice) for _ in range(8))
                       if wish.is_right and wish.door in ("config", "keywords")][: dice.randint(1, 2)]  # fmt: skip
        self.calls = [{"num_inference_steps": dice.randint(1, 3), "guidance_scale": dice.choice((1.0, 3.0)),
                       "height": 8 * dice.choice((8, 8, 12, 16)), "width": 8 * dice.choice((8, 8, 12, 16)),
                       "num_images_per_prompt": dice.choice((1, 1, 2)), "throws": dice.random() < 0.1,
                       "seed": dice.randrange(4)} for _ in range(dice.randint(1, 3))]  # fmt: skip

    def __str__(self) -> str:
        wishes = "; ".join(as_text(one.settings) for one in self.wishes)
        return f"{self.family}, {self.scheduler}, {self.beside and self.beside.name}, ours first {self.ours_first}\n" \
            f"{wishes}\n{self.calls}"  # fmt: skip


def _drawn(facts: _Facts, merges: bool) -> list[Any]:
    """Each call's latents, or what it raised; the pipeline and its UNet are left as they were."""
    unet = copy.deepcopy(pristine(facts.family, torch.float32).model)
    kind = facts.beside.pipeline if facts.beside else "StableDiffusionPipeline"
    pipe = RandomPipelines(unet, 128).make(kind, **(facts.beside.made_with if facts.beside else {}))
    pipe.scheduler = getattr(diffusers, facts.scheduler).from_config(
        diffusers.DDIMScheduler(clip_sample=False, steps_offset=1).config)  # fmt: skip
    left, on_scheduler, state = traces(unet), set(vars(pipe.scheduler)), torch.get_rng_state()
    wishes, pictures = facts.wishes if merges else (), []
    other = facts.beside.put_on(pipe) if facts.beside else contextlib.nullcontext()
    for wish in wishes if facts.ours_first else ():
        wish.put_on(pipe)
    with other:
        for wish in () if facts.ours_first else wishes:
            wish.put_on(pipe)
        for call in facts.calls:
            try:
                pictures.append(_picture(pipe, call, facts.beside.call if facts.beside else {}))
            except Exception as error:
                pictures.append(error)
        if not facts.ours_first:
            tome_core.remove_patch(pipe)
    tome_core.remove_patch(pipe)
    drop_own_methods(unet)
    if merges and not any(isinstance(one, BaseException) for one in pictures):
        if traces(unet) != left and facts.beside is None:
            raise Fault(f"left on the model: {first_difference(left, traces(unet))}\n{facts}")
        added = {name for name in set(vars(pipe.scheduler)) - on_scheduler if callable(vars(pipe.scheduler)[name])}
        if added or any("tome" in name for name in vars(pipe)):
            raise Fault(f"left on the pipeline or its scheduler: {added}\n{facts}")
        if not torch.equal(torch.get_rng_state(), state):
            raise Fault(f"the random generator was used\n{facts}")
    return pictures


def _picture(pipe: Any, call: dict[str, Any], more: Any) -> torch.Tensor:
    call = {**call, **more}
    throws, seed = call.pop("throws"), call.pop("seed")
    words = torch.randn(2, 7, models.TEXT, generator=torch.Generator().manual_seed(seed))[:, None]

    def throw(*_: Any) -> None:
        raise Thrown

    hook = pipe.unet.conv_out.register_forward_hook(throw) if throws else None
    try:
        with torch.no_grad():
            return pipe(prompt_embeds=words[0], negative_prompt_embeds=words[1], output_type="latent",
                        generator=torch.Generator().manual_seed(seed), **call).images  # fmt: skip
    finally:
        if hook is not None:
            hook.remove()
