"""Token merging for Stable Diffusion UNets: pictures that cost less time.

>>> # tome_core.apply_patch(pipe, ratio=0.5); image = pipe("a lake").images[0]; tome_core.remove_patch(pipe)
"""

from . import form, gains, sequence
from .config import MergeConfig, MergeRule, describe_settings
from .families import UnsupportedModelError
from .gains import Gain
from .graphs import Capture, capture
from .patch import Patch, apply_patch, patch, remove_patch, report
from .phases import ramp
from .plan import MergePlan
from .presets import PRESETS, preset, strength
from .report import Report
from .schedule import NoiseSchedule

__version__ = "0.1.0"

__all__ = [
    "PRESETS",
    "Capture",
    "Gain",
    "MergeConfig",
    "MergePlan",
    "MergeRule",
    "NoiseSchedule",
    "Patch",
    "Report",
    "UnsupportedModelError",
    "apply_patch",
    "capture",
    "describe_settings",
    "form",
    "gains",
    "patch",
    "preset",
    "ramp",
    "remove_patch",
    "report",
    "sequence",
    "strength",
]
