"""One model's merging while it runs: the time, the rules in force, matches, what is kept, and the seam."""
