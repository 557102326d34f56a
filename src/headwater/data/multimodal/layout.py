"""Names in the HDF5 files of texts with images; `headwater.data.multimodal.files` describes the layout."""

from __future__ import annotations

CHANNELS = ("input_ids", "attention_mask", "labels", "key_padding_mask", "token_modality_idx")
"""Names of the rows: tokens; 1 where the label counts; labels; 1 where padding is; 1 where an image is."""

NO_IMAGE = "None"
"""Stored path of an image that a sample lacks."""
