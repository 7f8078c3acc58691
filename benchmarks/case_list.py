"""The cases people have, as rows: how a picture is made, and at which strengths merging is put beside it."""

from __future__ import annotations

from dataclasses import dataclass

from demo.sampler import GUIDANCE


@dataclass(frozen=True)
class Case:
    """One way of making pictures.

    solver: of `case_pictures.SOLVERS`. steps: of the whole noise schedule, of which `denoise` below 1 runs the last,
    beginning with a scene, as img2img does; at `scale` times the model's own size with a scene of that size enlarged,
    as a hires pass does. inpaint: the left half of the scene stays as it is. tiled: each step in four that overlap.
    """

    name: str
    steps: int
    solver: str = "DPM++ 2M"
    guidance: float = GUIDANCE
    denoise: float = 1.0
    scale: int = 1
    batch: int = 1
    inpaint: bool = False
    tiled: bool = False

    @property
    def begins_with_a_scene(self) -> bool:
        return self.denoise < 1


_CASES = (
    Case("20 steps", 20),
    Case("8 steps", 8),
    Case("4 steps", 4),
    Case("1 step", 1),
    Case("Turbo's shape, 1 step", 1, "ancestral", guidance=1),
    Case("Lightning's shape, 4 steps", 4, "Euler", guidance=1),
    Case("Lightning's shape, 8 steps", 8, "Euler", guidance=1),
    Case("LCM's shape, 4 steps", 4, "LCM", guidance=1),
    Case("LCM's shape, 8 steps", 8, "LCM", guidance=1),
    Case("Hyper's shape, 1 step", 1, "Hyper", guidance=1),
    Case("ancestral, 10 steps", 10, "ancestral"),
    Case("SDE, 10 steps", 10, "SDE"),
    Case("Karras, 10 steps", 10, "Karras"),
    Case("exponential, 10 steps", 10, "exponential"),
    Case("AYS, 10 steps", 10, "AYS"),
    Case("EDM, 10 steps", 10, "EDM"),
    Case("CFG 1, 10 steps", 10, guidance=1),
    Case("img2img at .3 of 20", 20, denoise=0.3),
    Case("img2img at .5 of 20", 20, denoise=0.5),
    Case("img2img at .6 of 20", 20, denoise=0.6),
    Case("inpainting at .8 of 10", 10, denoise=0.8, inpaint=True),
    Case("batch of 4, 4 steps", 4, batch=4),
    Case("batch of 8, 4 steps", 4, batch=8),
    Case("hires at .5 of 10", 10, denoise=0.5, scale=2),
    Case("hires at .3 of 10", 10, denoise=0.3, scale=2),
    Case("hires at .6 of 10", 10, denoise=0.6, scale=2),
    Case("tiled upscale at .5 of 10", 10, denoise=0.5, scale=2, tiled=True),
)
CASES = {case.name: case for case in _CASES}
