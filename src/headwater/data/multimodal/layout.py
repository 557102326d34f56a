"""Names in the HDF5 files of texts with images; `headwater.data.multimodal.files` describes the layout."""

from __future__ import annotations

CHANNELS = ("input_ids", "attention_mask", "labels", "key_padding_mask", "token_modality_idx")
"""Tokens; 1 where the label counts in the loss; the next token; 1 at padding; 1 at an image."""

NO_IMAGE = "None"
"""Stored path of an image that a sample lacks."""
