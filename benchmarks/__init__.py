"""Measurements that settle arguments: ``python -m benchmarks.speed`` and ``.quality``, results kept as data."""

import os

# Before torch is imported: threads that spin while they wait count as processor time. A user's own setting wins.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
