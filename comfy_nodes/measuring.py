"""Where a preview asks for it: whether merging pays, measured after a sampling, once for each kind of call."""

from __future__ import annotations

import logging
from typing import Any

from . import host
from .engine import hosting

logger = logging.getLogger(__name__)


class _Stopped(Exception):
    """The user has pressed Cancel, which ends a measurement and no picture: it is done."""


def measure(state: Any, told: dict[str, Any]) -> str:
    """For calls as a sampling's latest, where nobody has yet: a sentence on what was found, "" where it was known.

    state: of a model in that sampling, which is over. told: see `slot.tell`. Never fails.
    """
    if not hasattr(state, "measure_latest"):
        return "the gain was not measured: that is done with UNets alone"
    latest = state.latest
    if latest is None:
        return "the gain was not measured: nothing was called that merging is for"
    logger.info("ToMe: measuring what merging gains here, once for pictures of this size")
    timed = hosting.clock_for(latest.device)

    def clock() -> float:
        if host.is_interrupted():
            raise _Stopped("it was cancelled")
        return timed()

    try:
        gain = state.measure_latest(clock=clock, told=told, brings_weights=True)
    except Exception as error:  # whatever else is on the model; nobody asked for more than a picture
        return f"the gain was not measured: {error}"
    if gain is not None:
        return f"measured: {gain.line}"
    return "" if state.is_measured else "the gain was not measured: the model is gone"
