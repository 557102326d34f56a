"""Names in the HDF5 files of texts with images; `headwater.data.multimodal.files` says what they hold."""

from __future__ import annotations

CHANNELS = ("input_ids", "attention_mask", "labels", "key_padding_mask", "token_modality_idx")
"""Tokens; 1 where the label counts; the token after each; 1 where a token is padding; 1 where an image is."""

NO_IMAGE = "None"
"""Path of an image that a sample does not have."""
