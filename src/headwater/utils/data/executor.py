"""`DataExecutor`: yields the batches of a training loop, and decides in which steps closures run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from headwater.api.backend import current_backend
from headwater.api.step import driven_by
from headwater.core.errors import ConfigError
from headwater.utils.cluster import CSConfig
from headwater.utils.data.batches import check_batch, to_device
from headwater.utils.data.loader import DataLoader, checked_iterable, passes, with_last
from headwater.utils.data.parts import Parts

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class DataExecutor:
    """An iterable of the batches of a training or evaluation loop; each batch is one step.

    Batches are checked and moved to the device of the current backend. A second iteration continues to count
    the steps of the first.

    Args:
        dataloader: a `DataLoader` or another iterable of batches.
        num_steps: number of batches to yield, restarting the loader at its end; one pass if `None`.
        checkpoint_steps: checkpoint closures run every `checkpoint_steps` steps and at the last step of an
            iteration; only at the last step if `None` or 0.
        cs_config: configuration of the compute ranks; one rank if `None`.
        activation_steps: step closures run every `activation_steps` steps and at the last step; at every step
            if `None`.
        writer: a TensorBoard writer that is flushed at the end of the loop.
        ragged: true if the first dimensions of a batch's tensors may differ.
        sharded: true if the loader loads different batches on each rank; `None` to find out from the first
            batches (see `Parts`).

    Attributes:
        step: number of the current step, from 1; between iterations, the number of finished steps.
        cs_config: configuration of the compute ranks.

    Raises:
        ConfigError: if a number of steps is not an integer in its range.
        DataError: during iteration, if the loader yields nothing, or an object that is not a batch.
    """

    def __init__(
        self,
        dataloader: Iterable[Any],
        num_steps: int | None = None,
        checkpoint_steps: int | None = None,
        cs_config: CSConfig | None = None,
        activation_steps: int | None = None,
        writer: SummaryWriter | None = None,
        *,
        ragged: bool = False,
        sharded: bool | None = None,
    ) -> None:
        self._dataloader = checked_iterable(dataloader, what="the executor was given")
        self._num_steps = _number("num_steps", num_steps, smallest=1)
        self._checkpoint_steps = _number("checkpoint_steps", checkpoint_steps, smallest=0)
        self._activation_steps = _number("activation_steps", activation_steps, smallest=1) or 1
        self.cs_config = cs_config or CSConfig()
        self._writer = writer
        self._ragged = ragged
        self._parts = Parts(sharded)
        self._at_last = False
        self.step = 0

    @property
    def at_checkpoint_step(self) -> bool:
        """True if checkpoint closures run in the current step."""
        return self._at_last or bool(self._checkpoint_steps and self.step % self._checkpoint_steps == 0)

    @property
    def at_activation_step(self) -> bool:
        """True if step closures run in the current step."""
        return self._at_last or self.step % self._activation_steps == 0

    def __len__(self) -> int:
        """Return the number of batches; raise `TypeError` without `num_steps` if the loader has no length."""
        return self._num_steps or len(self._dataloader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        loader = self._dataloader.batches if isinstance(self._dataloader, DataLoader) else self._dataloader
        batches = self._parts.of(passes(loader, self._num_steps))
        with self._flushed(), driven_by(self):
            for batch, at_last in with_last(batches, self._length()):
                self.step += 1
                self._at_last = at_last
                check_batch(batch, where=f"batch of step {self.step}", ragged=self._ragged)
                yield self._on_device(batch)

    @staticmethod
    def _on_device(batch: Any) -> Any:
        backend = current_backend()
        if backend is None or backend.torch_device.type == "cpu":
            return batch
        return to_device(batch, backend.torch_device)

    def _length(self) -> int | None:
        try:
            return len(self)
        except TypeError:
            return None

    @contextmanager
    def _flushed(self) -> Iterator[None]:
        try:
            yield
        finally:
            if self._writer is not None:
                self._writer.flush()


def _number(name: str, value: int | None, *, smallest: int) -> int | None:
    if value is not None and (type(value) is not int or value < smallest):
        raise ConfigError(
            f"expected {name} to be an integer >= {smallest}, got {value!r}",
            where=f"DataExecutor({name}=…)",
            remedy=f"write an integer, or leave {name} out",
        )
    return value
