"""Data sets of texts for encoders and encoder-decoders: tokenized, padded, and with labels."""
