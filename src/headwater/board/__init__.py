"""A web page that shows runs and jobs while they happen."""
