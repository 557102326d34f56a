"""Opens the trained encoders of a retriever: of passages to make an index, of questions to search in it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from torch import Tensor, nn

from headwater.config.models.encoder import DPRConfig
from headwater.config.run import RunConfig, load_params
from headwater.core.errors import ConfigError, DataError
from headwater.models.bert import text_vectors
from headwater.models.encoder import Encoder
from headwater.models.examples import texts as example_texts
from headwater.retrieval.build import Built, Texts, build_index
from headwater.retrieval.encoder import TextTokens, VectorEncoder
from headwater.retrieval.files import EncoderIdentity, read_tokenizer
from headwater.retrieval.index import PassageIndex
from headwater.retrieval.retriever import Retriever
from headwater.store.snapshot_load import SavedCheckpoint
from headwater.trainer.checkpoint import CheckpointManager
from headwater.trainer.engines import trained_model
from headwater.trainer.job import Trainable
from headwater.trainer.planning import Workload
from headwater.trainer.run_dir import RunDir
from headwater.trainer.start import find_trained
from headwater.trainer.tokenizer import model_codec
from headwater.trainer.zoo_job import zoo_trainable

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Side = Literal["questions", "contexts"]
"""The encoders of `DPR`, by the names of its modules."""


@dataclasses.dataclass(frozen=True)
class RetrieverRun:
    """A run that has trained encoders of questions and passages.

    Attributes:
        config: the run.
        checkpoint: the checkpoint whose weights are used.
    """

    config: RunConfig
    checkpoint: Path

    @classmethod
    def find(cls, config: RunConfig, checkpoint: Path | None = None) -> RetrieverRun:
        """Return the run with a checkpoint: the named one, or the newest one.

        Raises:
            ConfigError: if the model of the run is not a retriever.
            CheckpointError: if the run has no checkpoint.
        """
        model, model_dir = config.init.model, config.init.model_dir
        if not isinstance(model, DPRConfig):
            raise ConfigError(
                f"expected a run whose model is dpr, got a {model.name}",
                where=f"{config.source}: trainer.init.model.name",
                remedy="name a run that has trained encoders of questions and passages (dpr)",
            )
        found = find_trained(checkpoint, CheckpointManager(model_dir), model_dir).path
        assert found is not None, "a checkpoint was found"
        return cls(config, found)

    def tokenizer(self, path: Path | None) -> tuple[Tokenizer, int]:
        """Return the tokenizer of the run, and the id of the token that ends each text.

        Args:
            path: its file or folder; the one in the folder of the run if not given.

        Raises:
            ConfigError: if the tokenizers library is not installed.
            DataError: if the tokenizer is missing.
        """
        prepared = RunDir(self.config.init.model_dir).prepared_data()
        # The token that ended the texts in training comes before the one that the tokenizer's files name.
        end = None if prepared is None else prepared.end_of_text_id
        codec = model_codec(self.config, path, end)
        return codec.tokenizer, codec.ends[0]

    def identity(self) -> EncoderIdentity:
        """Return what identifies the trained model in an index.

        Raises:
            CheckpointError: if the checkpoint is not complete.
            CorruptError: if its manifest is damaged.
        """
        manifest = SavedCheckpoint(self.checkpoint).manifest
        chunks = [manifest.files[stage.weights_file].chunks for stage in manifest.stages]
        return EncoderIdentity(
            str(self.config.init.model_dir.absolute()),
            str(self.checkpoint.absolute()),
            hashlib.sha256(json.dumps(chunks).encode()).hexdigest(),
        )

    @contextmanager
    def open(self, side: Side, tokenizer: Tokenizer, end: int, batch_size: int) -> Iterator[VectorEncoder]:
        """Open one of the two encoders. The weights of the other one are not loaded.

        Args:
            side: the encoder.
            tokenizer: its tokenizer.
            end: id of the token that ends each text.
            batch_size: largest number of texts of a pass over the weights. The plan may choose fewer.

        Yields:
            The encoder.

        Raises:
            CheckpointError: if the checkpoint is damaged or of another shape.
            DoesNotFitError: if not even one text fits into the memory of the params.
        """
        init = self.config.init
        whole = zoo_trainable(init).model
        encoder = cast(Encoder, whole.get_submodule(side))
        others = [name for name, _ in whole.named_parameters() if not name.startswith(f"{side}.")]

        def largest(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
            names = ("input_ids", "attention_mask")
            return text_vectors(model, **{name: batch[name].long() for name in names})

        trainable = Trainable(
            encoder,
            lambda size: example_texts()(encoder.config, size, None),
            loss=largest,
            divisible=True,
        )
        work = Workload(batch_size, micro_batch_size=init.backend.micro_batch_size)
        with trained_model(
            init,
            trainable,
            work,
            self.checkpoint,
            # The names of the other encoder are listed too: the checkpoint may have them.
            names=lambda name: (f"{side}.{name}", *others),
        ) as engine:
            yield VectorEncoder(
                cast(Encoder, engine.model),
                TextTokens(tokenizer, end, encoder.config.max_position_embeddings),
                engine.plan.device,
                engine.plan.micro_batch_size,
                engine.inference,
            )


def index_texts(
    run: RetrieverRun,
    out: Path,
    texts: Texts,
    *,
    tokenizer: Path | None = None,
    batch_size: int = 64,
    overwrite: bool = False,
    on_progress: Callable[[int], None] = lambda count: None,
) -> Built:
    """Encode texts with the passage encoder of a run, and write them as an index; see `build_index`.

    Args:
        run: the run.
        out: folder of the index.
        texts: the documents.
        tokenizer: see `RetrieverRun.tokenizer`.
        batch_size: see `RetrieverRun.open`.
        overwrite: replace the index that `out` already holds.
        on_progress: called with the number of passages encoded so far.
    """
    with run.open("contexts", *run.tokenizer(tokenizer), batch_size) as encoder:
        return build_index(out, texts, encoder, run.identity(), overwrite=overwrite, on_progress=on_progress)


@contextmanager
def open_retriever(
    folder: Path,
    *,
    encoder_dir: Path | None = None,
    changes: Sequence[str] = (),
    batch_size: int = 8,
) -> Iterator[Retriever]:
    """Open an index with the question encoder of the run that made it.

    Args:
        folder: the index.
        encoder_dir: folder of the run, if it was moved since the index was made.
        changes: values that replace those of the run, as `key=value`.
        batch_size: largest number of questions of a pass over the weights.

    Yields:
        The retriever.

    Raises:
        DataError: if the folder is not an index, or the run or its checkpoint is missing or another one.
        CorruptError: if the index is damaged.
    """
    index = PassageIndex(folder)
    manifest = index.manifest
    run = _run_of(index, encoder_dir, changes)
    if run.identity().weights != manifest.encoder.weights:
        raise DataError(
            f"the index was made with another model: its weights are not those in {run.checkpoint}",
            where=str(folder),
            remedy="name the run that made the index with --encoder_dir, or make the index again",
        )
    tokenizer = read_tokenizer(folder, manifest.tokenizer)
    with run.open("questions", tokenizer, manifest.end, batch_size) as encoder:
        yield Retriever(index, encoder)


def _run_of(index: PassageIndex, encoder_dir: Path | None, changes: Sequence[str]) -> RetrieverRun:
    """Return the run that made an index, with the checkpoint that made it.

    The checkpoint is below `encoder_dir`, or where it was when the index was made.

    Raises:
        DataError: if the run or the checkpoint is missing.
    """
    made_with = index.manifest.encoder
    folder = encoder_dir or Path(made_with.model_dir)
    if not RunDir(folder).params.is_file():
        raise DataError(
            "expected the run whose encoders made the index, found no params.yaml",
            where=str(folder),
            remedy="name the folder of the run with --encoder_dir",
        )
    config = load_params(RunDir(folder).params, [f"model_dir={folder}", *changes])
    checkpoint = Path(made_with.checkpoint)
    if encoder_dir is not None and ((encoder_dir / checkpoint.name).is_dir() or not checkpoint.is_dir()):
        checkpoint = encoder_dir / checkpoint.name
    if not checkpoint.is_dir():
        raise DataError(
            "expected the checkpoint with which the index was made; it is missing",
            where=str(checkpoint),
            remedy="name the run that has it with --encoder_dir, or make the index again",
        )
    return RetrieverRun.find(config, checkpoint)
