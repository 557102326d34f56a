"""Data sets of images with labels, masks or noise."""
