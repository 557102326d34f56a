"""The streaming engine inside other trainers."""
