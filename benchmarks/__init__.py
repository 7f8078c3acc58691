"""Measurements that settle arguments: ``python -m benchmarks.speed`` and ``.quality``, results kept as data."""
