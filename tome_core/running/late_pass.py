"""Where the early phase ends in a pass that begins late: image to image, inpainting, a hires pass.

Its steps are the later ones of a schedule, of which a boundary by time would call almost all late: at half of the noise
the mark balanced left .10 of the work in place of .0625. What is promised is a share of the steps, so the boundary goes
to where that share of the pass's own ones is left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

# the timestep from which on a pass is a whole picture, to which the measured boundary belongs. A tenth of the schedule
# moves the work by a tenth, and schedules with leading spacing begin that late (951 for 20 steps)
WHOLE_FROM = 900.0
_ALL = 1000.0  # timesteps of a schedule


def boundary_in(timesteps: Sequence[float], until: float) -> float | None:
    """The timestep at and above which a step of this pass is early; None where it begins early enough to be whole.

    timesteps: of the pass's steps, in any order. until: the boundary in a whole picture. The share of late steps is the
    same in both, to the nearest step; a half goes to the late ones, which change less.

    >>> boundary_in([500, 400, 300, 200, 100], 375)
    250.0
    >>> boundary_in([999, 666, 333], 375) is None
    True
    """
    steps = sorted(timesteps, reverse=True)
    if not steps or steps[0] >= WHOLE_FROM:
        return None
    late = math.floor(len(steps) * until / _ALL + 0.5)
    early = len(steps) - late
    if late == 0 or early == 0:
        return math.inf if early == 0 else 0.0
    return (steps[early - 1] + steps[early]) / 2  # between two, because hosts round a time in more ways than one
