"""What every data loader takes."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from headwater.config.base import FilePath, NoEffect, OneOrMore, Section


class LoaderSection(Section):
    """What every data loader takes.

    Attributes:
        batch_size: samples of one step over all ranks.
        shuffle: a random order of its own for each pass.
        shuffle_seed: order of the samples; the run's seed where absent.
        num_workers: processes that read ahead; 0 reads in the training process.
        prefetch_factor: batches each worker reads ahead.
        persistent_workers: keep the workers from one pass to the next.
        drop_last: leave out the samples that do not fill a batch.
    """

    batch_size: int = Field(ge=1)
    shuffle: bool = False
    shuffle_seed: Annotated[int | None, Field(ge=0)] = None
    num_workers: int = Field(default=0, ge=0)
    prefetch_factor: int = Field(default=2, ge=1)
    persistent_workers: bool = True
    drop_last: bool = True
    micro_batch_size: Annotated[
        Any, NoEffect("the plan chooses it; trainer.init.backend.micro_batch_size sets it")
    ] = None
    mixed_precision: Annotated[Any, NoEffect("the precision of the run holds")] = None
    fp16_type: Annotated[Any, NoEffect("the precision of the run holds")] = None
    use_worker_cache: Annotated[Any, NoEffect("data are read from where they are")] = None
    shuffle_buffer: Annotated[Any, NoEffect("all samples are shuffled, not those of a buffer")] = None

    @property
    def leaves_out_last(self) -> bool:
        """Whether an incomplete last batch is left out."""
        return self.drop_last

    @property
    def place(self) -> str:
        """Where the data are, for messages."""
        folders = getattr(self, "data_dir", "")
        return ", ".join(map(str, folders)) if isinstance(folders, tuple) else str(folders)


Folders = Annotated[tuple[FilePath, ...], Field(min_length=1), OneOrMore]
"""One folder or several."""
