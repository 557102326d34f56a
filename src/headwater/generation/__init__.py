"""Text generation: tokens for many requests at once, with few passes over the weights."""
