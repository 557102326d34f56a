"""Version of Headwater, in the lowest layer, so that every layer may import it."""

__version__ = "0.1.0"
