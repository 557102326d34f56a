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
from headwater.core.batches import IGNORED
from headwater.core.empty import empty_parameters, give_values
from headwater.core.errors import ConfigError, DataError
from headwater.core.initialization import initialize
from headwater.core.seeding import derive_seed
from headwater.models.evaluation import Accuracy
from headwater.models.layers.attention import KeyValueCache
from headwater.models.library_attention import can_read_side_by_side, side_by_side_attention
from headwater.models.library_loss import divide_losses
from headwater.models.padding import CAUSAL, ENCODER, PAIRS, Texts
from headwater.models.sequences import Piece, last_places, positions, side_by_side


class HuggingFaceModel(nn.Module):
    """A model of the transformers library. `forward` returns the loss that the library computes.

    Args:
        config: the model section of a params file.
        seed: seed of random initial weights.

    Attributes:
        hf: the library's model.
        scored: metrics that are updated in eval mode, by name.
    """

    def __init__(self, config: HuggingFaceConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.task = config.kind
        # On the CPU under any default device: constructors compute buffers that checkpoints may lack.
        with torch.device("cpu"), empty_parameters():
            self.hf = _built(config)
        divide_losses(self.hf)
        if torch.get_default_device().type != "meta":
            for name, parameter in list(self.named_parameters()):
                give_values(parameter, init_parameter(name, parameter.shape, config, seed))
        self._accepted = inspect.signature(type(self.hf).forward).parameters
        self._reads_side_by_side = "position_ids" in self._accepted and can_read_side_by_side(self.hf)
        is_classifier = self.task.endswith("classification")
        self.scored = {"accuracy": Accuracy("accuracy")} if is_classifier else {}

    @property
    def divisible(self) -> bool:
        """True if the batch's loss is the mean of its micro-batches' losses, weighted by labels."""
        balanced = getattr(self.hf.config.get_text_config(), "output_router_logits", False)
        of_batch = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in self.modules())
        return not (balanced or of_batch)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the library's loss of a batch of our data pipelines, a scalar.

        Raises:
            DataError: if several texts are packed into a sequence, which these models cannot keep apart.
        """
        arguments = library_arguments(self.task, batch)
        output = self.hf(**{key: value for key, value in arguments.items() if key in self._accepted})
        loss: Tensor = output.loss
        if not self.training and self.scored:
            self.scored["accuracy"].add(output.logits.argmax(-1) == batch["labels"])
        return loss

    @property
    def padding_id(self) -> int:
        """The token id that fills sequences."""
        return int(getattr(self.hf.config.get_text_config(), "pad_token_id", None) or 0)

    def logits_at(self, input_ids: Tensor, attention_mask: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        """Return the logits [n, vocab] at `places` [n] of the sequences `rows` [n].

        Args:
            input_ids: token ids, [batch, seq].
            attention_mask: 0 for padding, [batch, seq].
            rows: numbers of sequences.
            places: positions in these sequences.
        """
        logits: Tensor = self.hf(input_ids=input_ids, attention_mask=attention_mask).logits
        return logits[rows, places]

    @property
    def max_length(self) -> int:
        """Maximum length of a sequence in tokens."""
        return self.config.max_position_embeddings

    def new_cache(self, max_length: int) -> KeyValueCache | Context:
        """Return an empty cache for a sequence of up to `max_length` tokens."""
        if self._reads_side_by_side:
            return KeyValueCache(self.hf.config.get_text_config().num_hidden_layers, max_length)
        return Context()

    def next_logits(self, pieces: Sequence[Piece]) -> Tensor:
        """Return the logits [pieces, vocab] of the token after the last one of each piece.

        Most models read all pieces in one forward. The others, such as those with states instead of keys and
        values, need one forward for each piece.
        """
        if not self._reads_side_by_side:
            return torch.cat([self._logits_after(piece.tokens[None], piece.cache) for piece in pieces])
        last = last_places(pieces)
        arguments = {"logits_to_keep": last} if "logits_to_keep" in self._accepted else {}
        with side_by_side_attention(self.hf, pieces):
            output = self.hf(
                input_ids=side_by_side(pieces),
                position_ids=positions(pieces)[None],
                use_cache=False,
                **arguments,
            )
        return output.logits[0] if arguments else output.logits[0, last]  # type: ignore[no-any-return]

    def _logits_after(self, input_ids: Tensor, context: Context) -> Tensor:
        """Return the logits [1, vocab] of the token after `input_ids` [1, seq], which the context gets."""
        context.add(input_ids)
        if "past_key_values" in self._accepted:
            output = self.hf(input_ids=input_ids, past_key_values=context.state, use_cache=True)
            context.state = output.past_key_values
        else:
            output = self.hf(input_ids=context.tokens)
        logits: Tensor = output.logits[:, -1]
        return logits

    def token_scores(
        self, input_ids: Tensor, positions: Tensor, rows: Tensor, columns: Tensor, targets: Tensor
    ) -> Tensor:
        """Return the log-likelihoods of tokens, and which of them are the most likely ones.

        Arguments and result are those of `Decoder.token_scores`. All logits at `positions` are in memory at
        once.
        """
        arguments = {"use_cache": False} if "use_cache" in self._accepted else {}
        if "logits_to_keep" in self._accepted:
            logits = self.hf(input_ids=input_ids, logits_to_keep=positions, **arguments).logits
        else:
            logits = self.hf(input_ids=input_ids, **arguments).logits[:, positions]
        scores = logits[rows, columns].float().log_softmax(-1)
        found = scores.gather(1, targets.unsqueeze(1)).squeeze(1)
        return torch.stack([found, (scores.argmax(1) == targets).to(found.dtype)])


class Context:
    """The tokens that a model has read of one sequence, and the library's cache if the model uses one.

    Attributes:
        tokens: all tokens so far, [1, seq]; `None` before the first.
        state: the library's cache of keys and values, or of states, if the model accepts one.
    """

    def __init__(self) -> None:
        self.tokens: Tensor | None = None
        self.state: Any = None

    @property
    def length(self) -> int:
        """Tokens that were read."""
        return 0 if self.tokens is None else self.tokens.shape[1]

    def skip(self, count: int) -> int:
        """Return 0: the library's cache has no size before the tokens are read."""
        return 0

    def fork(self) -> Context:
        """Return a copy, for another continuation of the same tokens."""
        return copy.deepcopy(self)

    def add(self, input_ids: Tensor) -> None:
        """Append tokens."""
        self.tokens = input_ids if self.tokens is None else torch.cat([self.tokens, input_ids], 1)


def library_arguments(task: Task, batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the arguments of the library's model for a batch of our data pipelines.

    Raises:
        DataError: if several texts are packed into a sequence.
    """
    if "attention_span" in batch:
        raise DataError(
            "several texts are packed into a sequence, but this model cannot keep them apart",
            where="attention_span of the batch",
            remedy="prepare the data without --use_vsl, or set use_vsl: false in the data section",
        )
    if task == "causal_lm":
        return {
            "input_ids": batch["input_ids"].long(),
            "labels": _shifted_back(batch),
            # Otherwise the library would keep the keys and values of the whole batch.
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
    """Return the labels [batch, seq], moved back so that each is the token at its own position.

    In our data the label of a token is the next token. The library shifts the labels itself. The last label
    of a sample is lost, because the model does not read its token.
    """
    labels = batch["labels"].long().masked_fill(batch["attention_mask"] == 0, IGNORED)
    return torch.cat([torch.full_like(labels[:, :1], IGNORED), labels[:, :-1]], 1)


def _masked_labels(batch: Mapping[str, Tensor]) -> Tensor:
    """Return the original ids at masked positions, and `IGNORED` elsewhere, [batch, seq]."""
    tokens = batch["input_ids"].long()
    count = tokens.shape[1]
    counted = batch["masked_lm_weights"] > 0
    places = batch["masked_lm_positions"].long().masked_fill(~counted, count)
    # One extra position takes the predictions that do not count, and is cut off again.
    labels = tokens.new_full((len(tokens), count + 1), IGNORED)
    # Contiguous: the losses of the library call `view` on the labels.
    return labels.scatter(1, places, batch["masked_lm_ids"].long())[:, :count].contiguous()


def num_labels(config: HuggingFaceConfig, batch: Mapping[str, Tensor]) -> Tensor | None:
    """Return the number of labels over which the loss of a batch is a mean; `None`: a mean over samples."""
    if config.kind == "causal_lm":
        return (_shifted_back(batch) != IGNORED).sum()
    if config.kind == "masked_lm":
        return (batch["masked_lm_weights"] > 0).sum()
    if config.kind == "seq2seq":
        return (batch["decoder_attention_mask"] != 0).sum()
    return None


def texts(config: HuggingFaceConfig) -> Sequence[Texts]:
    """Return the texts in a batch, whose padding need not be computed; none for images."""
    if config.kind == "causal_lm":
        # One more position than labels in the batch: see `_shifted_back`.
        return (Texts(CAUSAL, lambda batch: _shifted_back(batch) != IGNORED),)
    if config.kind == "seq2seq":
        return PAIRS
    return () if config.kind == "image_classification" else ENCODER


def _built(config: HuggingFaceConfig) -> Any:
    """Return the library's model in fp32; its parameters have no values.

    Raises:
        ConfigError: if the library cannot build the model for the task.
    """
    task, library_config = config.kind, copy.deepcopy(config.architecture)
    try:
        return auto_class(task).from_config(library_config, dtype=torch.float32, trust_remote_code=False)
    except Exception as error:  # constructors of the library's models raise exceptions of any class
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(
            f"the transformers library cannot build this model for the task {task}: {lines[0][:300]}",
            where=str(config.hf / CONFIG_FILE),
            remedy="correct config.json, or set another task",
        ) from error


@functools.lru_cache(maxsize=1)
def _outline(config: HuggingFaceConfig) -> HuggingFaceModel:
    """Construct the model on the meta device, without values, and return it."""
    with torch.device("meta"):
        return HuggingFaceModel(config)


def init_parameter(name: str, shape: Sequence[int], config: HuggingFaceConfig, seed: int) -> Tensor:
    """Return the random initial value of parameter `name`, fp32 on the CPU, as the library draws it.

    Raises:
        ConfigError: if the library's rules for initial weights do not cover the parameter.
    """
    model = _outline(config)
    path, _, leaf = name.rpartition(".")
    owner = model.get_submodule(path)
    # NaN marks the elements that the rules do not set.
    outline, real = owner._parameters[leaf], nn.Parameter(torch.full(tuple(shape), torch.nan, device="cpu"))
    # Only this parameter has memory for now: the rules have no effect on the others, which stay on meta.
    owner._parameters[leaf] = real
    try:
        # The library draws from torch's global generator, whose state belongs to the run.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(seed, "init", name))
            initialize(model.hf, [name.removeprefix("hf.")])
    finally:
        owner._parameters[leaf] = outline
    if real.isnan().any():
        raise ConfigError(
            f"the transformers library has no rule for the initial value of {name}",
            where="trainer.init.model.weights",
            remedy="save the model with save_pretrained, and set weights to that folder",
        )
    return real.detach()
