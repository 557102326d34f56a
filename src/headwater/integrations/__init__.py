"""Integrations of the streaming engine with other trainers."""
