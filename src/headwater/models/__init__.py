"""Models, as plain single-device PyTorch."""
