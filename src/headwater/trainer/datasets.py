"""Opens the data sets that the data sections of a params file name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from headwater.config.data import (
    AnswerDataConfig,
    DataConfig,
    DynamicMaskDataConfig,
    GptDataConfig,
    ImageFolderDataConfig,
    ImageTextDataConfig,
    LatentDataConfig,
    MaskedTextDataConfig,
    MNISTDataConfig,
    PreferenceDataConfig,
    QuestionDataConfig,
    RetrievalDataConfig,
    SegmentationDataConfig,
    SentencesDataConfig,
    SpanCorruptionDataConfig,
    TextClassificationDataConfig,
    TokenClassificationDataConfig,
    TranslationDataConfig,
    ViewDataConfig,
)
from headwater.config.data.common import LoaderSection
from headwater.config.models import ModelConfig
from headwater.config.models.decoder import DecoderConfig
from headwater.config.models.diffusion import DiTConfig
from headwater.config.models.encoder import (
    BertConfig,
    ClassifierConfig,
    DPRConfig,
    ExtractiveSummarizationConfig,
    QuestionAnsweringConfig,
    TokenClassifierConfig,
)
from headwater.config.models.huggingface import HuggingFaceConfig, Task
from headwater.config.models.multimodal import MultimodalSection
from headwater.config.models.preference import DPOConfig
from headwater.config.models.self_supervised import DinoConfig
from headwater.config.models.seq2seq import Seq2SeqConfig
from headwater.config.models.vision import FCMnistConfig, UNetConfig, ViTConfig
from headwater.core.errors import ConfigError, DataError
from headwater.core.side_files import TOKENIZER_FILE
from headwater.fabric.fabric import ALONE, Fabric

if TYPE_CHECKING:
    from headwater.data.source import Samples, SampleSource


def open_data(
    config: DataConfig,
    model: ModelConfig,
    *,
    seed: int,
    repeat: bool,
    fabric: Fabric = ALONE,
    workers_per_csx: int | None = None,
) -> SampleSource:
    """Return the data set that `config` names, checked against the model.

    Args:
        config: the section of the params file.
        model: the model that will read the data.
        seed: of the order and of random samples, if the section has no `shuffle_seed`.
        repeat: endless passes, for training; otherwise each iteration is one pass.
        fabric: the ranks; each batch is divided among the compute ranks.
        workers_per_csx: input workers that a rank uses at the same time, if the section names some.

    Returns:
        The data set; this rank reads its part of each batch.

    Raises:
        ConfigError: if the data are not for this model, or a package that reads them is not installed.
        DataError: if the data are missing, malformed or do not fit the model.
    """
    config = seeded(config, seed)
    if config.input_workers:
        from headwater.trainer.input_workers import remote_samples

        check_model(config, model)
        samples: Samples = remote_samples(config, model, fabric, workers_per_csx)
    else:
        samples = open_samples(config, model)
    from headwater.data.loader import Workers
    from headwater.data.order import SampleOrder
    from headwater.data.source import SampleSource

    order = SampleOrder(
        len(samples),
        config.batch_size,
        shuffle=config.shuffle,
        seed=config.shuffle_seed or 0,
        repeat=repeat,
        drop_last=config.leaves_out_last,
        rank=fabric.rank % fabric.num_csx,  # the number must be valid on store ranks too, which read nothing
        world_size=fabric.num_csx,
    )
    workers = Workers(config.num_workers, config.prefetch_factor, config.persistent_workers)
    return SampleSource(samples, order, workers)


@contextmanager
def errors_of(section: str) -> Iterator[None]:
    """Enter a context in which errors about data name the section of the params file that describes the data.

    A section may come from a file that the params file extends, so a path alone does not tell where it was
    written.
    """
    try:
        yield
    except (ConfigError, DataError) as error:
        where = f"{section}, {error.where}" if error.where else section
        raise type(error)(error.what, where=where, remedy=error.remedy) from error


def seeded(config: DataConfig, seed: int) -> DataConfig:
    """Return a data section with `seed` for the order and for random samples, unless it has a seed."""
    return config if config.shuffle_seed is not None else config.model_copy(update={"shuffle_seed": seed})


def check_model(config: DataConfig, model: ModelConfig) -> None:
    """Raise if a data section is not for a model.

    Raises:
        ConfigError: if the data section is not for the model.
    """
    schema, _ = _OPENERS[type(config)]
    if isinstance(model, HuggingFaceConfig):
        _check_task(config, model)
    elif not isinstance(model, schema):
        kinds = [kind for kind, (models, _) in _OPENERS.items() if isinstance(model, models)]
        known = [name for kind in kinds for name in _names(kind)]
        raise ConfigError(
            f"expected data for a {model.name}, found {config.data_processor}",
            where="data_processor",
            remedy=f"write {' or '.join(known)}",
        )


def open_samples(config: DataConfig, model: ModelConfig) -> Samples:
    """Return the data set of a section that names its seed, read by this process; see `open_data`."""
    check_model(config, model)
    try:
        return _OPENERS[type(config)][1](config, model)
    except ModuleNotFoundError as error:
        extra = "vision" if error.name == "PIL" else "data"
        raise ConfigError(
            f"reading data needs {error.name}, which is not installed",
            remedy=f"pip install 'headwater[{extra}]'",
        ) from error


def _check_task(config: DataConfig, model: HuggingFaceConfig) -> None:
    """Raise if the data are not for the task of a model of the transformers library."""
    found = next((tasks for kind, tasks in _LIBRARY_TASKS.items() if isinstance(config, kind)), ())
    if model.kind not in found:
        known = [name for name, tasks in _PROCESSORS.items() if model.kind in tasks]
        raise ConfigError(
            f"expected data for the task {model.kind}, found {config.data_processor}",
            where="data_processor",
            remedy=f"write {' or '.join(known)}, or set the model's task",
        )


def _gpt(config: GptDataConfig, model: DecoderConfig) -> Samples:
    from headwater.data.mixture import Mixture
    from headwater.data.reader import open_samples

    sinks = [(each.sink_token_id, each.num_sink_tokens) for each in config.data_transforms]
    # The smaller limit is used, because the data may have fewer ids than the model.
    sizes = [size for size in (config.vocab_size, model.vocab_size) if size is not None]
    found = [
        open_samples(
            source.data_dir,
            vocab_size=min(sizes),
            max_position_embeddings=model.max_position_embeddings,
            # Each transform puts its tokens before those of the transforms above it.
            sinks=tuple(token for token, count in reversed(sinks) for _ in range(count)),
            spans=config.use_vsl,
        )
        for source in config.sources
    ]
    if len(found) == 1:
        return found[0]
    mixture = Mixture(found, [source.weight for source in config.sources])
    mixture.check()
    return mixture


def _labelled_texts(config: TextClassificationDataConfig, model: ClassifierConfig) -> Samples:
    from headwater.data.text.classification import read_labelled_texts

    if config.data_processor == "MNLIDataProcessor":
        _check_pairs(config, model)
    return read_labelled_texts(config, model.vocab_size, model.num_labels)


def _labelled_tokens(config: TokenClassificationDataConfig, model: TokenClassifierConfig) -> Samples:
    from headwater.data.text.classification import read_labelled_tokens

    return read_labelled_tokens(config, model.vocab_size, model.num_classes)


def _questions(config: QuestionDataConfig, model: QuestionAnsweringConfig) -> Samples:
    from headwater.data.text.squad import read_windows

    _check_pairs(config, model)
    return read_windows(config, model.vocab_size)


def _check_pairs(config: DataConfig, model: ClassifierConfig | QuestionAnsweringConfig) -> None:
    if model.num_segments == 1:
        raise ConfigError(
            f"samples of {config.data_processor} are pairs of texts, but the model has one kind of segment",
            where="model.num_segments",
            remedy="write num_segments: 2, or 0 for a model that does not distinguish the two texts",
        )


def _masked_texts(
    config: MaskedTextDataConfig, model: BertConfig | ClassifierConfig | HuggingFaceConfig
) -> Samples:
    if isinstance(model, ClassifierConfig):
        num_labels = None if model.problem_type == "regression" else model.num_labels
        return _labelled_records(config, model, num_labels)
    if isinstance(model, HuggingFaceConfig) and model.kind == "sequence_classification":
        return _labelled_records(config, model, model.num_labels)
    from headwater.data.records import open_records
    from headwater.data.text.fields import masked_text_fields

    length = config.max_sequence_length or model.max_position_embeddings
    # The share of tokens that BERT predicts (arXiv:1810.04805, section 3.1).
    predictions = config.max_predictions_per_seq or math.ceil(0.15 * length)
    fields = masked_text_fields(
        length,
        predictions,
        vocab_size=model.vocab_size,
        pad=model.pad_token_id,
        segments=model.num_segments,
        next_sentence=not model.disable_nsp,
        spans=config.use_vsl,
    )
    return open_records(config.data_dir, fields, length)


def _labelled_records(
    config: MaskedTextDataConfig, model: ClassifierConfig | HuggingFaceConfig, num_labels: int | None
) -> Samples:
    from headwater.data.records import open_records
    from headwater.data.text.fields import class_fields

    length = config.max_sequence_length or model.max_position_embeddings
    fields = class_fields(
        length,
        vocab_size=model.vocab_size,
        pad=model.pad_token_id,
        segments=model.num_segments,
        num_labels=num_labels,
    )
    return open_records(config.data_dir, fields, length)


def _answers(config: AnswerDataConfig, model: QuestionAnsweringConfig) -> Samples:
    from headwater.data.records import open_records
    from headwater.data.text.fields import answer_fields

    _check_pairs(config, model)
    length = config.max_sequence_length or model.max_position_embeddings
    fields = answer_fields(length, vocab_size=model.vocab_size, segments=model.num_segments)
    return open_records(config.data_dir, fields, length)


def _dynamic_masks(config: DynamicMaskDataConfig, model: BertConfig) -> Samples:
    from headwater.data.text.masking import read_masked_texts

    return read_masked_texts(config, model)


def _sentences(config: SentencesDataConfig, model: ExtractiveSummarizationConfig) -> Samples:
    from headwater.data.records import open_records
    from headwater.data.text.fields import sentence_fields

    length = config.max_sequence_length or model.max_position_embeddings
    fields = sentence_fields(
        length, config.max_cls_tokens, vocab_size=model.vocab_size, segments=model.num_segments
    )
    return open_records(config.data_dir, fields, length)


def _retrieval(config: RetrievalDataConfig, model: DPRConfig) -> Samples:
    from headwater.data.records import open_records
    from headwater.data.text.fields import retrieval_fields

    lengths = [
        config.max_sequence_length or tower.max_position_embeddings
        for tower in (model.q_encoder, model.ctx_encoder)
    ]
    sizes = (model.q_encoder.vocab_size, model.ctx_encoder.vocab_size)
    fields = retrieval_fields(lengths[0], lengths[1], config.num_passages, vocab_sizes=sizes)
    return open_records(config.data_dir, fields, max(lengths))


def _preferences(config: PreferenceDataConfig, model: DPOConfig) -> Samples:
    from headwater.data.records import open_records
    from headwater.data.text.fields import preference_fields

    policy = model.policy_model
    length = config.max_sequence_length or policy.max_position_embeddings
    fields = preference_fields(length, vocab_size=policy.vocab_size)
    return open_records(config.data_dir, fields, length)


def _digits(config: MNISTDataConfig, model: FCMnistConfig | DiTConfig) -> Samples:
    from headwater.data.image.mnist import read_digits

    digits = read_digits(config)
    return digits if isinstance(model, FCMnistConfig) else _noised(digits, config, model)


def _corrupted_texts(config: SpanCorruptionDataConfig, model: Seq2SeqConfig) -> Samples:
    from headwater.data.text.span_corruption import read_corrupted_texts

    return read_corrupted_texts(config, model)


def _translations(config: TranslationDataConfig, model: Seq2SeqConfig) -> Samples:
    from headwater.data.text.translation import read_translations

    return read_translations(config, model)


def _labelled_images(config: ImageFolderDataConfig, model: ViTConfig) -> Samples:
    from headwater.data.image.folders import read_image_folders

    num_classes = min(model.num_classes, config.num_classes or model.num_classes)
    return read_image_folders(config, channels=model.num_channels, num_classes=num_classes)


def _image_texts(config: ImageTextDataConfig, model: MultimodalSection) -> Samples:
    from headwater.data.multimodal.samples import read_image_texts

    return read_image_texts(config, model)


def _segmented_images(config: SegmentationDataConfig, model: UNetConfig) -> Samples:
    from headwater.data.image.segmentation import read_segmented_images

    return read_segmented_images(config, channels=model.input_channels, num_classes=model.num_classes)


def _views(config: ViewDataConfig, model: DinoConfig) -> Samples:
    from headwater.data.image.views import read_views

    encoder = model.image_model_trunks[0].image_model
    crops, masks = config.ssl_transform.multi_crop_transform, config.ssl_transform.masked_patch_transform
    sizes = (crops.global_image_size,) * 2, (masks.patch_size,) * 2
    if sizes != (encoder.image_size, encoder.patch_size):
        raise ConfigError(
            f"the model expects images of {list(encoder.image_size)} with patches of "
            f"{list(encoder.patch_size)}, got {list(sizes[0])} and {list(sizes[1])}",
            where="ssl_transform",
            remedy="write the sizes of the model for global_image_size and patch_size",
        )
    return read_views(config, channels=encoder.num_channels)


def _latents(config: LatentDataConfig, model: DiTConfig) -> Samples:
    from headwater.data.image.latents import read_latents

    vae = model.vae
    num_classes = min(model.num_classes, config.num_classes or model.num_classes)
    latents = read_latents(
        config, shape=model.latent_shape, scaling_factor=vae.scaling_factor, num_classes=num_classes
    )
    return _noised(latents, config, model)


def _noised(images: Samples, config: LoaderSection, model: DiTConfig) -> Samples:
    from headwater.data.image.noise import NoisedImages

    return NoisedImages(
        images,
        model.latent_shape,
        steps=model.num_diffusion_steps,
        label_dropout=model.label_dropout_rate,
        seed=config.shuffle_seed or 0,
    )


# Each function imports its reader when it is called, because readers of images need further packages.
_OPENERS: dict[type, tuple[type | tuple[type, ...], Callable[[Any, Any], Samples]]] = {
    GptDataConfig: (DecoderConfig, _gpt),
    TextClassificationDataConfig: (ClassifierConfig, _labelled_texts),
    TokenClassificationDataConfig: (TokenClassifierConfig, _labelled_tokens),
    QuestionDataConfig: (QuestionAnsweringConfig, _questions),
    MaskedTextDataConfig: ((BertConfig, ClassifierConfig), _masked_texts),
    DynamicMaskDataConfig: (BertConfig, _dynamic_masks),
    AnswerDataConfig: (QuestionAnsweringConfig, _answers),
    SentencesDataConfig: (ExtractiveSummarizationConfig, _sentences),
    RetrievalDataConfig: (DPRConfig, _retrieval),
    PreferenceDataConfig: (DPOConfig, _preferences),
    MNISTDataConfig: ((FCMnistConfig, DiTConfig), _digits),
    LatentDataConfig: (DiTConfig, _latents),
    ViewDataConfig: (DinoConfig, _views),
    ImageFolderDataConfig: (ViTConfig, _labelled_images),
    ImageTextDataConfig: (MultimodalSection, _image_texts),
    SegmentationDataConfig: (UNetConfig, _segmented_images),
    SpanCorruptionDataConfig: (Seq2SeqConfig, _corrupted_texts),
    TranslationDataConfig: (Seq2SeqConfig, _translations),
}
"""Class of a data section -> the models that use such data, and the function that opens the data set."""


_LIBRARY_TASKS: dict[type, tuple[Task, ...]] = {
    GptDataConfig: ("causal_lm",),
    MaskedTextDataConfig: ("masked_lm", "sequence_classification"),
    DynamicMaskDataConfig: ("masked_lm",),
    SpanCorruptionDataConfig: ("seq2seq",),
    TranslationDataConfig: ("seq2seq",),
    TextClassificationDataConfig: ("sequence_classification",),
    ImageFolderDataConfig: ("image_classification",),
}
"""Class of a data section -> the tasks of the transformers models that use such data."""


def _names(kind: type) -> tuple[str, ...]:
    """Return the names in params files of the data processors that a class of data sections has."""
    return get_args(kind.model_fields["data_processor"].annotation)  # type: ignore[attr-defined]


_PROCESSORS = {name: tasks for kind, tasks in _LIBRARY_TASKS.items() for name in _names(kind)}
"""Name of a data processor in params files -> the tasks."""


def find_prepared(config: DataConfig) -> Path | None:
    """Return the folder that `headwater data` wrote, if the samples are in one."""
    places = getattr(config, "data_dir", None) or ()
    folders = [places] if isinstance(places, Path) else [each for each in places if isinstance(each, Path)]
    candidates = (folder.absolute().parent for folder in folders)
    return next((folder for folder in candidates if (folder / TOKENIZER_FILE).is_file()), None)
