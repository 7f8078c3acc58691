"""If the node asks for it: whether merging pays, measured after a sampling, once for each kind of call."""

from __future__ import annotations

import logging
from typing import Any

from . import host
from .engine import hosting

logger = logging.getLogger(__name__)
_NOT = "the gain was not measured"


def measure(state: Any, told: dict[str, Any]) -> str:
    """For calls as a sampling's latest, where nobody has yet: a sentence on what was found, "" where it was known.

    state: of a model in that sampling, which is over. told: see `slot.tell`. Never fails.
    """
    if not hasattr(state, "measure_latest"):
        return f"{_NOT}: that is done with UNets alone"
    if state.latest is None:
        return f"{_NOT}: nothing was called that merging is for"
    logger.info("ToMe: measuring what merging gains here, once for pictures of this size")
    timed = hosting.clock_for(state.latest.device)

    def clock() -> float:
        if host.is_interrupted():  # which ends a measurement and no picture: that is done
            raise RuntimeError("it was cancelled")
        return timed()

    try:
        gain = state.measure_latest(clock=clock, told=told, brings_weights=True)
    except Exception as error:  # whatever else is on the model; nobody asked for more than a picture
        return f"{_NOT}: {error}"
    return "" if gain is None else f"measured: {gain.line}"
