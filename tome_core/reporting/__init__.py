"""Reports: counts of what merged, and measured gains."""
