"""Timing unmerged and merged calls on the user's machine, and going by what came out."""
