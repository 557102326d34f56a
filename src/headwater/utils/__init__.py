"""What a training loop needs around the model: data, clusters, TensorBoard."""

from headwater.utils import data, tensorboard
from headwater.utils.cluster import CSConfig

__all__ = ["CSConfig", "data", "tensorboard"]
