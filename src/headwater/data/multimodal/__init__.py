"""Texts with images: preparation from conversations or captions, storage in HDF5, and batches."""
