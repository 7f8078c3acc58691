"""Where the early phase ends in a pass that begins late (image to image, inpainting, a hires pass) or has few steps.

A mark promises a share of the steps, which a boundary by time does not keep there: of a pass from half of the noise on
balanced left .10 of the work in place of .0625, and of four steps one late where 1.5 were promised. There the boundary
goes to where the promised share of the pass's own steps is left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

# the timestep from which on a pass is a whole picture: schedules with leading spacing begin late (951 for 20 steps), a
# model with zero terminal SNR at 880 where its sigmas begin at Stable Diffusion's 14.6, as Karras' and AYS' do
WHOLE_FROM = 850.0
FEW = 8  # steps up to which half a step weighs too much to be rounded away
_ALL = 1000.0  # timesteps of a schedule


def boundary_in(timesteps: Sequence[float], until: float) -> float | None:
    """The timestep at and above which a step of this pass is early; None where the whole picture's holds.

    timesteps: of the pass's steps, in any order. until: the boundary in a whole picture. The share of late steps is the
    same in both, to the nearest step; a half goes to the late ones, which change less.

    >>> boundary_in([500, 400, 300, 200, 100], 375)
    250.0
    >>> boundary_in([999, 749, 499, 249], 375)
    624.0
    >>> boundary_in([999, 666, 333], 375) is None
    True
    """
    steps = sorted(timesteps, reverse=True)
    if not steps:
        return None
    late = math.floor(len(steps) * until / _ALL + 0.5)
    if steps[0] >= WHOLE_FROM:
        late = min(late, len(steps) - 1)  # whatever strength is above 0 merges something
        if len(steps) > FEW or sum(one < until for one in steps) >= late:
            return None
    early = len(steps) - late
    if late == 0 or early == 0:
        return math.inf if early == 0 else 0.0
    return (steps[early - 1] + steps[early]) / 2  # between two, because hosts round a time in more ways than one
