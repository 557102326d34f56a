"""From an input function to the batches of a training loop."""

from headwater.utils.data.executor import DataExecutor
from headwater.utils.data.loader import DataLoader

__all__ = ["DataExecutor", "DataLoader"]
