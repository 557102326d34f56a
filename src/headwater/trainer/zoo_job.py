"""Runs of the models that come with the package."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import nn

from headwater.config.models import ModelConfig
from headwater.config.models.decoder import DecoderConfig
from headwater.config.models.encoder import BertConfig
from headwater.config.models.huggingface import HuggingFaceConfig
from headwater.config.models.preference import DPOConfig
from headwater.config.run import InitConfig, RunConfig
from headwater.config.sections import FitConfig
from headwater.core.batches import num_samples
from headwater.core.errors import ConfigError
from headwater.fabric.consistency import check_consistency
from headwater.fabric.fabric import ALONE, Fabric
from headwater.fabric.membership import current
from headwater.models.huggingface import HuggingFaceModel
from headwater.models.layers.attention import use_torch_attention
from headwater.models.liger import use_liger
from headwater.models.padding import Texts, sorted_by_length, without_padding
from headwater.models.registry import FAMILIES, build_model, init_parameter, learning_rate_scale, meta_batch
from headwater.optim.param_groups import learning_rate_factors
from headwater.plan.options import device_of
from headwater.stream.options import Initial
from headwater.trainer.datasets import errors_of, find_prepared, open_data
from headwater.trainer.huggingface import LibraryValues, weights_folder
from headwater.trainer.job import Average, Batch, Job, Trainable
from headwater.trainer.metrics import find_metrics
from headwater.trainer.run_dir import RunDir
from headwater.trainer.waits import log_if_long


def meta_model(config: ModelConfig) -> nn.Module:
    """Return the model on the meta device, without memory or values."""
    return build_model(config, device="meta")


def count_parameters(config: ModelConfig) -> int:
    """Return the number of parameters of a model, without memory for them. Shared weights count once."""
    return sum(value.numel() for value in meta_model(config).parameters())


def zoo_trainable(init: InitConfig, sequence_length: int | None = None) -> Trainable:
    """Return the model of the params. Each parameter is drawn from a separate random stream.

    Args:
        init: the params.
        sequence_length: tokens of a sample; the model's maximum if not given.
    """
    with log_if_long("building the model", current()):
        model = meta_model(init.model)
    if init.backend.loss == "liger":
        use_liger(model, device_of(init.backend))
    if init.backend.attention == "torch":
        use_torch_attention(model)
    adjustments = init.optimizer.arguments.adjust_learning_rate
    factors = learning_rate_factors(adjustments, [name for name, _ in model.named_parameters()])
    family = FAMILIES[init.model.name]
    initial: Initial = lambda spec: init_parameter(spec.name, spec.shape, init.model, init.seed)  # noqa: E731
    if isinstance(model, HuggingFaceModel):
        initial = LibraryValues(model, init.seed)
    texts = _texts(init, model) if init.backend.skip_padding else ()
    return Trainable(
        model=model,
        example=lambda size: meta_batch(init.model, size, sequence_length),
        initial=initial,
        check_initial=initial.check if isinstance(initial, LibraryValues) else lambda: None,
        learning_rate_scale=lambda name: factors.get(name, 1.0) * learning_rate_scale(name, init.model),
        divisible=model.divisible if isinstance(model, HuggingFaceModel) else family.divisible,
        weight=lambda batch: _weight(init.model, batch),
        sort=lambda batch: sorted_by_length(batch, texts) if texts else batch,
        cut=lambda batch: without_padding(batch, texts),
        metrics=find_metrics(model),
        pretrained_names=lambda name: family.pretrained_names(name, init.model),
        parts=lambda name: family.public_parts(name, init.model),
        averages=[Average(*each) for each in family.averages(init.model)],
    )


def _texts(init: InitConfig, model: nn.Module) -> Sequence[Texts]:
    """Return the texts in a batch of the model.

    Raises:
        ConfigError: if the loss of the model also depends on the padding, or the model reads no texts.
    """
    texts = FAMILIES[init.model.name].texts(init.model)
    if not texts or (isinstance(model, HuggingFaceModel) and not model.divisible):
        raise ConfigError(
            f"skip_padding does not work for this {init.model.name}: its loss depends on the padding, or "
            "it reads no padded texts",
            where="trainer.init.backend.skip_padding",
            remedy="leave skip_padding out",
        )
    return texts


def _weight(model: ModelConfig, batch: Batch) -> float:
    """Return the number of labels, or else of samples, over which the loss of a batch is a mean."""
    labels = FAMILIES[model.name].labels(model, batch)
    return float(num_samples(batch) if labels is None else labels)


def zoo_job(config: RunConfig, fabric: Fabric = ALONE) -> Job:
    """Return the input of the training run that the params describe.

    Args:
        config: the params.
        fabric: the ranks that train together; the data are those of this rank.

    Raises:
        ConfigError: if the params have no training data.
        DataError: if the data are missing, malformed or do not fit the model.
    """
    init, section = config.init, fit_section(config)
    count = init.backend.cluster_config.num_workers_per_csx
    with errors_of("trainer.fit.train_dataloader"):
        train = open_data(
            section.train_dataloader,
            init.model,
            seed=init.seed,
            repeat=True,
            fabric=fabric,
            workers_per_csx=count,
        )
    # Even with equal params, the same path may have other files on another host.
    if fabric.size > 1:
        check_consistency(fabric, {"training set": train.fingerprint()})
    with errors_of("trainer.fit.val_dataloader"):
        evaluations = [
            open_data(each, init.model, seed=init.seed, repeat=False, fabric=fabric)
            for each in section.val_dataloader
        ]

    def write(run_dir: RunDir) -> None:
        run_dir.write_params(_kept(config, run_dir))
        if section.ckpt_path is not None:
            run_dir.keep_files_of(section.ckpt_path)
        prepared = find_prepared(section.train_dataloader)
        if prepared is not None:
            run_dir.keep_data_files(prepared)

    batch_size = section.train_dataloader.batch_size
    return Job(
        init=init,
        trainable=zoo_trainable(init, train.sequence_length),
        train=train.create_dataloader(),
        batch_size=batch_size,
        evaluations=[data.create_dataloader() for data in evaluations],
        steps_per_epoch=train.num_samples // batch_size,
        checkpoint=section.ckpt_path,
        data_workers=data_workers(section),
        write=write,
    )


def data_workers(section: FitConfig) -> int:
    """Return how many processes read data at once. Workers of different loaders run at the same time."""
    return sum(loader.num_workers for loader in (section.train_dataloader, *section.val_dataloader))


def _kept(config: RunConfig, run_dir: RunDir) -> RunConfig:
    """Return the params with a transformers model's folder replaced by its copy in the run's folder."""
    model = config.init.model
    if not isinstance(model, HuggingFaceConfig):
        return config
    # The copy below has no weights, so the params must name the folder that has them.
    if model.weights is None:
        model = model.model_copy(update={"weights": weights_folder(model) or "random"})
    kept = run_dir.keep_library_model(model)
    return dataclasses.replace(config, init=config.init.model_copy(update={"model": kept}))


def policy_names(name: str) -> tuple[str, ...]:
    """Return names of a policy's parameter in a checkpoint of preference tuning, the preferred one first."""
    return (f"policy.{name}", f"reference.{name}")


def language_model(config: RunConfig) -> DecoderConfig | HuggingFaceConfig:
    """Return the section of the model that continues texts; for preference tuning, that of the policy.

    Raises:
        ConfigError: if the model does not continue texts.
    """
    model = config.init.model
    if isinstance(model, DPOConfig):
        return model.policy_model
    if isinstance(model, HuggingFaceConfig) and model.kind == "causal_lm":
        return model
    if not isinstance(model, DecoderConfig):
        raise ConfigError(
            f"a {model.name} does not continue texts",
            where=f"{config.source}: trainer.init.model.name",
            remedy="name a run whose model is a decoder",
        )
    return model


def masked_model(config: RunConfig) -> BertConfig | HuggingFaceConfig | None:
    """Return the section of a model that predicts masked tokens; `None` for other models."""
    model = config.init.model
    if isinstance(model, BertConfig) or (isinstance(model, HuggingFaceConfig) and model.kind == "masked_lm"):
        return model
    return None


def fit_section(config: RunConfig) -> FitConfig:
    """Return the section `fit`.

    Raises:
        ConfigError: if the params do not have it.
    """
    if config.fit is None:
        raise ConfigError(
            "the params have no data to train on",
            where=str(config.source),
            remedy="add trainer.fit.train_dataloader",
        )
    return config.fit
