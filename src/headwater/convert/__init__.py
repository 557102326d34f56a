"""Checkpoints to and from other formats."""
