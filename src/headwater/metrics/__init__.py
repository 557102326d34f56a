"""Metrics of a training loop, on top of torchmetrics."""
