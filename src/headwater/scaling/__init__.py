"""Families of models along a scaling law: their params files, their losses, and the law through these."""
