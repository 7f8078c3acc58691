"""Calls of a UNet recorded into CUDA graphs and replayed: `tome_core.capture`."""

from .handle import Capture, capture

__all__ = ["Capture", "capture"]
