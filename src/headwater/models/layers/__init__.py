"""Layers that model families share, as plain single-device PyTorch."""
