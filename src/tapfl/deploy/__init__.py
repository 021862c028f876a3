"""A federation on real machines: keys, processes, and what operators want to know."""
