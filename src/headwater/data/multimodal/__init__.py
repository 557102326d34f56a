"""Texts with images: prepared from conversations or captions, stored in HDF5, and read as batches."""
