"""Params files: one strict schema for both forms."""
