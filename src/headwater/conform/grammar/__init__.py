"""Random models: small programs out of PyTorch features, run plain and streamed, and made smaller."""
