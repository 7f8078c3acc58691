"""Which picture a call belongs to is said by a scope and never guessed, and times are of the noise, in any scheduler.

A pipeline's call is a scope; a loop of one's own has `Patch.sampling`. Without one nothing is kept over calls.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import diffusers
import pytest
import torch

import tome_core
from tests.models import on_small
from tests.threads import at_once
from tests.tiny_pipeline import stable_diffusion
from tome_core import MergeConfig, NoiseSchedule

STEPS = 20
KEPT = MergeConfig(side="kv", ratio=0.75, use_rand=False, keep=100.0, refine=1, metric="keys+values")
BALANCED = on_small("balanced")
FIRST_HALF = MergeConfig(ratio=0.5, end_percent=0.5)
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

every_scheduler = pytest.mark.parametrize("scheduler", SCHEDULERS)
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


@contextmanager
def watched(pipe: Any, config: MergeConfig) -> Iterator[tuple[Any, list[torch.Tensor], list[int], dict[str, Any]]]:
    """A patched pipeline; its handle, the maps and the counts of merged calls after each step, what its call needs."""
    with tome_core.patch(pipe, config) as handle:
        handle.keep_maps()
        seen, counts = [], []

        def look(_pipe: Any, _step: int, _time: Any, held: dict[str, Any]) -> dict[str, Any]:
            seen.append(handle.maps()[0].group if handle.maps() else None)
            counts.append(handle.report().levels[0].calls_merged)
            return held

        yield handle, seen, counts, {"steps": STEPS, "callback_on_step_end": look}


@every_scheduler
def test_an_early_phase_begins_early_and_ends_and_matches_get_old_in_any_scheduler(pipe, scheduler: str):
    pipe.scheduler = SCHEDULERS[scheduler]()
    with watched(pipe, BALANCED) as (handle, seen, _, steps):
        draw(pipe, **steps)
        keys = sorted(keys for _, _, keys in handle.report().levels[0].tokens)
    early, late = keys
    assert early < 256 * 0.1 < late < 256 * 0.2
    assert 1 < sum(not torch.equal(*pair) for pair in itertools.pairwise(seen)) < STEPS - 1
    found = [int(one.max()) + 1 for one in seen]
    assert found == sorted(found) and found[0] <= early < found[-1]


def expected_merges(scheduler: Any, relative_to: float) -> int:
    """Steps in the first half of Stable Diffusion's schedule, by the ratio of noise to signal.

    relative_to: the deviation of the data, against which that of the noise counts.
    """
    if isinstance(scheduler, diffusers.IPNDMScheduler):
        sigmas = torch.tan(scheduler.timesteps.double() * torch.pi / 2).tolist()
    else:
        sigmas = scheduler.sigmas[:STEPS].tolist()
    known = NoiseSchedule.stable_diffusion()
    return sum(known.percent_of(known.timestep_of_sigma(sigma / relative_to)) <= 0.5 for sigma in sigmas)


@every_scheduler
def test_the_first_half_is_that_of_the_noise_in_any_scheduler(pipe, scheduler: str):
    """EDM's signal has half a unit's deviation, so that there are two opinions, a step apart."""
    pipe.scheduler = SCHEDULERS[scheduler]()
    with watched(pipe, FIRST_HALF) as (handle, _, counts, steps):
        draw(pipe, **steps)
        level = handle.report().levels[0]
    assert level.calls_merged and level.calls_skipped
    merged = [after > before for before, after in zip([0, *counts[:-1]], counts, strict=True)]
    assert merged == sorted(merged, reverse=True)
    deviations = {1.0, getattr(pipe.scheduler.config, "sigma_data", 1.0)}
    expected = [expected_merges(pipe.scheduler, one) for one in deviations]
    assert min(expected) - 1 <= sum(merged) <= max(expected) + 1
