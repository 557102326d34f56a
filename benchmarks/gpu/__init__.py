"""Measurements on a machine with a GPU, in parts that end within nine minutes; see `scripts/gpu`."""
