"""The gain in the user's own pictures: steps are timed as they happen. The times are reported, and decide nothing.

A GPU runs behind its host by at most the length of its queue, so the time from a sampling's first reported step to its
last is divided by the model calls between them. Only equal conditions are compared: model, size, sampler, number of
calls, and what the host adds.
"""

from __future__ import annotations

import hashlib
import platform
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..attention.descriptions import full_name
from ..engine.steps import Steps
from ..models.intercept import attention_names_in
from ..reporting.gains import KNOWN
from ..settings.config import MergeConfig
from .pays import PIXELS

_CALLS = 6  # the fewest timed calls: of fewer, the GPU's queue would be too large a part


def remember(steps: Steps, model: nn.Module | None, config: MergeConfig | None, report: Any, *beside: Any) -> str:
    """Keep a normally ended sampling's seconds per call; return the text of `KNOWN.of_pictures`, "" if unknown.

    `model` is the model as it is without a patch; None if that is not known. `config` and the patch's `report` are None
    for an unmerged picture: its time is kept, the result is "". `beside` has further conditions on which the time
    depends. Nothing is kept, and the result is "", if `model` is None, or fewer than 6 calls lay between the first and
    the last reported step, or none had latents, or there is a `config` and nothing merged.
    """
    seconds, calls = steps.timed
    did_not = config is not None and (report is None or not report.merged_anything)
    if model is None or calls < _CALLS or not steps.kinds or did_not:
        return ""
    kinds = sorted(str((shape, dtype, _name_of(device), more)) for shape, dtype, device, *more in steps.kinds)
    sides = sorted({shape[-2:] for shape, *_ in steps.kinds})
    where, how = _where(model, sides), _digest(kinds, steps.calls, steps.done, beside)
    # next to another patch, the same rules may save another share
    rules = (_rules(config), f"{report.work_saved or 0:.2f}") if config else ("", "")
    KNOWN.add_picture((where, how, *rules), seconds / calls)
    return KNOWN.of_pictures(where, *rules) if config else ""


def known_gain(model: nn.Module, config: MergeConfig, height: int, width: int) -> str:
    """Return the gain in the user's own pictures of a size in pixels, as text, by the times that `remember` kept.

    It reads like ``about 1.5x faster, from your own pictures (...)``, of the latest conditions; "" if pictures are too
    few or their times vary too much. `model` is the model as it is without a patch.
    """
    return KNOWN.of_pictures(_where(model, [(height // PIXELS, width // PIXELS)]), _rules(config))


def _where(model: nn.Module, sides: list[tuple[int, int]]) -> str:
    """Return a hash of model, versions, command line and `sides`, the different (height, width) of latents in cells.

    The model counts by its weights' sizes and dtypes, and by the names of its forwards, attentions and processors.
    """
    parts: Counter[str] = Counter()
    for module in model.modules():
        code, processor = vars(module).get("forward", type(module).forward), type(vars(module).get("processor"))
        parts[f"{full_name(code)} {attention_names_in(code)} {processor.__name__}"] += 1
    for parameter in model.parameters():
        parts[str(parameter.dtype)] += parameter.numel()
    return _digest(sorted(parts.items()), sides, torch.__version__, _version(), sys.argv[1:])


def _rules(config: MergeConfig) -> str:
    """Return a hash of the settings without the seed."""
    return _digest(replace(config, seed=0))


def _name_of(device: torch.device) -> str:
    """Return a CUDA GPU's name; a CPU's kind and torch's threads, as ``x86_64, threads 8``; or a device's type."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        return f"{platform.processor() or platform.machine()}, threads {torch.get_num_threads()}"
    return device.type


def _version() -> str:
    """Return the version of this package, under any name by which it was imported."""
    return sys.modules[__package__.rpartition(".")[0]].__version__


def _digest(*parts: object) -> str:
    """Return a hash of the parts' representations (``repr``), 12 hexadecimal digits."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]
