"""Is merging worth it on this machine? `python -m tome_core.bench`."""
