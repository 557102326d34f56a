"""The models and batches of the measurements: Llama shapes with random weights, on random tokens."""

from __future__ import annotations

import argparse
import dataclasses

import torch

from headwater.config.models.decoder import DecoderConfig


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of a Llama."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int

    def config(self, sequence: int) -> DecoderConfig:
        """Return the model section of a params file."""
        return DecoderConfig.model_validate(
            {
                "name": "llama",
                "hidden_size": self.width,
                "num_hidden_layers": self.layers,
                "num_heads": self.heads,
                "attention_module": "multiquery_attention",
                "extra_attention_params": {"num_kv_groups": self.kv_heads},
                "filter_size": self.ffn,
                "vocab_size": self.vocab,
                "max_position_embeddings": sequence,
            }
        )

    @property
    def parameters(self) -> int:
        """The number of parameters, norms left out."""
        head = self.width // self.heads
        attention = 2 * self.width * self.width + 2 * self.width * self.kv_heads * head
        return self.layers * (attention + 3 * self.width * self.ffn) + 2 * self.vocab * self.width


SHAPES = {
    "tiny": Shape(2, 64, 4, 2, 128, 256),
    "1.3B": Shape(24, 2048, 16, 16, 5504, 32_000),
    "8B": Shape(32, 4096, 32, 8, 14_336, 128_256),
    "14B": Shape(40, 5120, 40, 8, 17_408, 151_936),
    "20B": Shape(48, 6144, 48, 8, 16_384, 100_352),
}


@dataclasses.dataclass(frozen=True)
class Load:
    """A model, and the batch of a step.

    Attributes:
        shape: a name in `SHAPES`.
        sequence: tokens of a sequence.
        batch: sequences of a step.
        dtype: `bf16` (fp32 masters), `fp32`, or `pure_bf16` (masters and optimizer state in bf16).
        steps: steps that are timed, after `warmup` others.
        warmup: steps before.
        device: `cuda` or `cpu`.
    """

    shape: str = "1.3B"
    sequence: int = 1024
    batch: int = 64
    dtype: str = "bf16"
    steps: int = 4
    warmup: int = 2
    device: str = "cuda"

    @property
    def learning_rate(self) -> float:
        return 3e-4

    @property
    def tokens_per_step(self) -> int:
        return self.sequence * self.batch

    @property
    def flops_per_step(self) -> float:
        """The FLOPs that the model needs: 6 for each parameter and token, and those of attention scores."""
        shape = SHAPES[self.shape]
        scores = 6 * shape.layers * shape.width * self.sequence  # causal: half of 12
        return self.tokens_per_step * float(6 * shape.parameters + scores)

    def config(self) -> DecoderConfig:
        """Return the model section of a params file."""
        return SHAPES[self.shape].config(self.sequence)

    def tokens(self, step: int) -> torch.Tensor:
        """Return the token ids of a step, [batch, sequence + 1]; two batches take turns."""
        generator = torch.Generator().manual_seed(1234 + step % 2)
        vocab = SHAPES[self.shape].vocab
        return torch.randint(0, vocab, (self.batch, self.sequence + 1), generator=generator)

    def options(self) -> list[str]:
        """Return the command-line options of this load."""
        return [f"--{key}={value}" for key, value in dataclasses.asdict(self).items()]


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one option for each field of `Load`."""
    for field in dataclasses.fields(Load):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)


def load_of(args: argparse.Namespace) -> Load:
    """Return the load of these options."""
    return Load(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Load)})
