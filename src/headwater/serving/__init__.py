"""Serving: answers of language models to requests in JSON, over HTTP and from files."""
