"""Utilities of a training loop: data executor, cluster configuration, TensorBoard."""

from headwater.utils import data, tensorboard
from headwater.utils.cluster import CSConfig

__all__ = ["CSConfig", "data", "tensorboard"]
