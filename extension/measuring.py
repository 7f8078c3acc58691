"""Whether merging pays here, in a line: before a picture on request, after one where the user asked for it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import NamedTuple

from ..tome_core import MergeConfig, Patch
from . import host
from .merging import Job
from .wish import FIRST, HIRES, Wish

logger = logging.getLogger(__name__)
_NO_MODEL = "no model is loaded yet"


class Pass(NamedTuple):
    """One pass of a picture to come; sizes in pixels."""

    hires: bool
    width: int
    height: int

    @property
    def size(self) -> str:
        """As a gain's line says it."""
        return f"{self.width}x{self.height}"


Ask = Callable[[Patch, Pass], str]


def answer(wish: Wish, passes: Iterable[Pass]) -> str:
    """``1024x1536: about 31 % faster``, for each pass that merges; calls no model."""
    return _for_each(wish, passes, _known)


def measure_now(wish: Wish, passes: Iterable[Pass]) -> str:
    """The same, what is not known of it measured. Takes seconds."""
    return _for_each(wish, passes, lambda patch, one: _known(patch, one, "") or _measured(patch, one))


def measure_after(job: Job) -> None:
    """For calls as a job's passes made them, where nobody has yet. Never fails: the pictures are done."""
    for record in job.records.values():
        if record.handle is None:
            continue
        try:
            with host.autocast():
                gain = record.handle.measure_latest()
        except Exception as error:  # whatever else is on the model; nobody asked for more than a picture
            logger.warning("whether merging pays was not measured: %s", error)
            continue
        if gain is not None:
            logger.info("measured: %s (%s)", gain.line, gain)


def _for_each(wish: Wish, passes: Iterable[Pass], ask: Ask) -> str:
    passes = list(passes)
    merging = [(one, wish.config(one.hires, layout=host.layout())) for one in passes]
    if not wish.strength:
        return "strength 0: off"
    if wish.where == HIRES and not any(one.hires for one in passes):
        return "only the hires pass is to merge: turn on Hires. fix"
    if host.loaded_unet() is None:
        return _NO_MODEL
    told = [(one, _asked(one, config, ask)) for one, config in merging if config is not None]
    if len(passes) == 1:
        return "".join(text for _, text in told)
    return "; ".join(f"{HIRES if one.hires else FIRST} {text}" for one, text in told)


def _asked(one: Pass, config: MergeConfig, ask: Ask) -> str:
    aside = host.reason_to_step_aside(one.hires)
    if aside is not None:
        return f"{one.size}: nothing merges, {aside}"
    try:
        return ask(Patch(host.loaded_unet(), config, None), one)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:  # of a model that we do not know, or a job
        return f"{one.size}: {str(error).splitlines()[0]}"


def _known(patch: Patch, one: Pass, unknown: str = "not measured yet") -> str:
    gain = patch.gain_for(one.height, one.width)
    if gain is not None:
        return gain.line
    return unknown and f"{one.size}: {unknown}"


def _measured(patch: Patch, one: Pass) -> str:
    return host.on_the_card(lambda: patch.measure(one.height, one.width)).line
