"""Models, written as plain PyTorch modules for a single device."""
