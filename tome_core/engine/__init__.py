"""Merging while a model runs: the time, the rules in force, token matches, and plans kept over steps."""
