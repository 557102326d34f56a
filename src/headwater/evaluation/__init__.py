"""Evaluation of language models: tasks of lm-evaluation-harness, and bits per byte of texts."""
