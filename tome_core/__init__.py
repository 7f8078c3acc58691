"""Token merging for Stable Diffusion UNets and transformers: pictures that cost less time.

``with tome_core.patch(pipe, strength=0.5): image = pipe("a lake").images[0]``, and what a strength stands for:

>>> strength(0.5) == preset("balanced")
True
"""

from .merging.plan import MergePlan
from .models.unet_blocks import UnsupportedModelError
from .patching import Patch, apply_patch, patch, remove_patch, report
from .reporting.report import Report
from .settings import form
from .settings.config import MergeConfig, MergeRule, describe_settings
from .settings.presets import PRESETS, preset, strength
from .settings.schedule import NoiseSchedule

__version__ = "0.2.0"

__all__ = [
    "PRESETS", "MergeConfig", "MergePlan", "MergeRule", "NoiseSchedule", "Patch", "Report",
    "UnsupportedModelError", "apply_patch", "describe_settings", "form", "patch", "preset", "remove_patch",
    "report", "strength",
]  # fmt: skip
