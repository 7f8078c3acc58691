"""Where pictures come from: the embedded model or the user's own, behind one small interface.

target: what `tome_core.patch` gets; prompts: those to paint by default; prompt_row: which row of the batch of two, with
the prompt and without, has the prompt. `timesteps` lists those of a picture's steps, None if the target's patch finds
them by itself. `picture` draws uint8 [H, W, 3], the same for equal arguments, and calls `on_step` after each step.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import tome_core
from demo import model, prompt, sampler
from demo.checkpoint import Checkpoint

LONG_PROMPTS = (
    "a lighthouse on a cliff at sunset, waves below, detailed painting",
    "portrait of an old fisherman in a yellow raincoat, photo, soft light",
    "a narrow street in an old town after rain, lanterns, reflections",
    "a bowl of fruit on a wooden table, still life, morning light",
)
OnStep = Callable[[], None]


class Embedded:
    """A source with a scene model of this demo. `picture` raises ValueError for unknown words."""

    prompt_row, prompts = 0, prompt.PROMPTS

    def __init__(self, device: torch.device, path: Path = model.WEIGHTS):
        self.name, self.device = "embedded model" if path == model.WEIGHTS else path.name, device
        self.model = model.load(path).to(device)
        self.target = self.model.network

    def timesteps(self, steps: int) -> list[float]:
        """Return the timesteps of a picture's steps in the model's noise schedule, noisiest first: whole numbers."""
        return sampler.solver(self.model, steps).timesteps.tolist()

    def picture(self, text: str, seed: int, steps: int, on_step: OnStep):
        """Draw a picture, uint8 array [H, W, 3]; call ``on_step()`` after each step. ValueError for unknown words."""
        tokens = prompt.tokens(text)
        return sampler.sample(self.model, tokens, seed, steps=steps, on_step=on_step)


class UserPipeline:
    """A source with a diffusers pipeline of a user's files, float16, on a CPU float32. ValueError if loading fails."""

    prompt_row, prompts = -1, LONG_PROMPTS

    def __init__(self, checkpoint: Checkpoint, config: Path | None, device: torch.device):
        self.name, self.device = checkpoint.path.name, device
        dtype = torch.float32 if device.type == "cpu" else torch.float16
        try:
            self.target = _load(checkpoint, config).to(device, dtype)
        except Exception as error:  # the loaders of two libraries raise whatever their depths raise
            hint = "" if config or checkpoint.kind == "folder" else (
                "; a single file brings no configuration and no tokenizer, which are looked up online where nothing is "
                "cached: to do without, give --config DIR, a diffusers folder of the same family (without weights)")
            reason = next(iter(str(error).strip().splitlines()), "no reason given")
            raise ValueError(
                f"{checkpoint.path} could not be loaded: {type(error).__name__}: {reason}{hint}") from error
        self.target.set_progress_bar_config(disable=True)

    def timesteps(self, steps: int) -> None:
        """Return None: the patch of a pipeline reads its timesteps from the scheduler."""
        return None  # a patched pipeline follows its own scheduler

    def picture(self, text: str, seed: int, steps: int, on_step: OnStep):
        """Draw one picture, a numpy array, uint8 [H, W, 3]; call ``on_step()`` after each step."""

        def after_step(pipe, step, timestep, tensors):
            on_step()
            return tensors

        generator = torch.Generator().manual_seed(seed)
        result = self.target(text, num_inference_steps=steps, generator=generator, output_type="np",
                           callback_on_step_end=after_step)
        return (result.images[0] * 255).round().astype(np.uint8)


def _load(checkpoint: Checkpoint, config: Path | None):
    """Return a checkpoint's diffusers pipeline. A folder is never downloaded. config: a single file's diffusers folder.

    Without that, configuration and tokenizer (a few MB) come from diffusers' cache or a download; weights never do.
    """
    import diffusers

    if checkpoint.kind != "folder":
        family = {"sdxl": diffusers.StableDiffusionXLPipeline, "sd": diffusers.StableDiffusionPipeline}[checkpoint.kind]
        return family.from_single_file(
            str(checkpoint.path), config=config and str(config), local_files_only=bool(config))

    def load(kind: type):
        return kind.from_pretrained(
            checkpoint.path, local_files_only=True, use_safetensors=True, variant=checkpoint.variant)

    try:
        return load(diffusers.AutoPipelineForText2Image)
    except ValueError:  # a text-to-image class that the table of AutoPipeline does not list
        return load(diffusers.DiffusionPipeline)


Source = Embedded | UserPipeline


def tell_times(source: Source, steps: int, merging: tome_core.Patch, on_step: OnStep) -> OnStep:
    """Tell the patch `merging` a picture's first timestep; return the callback for after each of the picture's steps.

    The callback tells the next timestep and calls `on_step`. Nothing is told if the source has no timesteps.
    """
    times, sampling = iter(source.timesteps(steps) or ()), object()

    def tell() -> None:
        if (timestep := next(times, None)) is not None:
            merging.set_time(timestep=timestep, sampling=sampling)

    def stepped() -> None:
        tell()
        on_step()

    tell()
    return stepped
