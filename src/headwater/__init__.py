"""Headwater: train PyTorch models of any size on the hardware you have, by weight streaming."""

__version__ = "0.1.0"
