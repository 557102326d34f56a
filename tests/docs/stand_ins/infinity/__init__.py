"""A stand-in for MegaTrain: the same calls, on the CPU, without streams."""
