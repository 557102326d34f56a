"""The older, session-based form of the API (`cbtorch`)."""
