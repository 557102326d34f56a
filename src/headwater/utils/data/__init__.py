"""Data loading for training loops: `DataLoader` and `DataExecutor`."""

from headwater.utils.data.executor import DataExecutor
from headwater.utils.data.loader import DataLoader

__all__ = ["DataExecutor", "DataLoader"]
