"""The configuration."""

import dataclasses

import torch


@dataclasses.dataclass
class CPUMasterConfig:
    dataset_path: str
    attn_implementation: str
    batch_size: int
    max_seq_len: int
    dtype: torch.dtype
