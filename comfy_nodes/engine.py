"""The engine, of which the nodes use `hosting` alone: beside this folder in a pack, else as it is installed."""

from __future__ import annotations

import importlib

# ComfyUI names a pack by its path with every dot replaced, so a dot means: this is a part of the pack
hosting = importlib.import_module("..tome_core.hosting" if "." in __package__ else "tome_core.hosting", __package__)
