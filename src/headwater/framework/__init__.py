"""The session form of the API."""
