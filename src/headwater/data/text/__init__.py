"""Texts for encoders: cut into WordPieces, filled up to one length, with what is to be learnt of them."""
