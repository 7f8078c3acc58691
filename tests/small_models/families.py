"""Every family of models as cases of a test, and the difference of two pictures."""

from typing import Any

import pytest
import torch

from tests.small_models.dits import PRESENT, Transformer
from tests.small_models.unets import CASES

UNETS = {family.name: family for family in CASES}
MODELS = UNETS | {name: Transformer(name) for name in PRESENT}
_OF_ITS_OWN = ("ldm_sd1", "sgm_double", "sd15", "sdxl", "gligen", "motion")
_QUICK = (*_OF_ITS_OWN, "Flux", "SD3.5", "Z-Image", "Wan")
_ANY = ("ldm_sd1", "sd15", "Flux")


def _each(models: Any, quick: Any) -> pytest.MarkDecorator:
    """Parametrize a test with these models; all but the quick ones are slow."""
    cases = [pytest.param(family, marks=[pytest.mark.slow] * (family.name not in quick)) for family in models]
    return pytest.mark.parametrize("family", cases, ids=lambda family: family.name)


# one model of each wiring is quick; models that differ only in weights or arguments are slow
every_unet, every_model = _each(CASES, _QUICK), _each(MODELS.values(), _QUICK)
# for a law of what all wirings share: quick are attention by hand, by a function, and a transformer
any_unet, any_model = _each(CASES, _ANY), _each(MODELS.values(), _ANY)


def some_models(*names: str) -> pytest.MarkDecorator:
    """Parametrize a test with these models, if this diffusers has them; the first of either kind is quick."""
    known = [name for name in names if name in MODELS]
    firsts = (next((name for name in known if (name in UNETS) == is_unet), None) for is_unet in (True, False))
    return _each([MODELS[name] for name in known], [*firsts])


def largest_difference(picture: torch.Tensor, other: torch.Tensor) -> float:
    return (picture - other).abs().max().item()
