"""Reports: counts of what merged, and the gains in the user's own pictures."""
