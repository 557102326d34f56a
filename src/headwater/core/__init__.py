"""Foundations that every layer may import: errors, units, seeds, stages, files."""
