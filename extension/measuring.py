"""Where the user asked for it: whether merging pays on this machine, measured after a picture, once for each size."""

from __future__ import annotations

import logging

from ..tome_core import gains
from . import host
from .merging import Job

logger = logging.getLogger(__name__)
_FILE = "tome_core_gains.json"


def remember() -> None:
    """Know what was measured before the webui was started, and keep what will be."""
    path = host.cache_file(_FILE)
    if path is not None:
        gains.load(path)


def measure(job: Job) -> None:
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
