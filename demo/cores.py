"""How the threads of one process share the processor with others."""

from __future__ import annotations

import os


def wait_passively() -> None:
    """Let waiting OpenMP threads sleep. Call before torch is imported; a user's own setting wins.

    By default they spin. On two cores shared with other work that made one picture of 20 steps take 18-75 s
    instead of 4-6 s, and counted the spinning as CPU time, so that nothing could be compared.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
