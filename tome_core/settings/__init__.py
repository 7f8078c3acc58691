"""What people set: fields, rules over time, strength, the form every host shows, and refusals in these words."""
