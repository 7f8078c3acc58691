"""Which picture a call belongs to is told by a sampling, not guessed, and times are of the noise in any scheduler.

A pipeline's call is a scope; a loop of one's own has `Patch.sampling`. Without one nothing is kept over calls.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import diffusers
import pytest
import torch

import tome_core
from tests.models import on_small
from tests.samplings import KEPT
from tests.threads import at_once
from tests.tiny_pipeline import stable_diffusion
from tome_core import MergeConfig

STEPS = 20
BALANCED = on_small("balanced")
# of which no timestep is one of Stable Diffusion's
SCHEDULERS: dict[str, Callable[[], Any]] = {
    "EDM Euler": lambda: diffusers.EDMEulerScheduler(),
    "EDM DPM-Solver": lambda: diffusers.EDMDPMSolverMultistepScheduler(),
    "IPNDM": lambda: diffusers.IPNDMScheduler(),
    "continuous Euler": lambda: diffusers.EulerDiscreteScheduler(
        timestep_type="continuous", prediction_type="v_prediction", sigma_min=0.002, sigma_max=120.0,
        beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012,
    ),
}

configs = pytest.mark.parametrize("config", [KEPT, BALANCED], ids=["kept", "balanced"])


@pytest.fixture
def pipe(words) -> Any:
    made = stable_diffusion(words)
    made.set_progress_bar_config(disable=True)
    return made


def latent(seed: int = 0) -> torch.Tensor:
    return torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(seed))


def text() -> torch.Tensor:
    return torch.randn(1, 7, 32, generator=torch.Generator().manual_seed(7))


def call(pipe: Any, timestep: Any, seed: int = 0, x: torch.Tensor | None = None) -> torch.Tensor:
    """One step of one's own loop, as far as the UNet is asked."""
    x = pipe.scheduler.scale_model_input(latent(seed) if x is None else x, timestep)
    with torch.no_grad():
        return pipe.unet(x, timestep, encoder_hidden_states=text()).sample


def own_loop(pipe: Any, seed: int = 0, steps: int = 6) -> torch.Tensor:
    """A whole picture, as every tutorial writes it."""
    pipe.scheduler.set_timesteps(steps)
    x = latent(seed) * pipe.scheduler.init_noise_sigma
    for timestep in pipe.scheduler.timesteps:
        x = pipe.scheduler.step(call(pipe, timestep, x=x), timestep, x).prev_sample
    return x


def draw(pipe: Any, seed: int = 0, steps: int = 6, **more: Any) -> torch.Tensor:
    """The same by the pipeline."""
    return pipe(prompt_embeds=text(), latents=latent(seed), num_inference_steps=steps, guidance_scale=1.0,
                height=32, width=32, output_type="latent", **more).images  # fmt: skip


# --- no scope, nothing kept ------------------------------------------------------------------------------------------


@configs
@pytest.mark.parametrize("make", [lambda steps, place: steps[place], lambda steps, place: steps[place].clone(),
    lambda steps, place: steps[place].item()], ids=["an element", "a tensor", "a number"])  # fmt: skip
def test_a_call_gives_the_same_bits_whatever_was_called_before(pipe, make, config: MergeConfig):
    """However late in the schedule it is: an image-to-image of little strength begins anywhere."""
    pipe.scheduler.set_timesteps(STEPS)
    steps = pipe.scheduler.timesteps
    with tome_core.patch(pipe, config):
        fresh = call(pipe, make(steps, 11), seed=2)
    with tome_core.patch(pipe, config):
        for place in (10, 12, 11):
            call(pipe, make(steps, place), seed=place)
            assert torch.equal(call(pipe, make(steps, 11), seed=2), fresh), place


# --- one's own scope -------------------------------------------------------------------------------------------------


@configs
def test_a_loop_in_a_scope_is_the_pipelines_picture(pipe, config: MergeConfig):
    assert torch.equal(own_loop(pipe), draw(pipe))
    with tome_core.patch(pipe, config) as handle:
        expected = draw(pipe)
        with handle.sampling():
            assert torch.equal(own_loop(pipe), expected)


def test_two_threads_draw_in_scopes_of_their_own(pipe):
    """In turns, a step of the one between two of the other; a match of the first step would serve the second."""
    pipe.scheduler.set_timesteps(STEPS)
    turns = [threading.Event() for _ in range(5)]
    turns[0].set()

    def picture(handle: Any, first: int) -> list[torch.Tensor]:
        found = []
        with handle.sampling():
            for turn, timestep in ((first, pipe.scheduler.timesteps[10]), (first + 2, pipe.scheduler.timesteps[11])):
                assert turns[turn].wait(60)  # only where the other has failed
                found.append(call(pipe, timestep, first + 10 * turn))
                turns[turn + 1].set()
        return found

    with tome_core.patch(pipe, KEPT) as handle:
        both = at_once(*(partial(picture, handle, first) for first in (0, 1)))
    for first, found in enumerate(both):
        with tome_core.patch(pipe, KEPT) as handle:
            assert all(map(torch.equal, found, picture(handle, first)))


# --- a pipeline's call is a scope ------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_an_early_phase_begins_early_and_ends_and_matches_get_old_in_any_scheduler(pipe, scheduler: str):
    pipe.scheduler, seen = SCHEDULERS[scheduler](), []
    with tome_core.patch(pipe, BALANCED) as handle:
        handle.keep_maps()

        def look(_pipe: Any, _step: int, _time: Any, held: dict[str, Any]) -> dict[str, Any]:
            seen.append(handle.maps()[0].group)
            return held

        draw(pipe, steps=STEPS, callback_on_step_end=look)
        keys = sorted(keys for _, _, keys in handle.report().levels[0].tokens)
    early, late = keys
    assert early < 256 * 0.1 < late < 256 * 0.2
    assert 1 < sum(not torch.equal(*pair) for pair in itertools.pairwise(seen)) < STEPS - 1
    found = [int(one.max()) + 1 for one in seen]
    assert found == sorted(found) and found[0] <= early < found[-1]
