"""Where a step lies on ComfyUI's percent scale."""

from __future__ import annotations

from typing import Any

_HALVINGS = 24
# Scheduled sigmas are float32, good to 1e-7 or so; a step of 1e-6 in percent changes sigma by 6e-6. Rounding to
# it makes "exactly at 50 %" what ComfyUI's own comparison of sigmas makes of it.
_DIGITS = 6


def percent_of(sigma: float, model_sampling: Any) -> float:
    """The percent whose ``percent_to_sigma`` is this sigma: 0 for pure noise, 1 for the finished picture.

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
    return round(high, _DIGITS)
