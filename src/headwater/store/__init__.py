"""The weight store: master weights and optimizer state by stage, in memory or on disk."""
