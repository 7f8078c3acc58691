"""Measurements that settle arguments, each a command such as ``python -m benchmarks.gpu``; results kept as data."""

import os

# Before torch is imported: threads that spin while they wait count as processor time. A user's own setting wins.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
