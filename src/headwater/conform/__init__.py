"""Comparison of streamed training with plain PyTorch: of a user's model, and of random models."""
