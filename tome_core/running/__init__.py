"""One patch while its model runs: the time, the rules in force, what is decided, matched and kept."""
