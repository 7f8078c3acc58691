"""Timing of unmerged and merged calls on the user's machine, and the decision whether merging pays."""
