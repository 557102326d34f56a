"""Sparse training: masks choose the weights that stay zero, and schedules say when masks change."""
