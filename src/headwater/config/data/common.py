"""The keys of all data loaders."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from headwater.config.base import FilePath, NoEffect, OneOrMore, Section

OfTheRun = Annotated[Any, NoEffect("the precision of the run is used")]


class LoaderSection(Section):
    """The keys of all data loaders.

    Attributes:
        batch_size: samples of one step over all ranks.
        shuffle: read the samples in a random order, which differs in each pass.
        shuffle_seed: seed of the random order; the run's seed if absent.
        num_workers: number of processes that read ahead; with 0 the training process reads.
        prefetch_factor: number of batches that each worker reads ahead.
        persistent_workers: keep the workers between passes.
        input_workers: addresses host:port of processes `headwater input_worker` that read the samples, or
            ssh://host to let `headwater fit` start them there. With them `prefetch_factor` is the number of
            batches in flight for each, and `num_workers` has no effect.
        drop_last: drop the last samples of a pass if they do not fill a batch.
    """

    batch_size: int = Field(ge=1)
    shuffle: bool = False
    shuffle_seed: Annotated[int | None, Field(ge=0)] = None
    num_workers: int = Field(default=0, ge=0)
    prefetch_factor: int = Field(default=2, ge=1)
    persistent_workers: bool = True
    input_workers: Annotated[tuple[str, ...], OneOrMore] = ()
    drop_last: bool = True
    micro_batch_size: Annotated[
        Any, NoEffect("the plan chooses it, unless trainer.init.backend.micro_batch_size is set")
    ] = None
    mixed_precision: OfTheRun = None
    fp16_type: OfTheRun = None
    use_worker_cache: Annotated[Any, NoEffect("data are never copied to another place")] = None
    shuffle_buffer: Annotated[Any, NoEffect("all samples are shuffled, without a buffer")] = None

    @property
    def leaves_out_last(self) -> bool:
        """True if an incomplete last batch is dropped."""
        return self.drop_last

    @property
    def place(self) -> str:
        """The folder of the data, for messages."""
        folders = getattr(self, "data_dir", "")
        return ", ".join(map(str, folders)) if isinstance(folders, tuple) else str(folders)


FromModel = Annotated[Any, NoEffect("the value of the model is used")]
OnePaddedLength = Annotated[Any, NoEffect("all samples are padded to the same length")]

Folders = Annotated[tuple[FilePath, ...], Field(min_length=1), OneOrMore]
"""One folder or several."""
