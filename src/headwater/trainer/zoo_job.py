"""Runs of the models that come with the package."""

from __future__ import annotations

from torch import nn

from headwater.config.models import DecoderConfig, ModelConfig
from headwater.config.run import InitConfig, RunConfig
from headwater.config.sections import FitConfig
from headwater.core.errors import ConfigError
from headwater.fabric.fabric import ALONE, Fabric
from headwater.models.registry import FAMILIES, build_model, init_parameter, learning_rate_scale, meta_batch
from headwater.optim.param_groups import learning_rate_factors
from headwater.trainer.batches import num_samples
from headwater.trainer.datasets import find_tokenizer, open_data
from headwater.trainer.job import Average, Batch, Job, Trainable
from headwater.trainer.metrics import find_metrics
from headwater.trainer.ranks import check_alike
from headwater.trainer.run_dir import RunDir


def meta_model(config: ModelConfig) -> nn.Module:
    """The model without memory or values."""
    return build_model(config, device="meta")


def zoo_trainable(init: InitConfig, sequence_length: int | None = None) -> Trainable:
    """The model of the params, each parameter drawn from a stream of its own.

    Args:
        init: the params.
        sequence_length: tokens of a sample; the most that the model takes if not given.
    """
    model = meta_model(init.model)
    adjustments = init.optimizer.arguments.adjust_learning_rate
    factors = learning_rate_factors(adjustments, [name for name, _ in model.named_parameters()])
    family = FAMILIES[init.model.name]
    return Trainable(
        model=model,
        example=lambda size: meta_batch(init.model, size, sequence_length),
        initial=lambda spec: init_parameter(spec.name, spec.shape, init.model, init.seed),
        learning_rate_scale=lambda name: factors.get(name, 1.0) * learning_rate_scale(name, init.model),
        divisible=family.divisible,
        weight=lambda batch: _weight(init.model, batch),
        metrics=find_metrics(model),
        pretrained_names=lambda name: family.pretrained_names(name, init.model),
        parts=lambda name: family.public_parts(name, init.model),
        averages=[Average(*each) for each in family.averages(init.model)],
    )


def _weight(model: ModelConfig, batch: Batch) -> float:
    """What the loss of a batch is a mean of: labels, or else samples."""
    labels = FAMILIES[model.name].labels(model, batch)
    return float(num_samples(batch) if labels is None else labels)


def zoo_job(config: RunConfig, fabric: Fabric = ALONE) -> Job:
    """The training run that the params describe.

    Args:
        config: the params.
        fabric: the ranks that train together; the data are those of this one.

    Raises:
        ConfigError: if they have no training data.
        DataError: if the data are missing, malformed or do not fit the model.
    """
    init, section = config.init, fit_section(config)
    train = open_data(section.train_dataloader, init.model, seed=init.seed, repeat=True, fabric=fabric)
    if fabric.size > 1:
        check_alike(fabric, {"training set": train.fingerprint()})
    evaluations = [
        open_data(each, init.model, seed=init.seed, repeat=False, fabric=fabric)
        for each in section.val_dataloader
    ]

    def write(run_dir: RunDir) -> None:
        run_dir.write_params(config)
        run_dir.keep_tokenizer(find_tokenizer(section.train_dataloader))

    batch_size = section.train_dataloader.batch_size
    return Job(
        init=init,
        trainable=zoo_trainable(init, train.sequence_length),
        train=train.create_dataloader(),
        batch_size=batch_size,
        evaluations=[data.create_dataloader() for data in evaluations],
        steps_per_epoch=train.num_samples // batch_size,
        checkpoint=section.ckpt_path,
        write=write,
    )


def language_model(config: RunConfig) -> DecoderConfig:
    """The model, which continues texts.

    Raises:
        ConfigError: if it is one that does not.
    """
    model = config.init.model
    if not isinstance(model, DecoderConfig):
        raise ConfigError(
            f"a {model.name} does not continue texts",
            where=f"{config.source}: trainer.init.model.name",
            remedy="name a run whose model is a decoder",
        )
    return model


def fit_section(config: RunConfig) -> FitConfig:
    """The section `fit`.

    Raises:
        ConfigError: if there is none.
    """
    if config.fit is None:
        raise ConfigError(
            "the params have no data to train on",
            where=str(config.source),
            remedy="add trainer.fit.train_dataloader",
        )
    return config.fit
