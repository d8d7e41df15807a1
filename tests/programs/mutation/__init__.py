"""Plants faults in a copy of the package, one at a time, and counts those that tests find."""
