"""What a measured gain belongs to."""

from __future__ import annotations

import torch

import tome_core
from tome_core.running import fingerprint


def test_an_update_of_torch_or_of_the_engine_makes_old_gains_anothers():
    assert fingerprint.versions() == (torch.__version__, tome_core.__version__)
