"""Where a noise level lies on the engine's scales."""

from __future__ import annotations

from typing import Any

from .engine import tome_core

is_kind = tome_core.model.families.is_kind
_FLOW = "CONST"  # base of what samples a flow model
_HALVINGS = 24
# Scheduled sigmas are float32, good to 1e-7 or so; a step of 1e-6 in percent changes sigma by 6e-6. Rounding to
# it makes "exactly at 50 %" what ComfyUI's own comparison of sigmas makes of it.
_DIGITS = 6
_PURE_NOISE = 1e6  # relative to the picture; where there is nothing of it, its share is infinite


def percent_of(sigma: float, model_sampling: Any) -> float:
    """The percent whose ``percent_to_sigma`` is this sigma: near 0 for pure noise, near 1 for the finished picture.

    0 and 1 themselves are beyond every step, as in ComfyUI: a range that ends at 0 or starts at 1 holds no step.

    model_sampling: the model's own; any schedule whose sigma falls as the percent rises. Asked for one value at a
    time because that is all that every kind of it offers.
    """
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if model_sampling.percent_to_sigma(middle) > sigma:
            low = middle
        else:
            high = middle
    edge = 10.0**-_DIGITS
    first = 0.0 if sigma >= model_sampling.percent_to_sigma(0.0) else edge
    last = 1.0 if sigma <= model_sampling.percent_to_sigma(1.0) else 1.0 - edge
    return min(last, max(first, round(high, _DIGITS)))


def flow_time(sigma: float, model_sampling: Any) -> float | None:
    """Of a flow model: 0 for the picture, 1000 for pure noise, which its sampler's levels are shares of; else None.

    As a noise's deviation relative to the picture's, half of a film's steps would all be the noisiest there is.
    """
    return 1000.0 * sigma if is_kind(model_sampling, _FLOW) else None


def relative_sigma(sigma: float, model_sampling: Any) -> float:
    """The noise's standard deviation where the picture's is 1.

    EDM models see the picture at another one. Flow models see ``(1 - sigma)`` of it under ``sigma`` of the noise.
    """
    if is_kind(model_sampling, _FLOW):
        noise = sigma * getattr(model_sampling, "noise_scale", 1.0)
        return noise / max(1.0 - sigma, noise / _PURE_NOISE) if noise > 0 else 0.0
    return sigma / getattr(model_sampling, "sigma_data", 1.0)
