"""Loggers that send a run to Weights & Biases, MLflow or Trackio."""
