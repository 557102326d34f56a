"""Training with most weights at zero: which ones, and when others take their place."""
