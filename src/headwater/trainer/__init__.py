"""Training runs, from a params file to the last checkpoint."""
