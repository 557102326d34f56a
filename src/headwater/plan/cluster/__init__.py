"""Cluster simulator: predicts the steps of many ranks on any machines, from their rates."""
