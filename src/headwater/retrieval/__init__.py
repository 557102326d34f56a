"""Retrieval of passages: an index of their vectors, exact search in it, and prompts with passages."""
