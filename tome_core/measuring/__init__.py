"""The estimate whether merging pays, and the gain in the user's own pictures."""
