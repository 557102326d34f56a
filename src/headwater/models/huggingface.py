"""Models of the transformers library, trained with the loss that the library computes."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headwater.config.models.huggingface import CONFIG_FILE, HuggingFaceConfig, Task, auto_class
from headwater.core.empty import empty_parameters, give_values
from headwater.core.errors import ConfigError, DataError
from headwater.core.seeding import derive_seed
from headwater.models.evaluation import Scored

IGNORED = -100
"""Label that the library leaves out of a loss."""


class HuggingFaceModel(nn.Module):
    """A model of the transformers library. `forward` returns the library's own loss.

    Args:
        config: the model section of a params file.
        fused_loss: has no effect; the loss is the library's own.
        seed: seed of random initial weights.

    Attributes:
        hf: the library's model.
        scored: what is counted in eval mode, by name.
    """

    def __init__(self, config: HuggingFaceConfig, *, fused_loss: bool = True, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.task = config.kind
        with torch.device("cpu"), empty_parameters():
            self.hf = _built(config)
        if torch.get_default_device().type != "meta":
            for name, parameter in list(self.named_parameters()):
                give_values(parameter, init_parameter(name, parameter.shape, config, seed))
        self._accepted = inspect.signature(type(self.hf).forward).parameters
        is_classifier = self.task.endswith("classification")
        self.scored = {"accuracy": Scored("accuracy")} if is_classifier else {}

    @property
    def divisible(self) -> bool:
        """True if the mean of the losses of micro-batches, weighted by labels, is the loss of the batch."""
        balanced = getattr(self.hf.config.get_text_config(), "output_router_logits", False)
        of_batch = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in self.modules())
        return not (balanced or of_batch)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the library's loss of a batch as the data pipelines make it, a scalar.

        Raises:
            DataError: if several texts lie in one sequence, which these models cannot tell apart.
        """
        arguments = library_arguments(self.task, batch)
        output = self.hf(**{key: value for key, value in arguments.items() if key in self._accepted})
        loss: Tensor = output.loss
        if not self.training and self.scored:
            self.scored["accuracy"].add(output.logits.argmax(-1) == batch["labels"])
        return loss

    @property
    def max_length(self) -> int:
        """Longest sequence in tokens."""
        return self.config.max_position_embeddings

    def new_cache(self, max_length: int) -> Context:
        """Return an empty context for the generation of one sequence."""
        return Context()

    def next_logits(self, input_ids: Tensor, cache: Context | None = None) -> Tensor:
        """Return the logits [batch, vocab] of the token after the last of `input_ids` [batch, seq]."""
        context = Context() if cache is None else cache
        context.add(input_ids)
        if "past_key_values" in self._accepted:
            output = self.hf(input_ids=input_ids, past_key_values=context.state, use_cache=True)
            context.state = output.past_key_values
        else:
            output = self.hf(input_ids=context.tokens)
        logits: Tensor = output.logits[:, -1]
        return logits


class Context:
    """The tokens that a model has read, and the library's state of a model that keeps one.

    Attributes:
        tokens: all tokens so far, [batch, seq]; `None` before the first.
        state: the library's cache of keys and values, if the model takes one.
    """

    def __init__(self) -> None:
        self.tokens: Tensor | None = None
        self.state: Any = None

    def add(self, input_ids: Tensor) -> None:
        """Append tokens."""
        self.tokens = input_ids if self.tokens is None else torch.cat([self.tokens, input_ids], 1)


def library_arguments(task: Task, batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the arguments with which the library's model returns the loss of `batch`.

    Raises:
        DataError: if several texts lie in one sequence.
    """
    if "attention_span" in batch:
        raise DataError(
            "several texts lie in one sequence, and this model cannot keep them apart",
            remedy="prepare the data without --use_vsl, or write use_vsl: false in the data section",
        )
    if task == "causal_lm":
        return {
            "input_ids": batch["input_ids"].long(),
            "labels": _shifted_back(batch),
            "use_cache": False,
        }
    if task == "masked_lm":
        texts = {key: batch[key].long() for key in _TEXTS if key in batch}
        return texts | {"labels": _masked_labels(batch)}
    if task == "seq2seq":
        texts = {key: batch[key].long() for key in (*_TEXTS, *_WRITTEN)}
        labels = batch["labels"].long().masked_fill(batch["decoder_attention_mask"] == 0, IGNORED)
        return texts | {"labels": labels, "use_cache": False}
    if task == "image_classification":
        return {"pixel_values": batch["inputs"], "labels": batch["labels"].long()}
    texts = {key: batch[key].long() for key in (*_TEXTS, "token_type_ids") if key in batch}
    return texts | {"labels": batch["labels"].long()}


_TEXTS = ("input_ids", "attention_mask")
_WRITTEN = ("decoder_input_ids", "decoder_attention_mask")


def _shifted_back(batch: Mapping[str, Tensor]) -> Tensor:
    """The labels as the library wants them: each is the token at its own place, [batch, seq].

    The data give each token the label that follows it. The library shifts labels by itself, so that the last
    label of a sample, whose token the model does not read, is left out.
    """
    labels = batch["labels"].long().masked_fill(batch["attention_mask"] == 0, IGNORED)
    return torch.cat([torch.full_like(labels[:, :1], IGNORED), labels[:, :-1]], 1)


def _masked_labels(batch: Mapping[str, Tensor]) -> Tensor:
    """The hidden tokens at their places, and `IGNORED` elsewhere, [batch, seq]."""
    tokens = batch["input_ids"].long()
    count = tokens.shape[1]
    counted = batch["masked_lm_weights"] > 0
    places = batch["masked_lm_positions"].long().masked_fill(~counted, count)
    # One more place takes the predictions that do not count.
    labels = tokens.new_full((len(tokens), count + 1), IGNORED)
    return labels.scatter(1, places, batch["masked_lm_ids"].long())[:, :count].contiguous()


def num_labels(config: HuggingFaceConfig, batch: Mapping[str, Tensor]) -> Tensor | None:
    """Return the labels over which the loss of a batch is a mean; `None` if it is a mean over samples."""
    if config.kind == "causal_lm":
        return (_shifted_back(batch) != IGNORED).sum()
    if config.kind == "masked_lm":
        return (batch["masked_lm_weights"] > 0).sum()
    if config.kind == "seq2seq":
        return (batch["decoder_attention_mask"] != 0).sum()
    return None


def _built(config: HuggingFaceConfig) -> Any:
    """The library's model in fp32, its parameters without values."""
    task, library_config = config.kind, copy.deepcopy(config.architecture)
    try:
        return auto_class(task).from_config(library_config, dtype=torch.float32, trust_remote_code=False)
    except Exception as error:  # the constructors of models raise exceptions of any class
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(
            f"the transformers library cannot build this model for the task {task}: {lines[0][:300]}",
            where=str(config.hf / CONFIG_FILE),
            remedy="correct config.json, or write another task",
        ) from error


@functools.lru_cache(maxsize=1)
def _outline(config: HuggingFaceConfig) -> HuggingFaceModel:
    """The model without values."""
    with torch.device("meta"):
        return HuggingFaceModel(config)


def init_parameter(name: str, shape: Sequence[int], config: HuggingFaceConfig, seed: int) -> Tensor:
    """Return a random initial value of the parameter called `name`, fp32 on the CPU, as the library draws it.

    Raises:
        ConfigError: if the library gives the parameter its value outside of its rules for initial weights.
    """
    model = _outline(config)
    path, _, leaf = name.rpartition(".")
    owner = model.get_submodule(path)
    outline, real = owner._parameters[leaf], nn.Parameter(torch.full(tuple(shape), torch.nan, device="cpu"))
    # Only this parameter has values for a moment; what the rules do to the others has no effect.
    owner._parameters[leaf] = real
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(seed, "init", name))
            _apply_rules(model.hf, path.removeprefix("hf").removeprefix("."))
    finally:
        owner._parameters[leaf] = outline
    if real.isnan().any():
        raise ConfigError(
            f"the transformers library has no rule for the initial value of {name}",
            where="trainer.init.model.weights",
            remedy="name a folder with weights: save the model with save_pretrained",
        )
    return real.detach()


def _apply_rules(model: Any, path: str) -> None:
    """Apply the library's rules for initial weights to a module and then to each module around it."""
    parts = path.split(".") if path else []
    around = [model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts), -1, -1)]
    for index, module in enumerate(around):
        nearest = next(each for each in around[index:] if hasattr(each, "_init_weights"))
        nearest._init_weights(module)
