"""RoundPipe and MegaTrain, which also stream weights. They train the same module on the same tokens.

Both need a GPU. RoundPipe is on PyPI. MegaTrain has no package: the environment variable MEGATRAIN names a
folder with its source.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.shapes import Load
from benchmarks.systems.headwater_ import batch_of
from headwater.models.decoder import Decoder
from headwater.models.layers.attention import AttentionContext

MEGATRAIN = "MEGATRAIN"
"""The environment variable with the folder of MegaTrain's source."""

_MICRO_BATCH_TOKENS = 16_384
"""RoundPipe gets micro-batches of about this many tokens, and at least two of them."""


class NotInstalledError(RuntimeError):
    """The package of a system is not installed here."""


def check_presence(system: str) -> None:
    """Raise `NotInstalledError` if a system of this module is not here. Called before weights are drawn."""
    if system != "megatrain":
        require(system)
        return
    folder = os.environ.get(MEGATRAIN)
    if not folder:
        raise NotInstalledError(f"{MEGATRAIN} is not set to a folder with the source of megatrain")
    if not (Path(folder) / "infinity").is_dir():
        raise NotInstalledError(f"{MEGATRAIN} is {folder}, which has no folder `infinity`")


def require(package: str) -> None:
    """Raise `NotInstalledError` if a package is not installed."""
    if importlib.util.find_spec(package) is None:
        raise NotInstalledError(f"{package} is not installed here")


# RoundPipe: a sequence of layers. Each layer gets the result of the layer before.


class _First(nn.Module):
    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.embedding = model.embedding
        self._rotations = model._rotations

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        turns = self._rotations(places)
        assert turns is not None, "a Llama rotates queries and keys"
        return (self.embedding(input_ids), *turns, labels)


class _Middle(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, cosines, sines, labels = given
        return self.block(x, AttentionContext(None, (cosines, sines)))[0], cosines, sines, labels


class _Last(nn.Module):
    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.norm, self.head = model.norm, model.head

    def forward(self, given: tuple[Tensor, ...]) -> Tensor:
        x, _, _, labels = given
        weights = torch.full(labels.shape, 1 / labels.numel(), device=labels.device)
        loss: Tensor = self.head(self.norm(x), labels, weights)
        return loss


def roundpipe(load: Load, model: nn.Module) -> tuple[Callable[[int], float], dict[str, str]]:
    """Return the step of RoundPipe, and remarks on how it was set up.

    Args:
        load: the batches.
        model: the module, in host memory, in bf16.
    """
    import roundpipe as package

    assert isinstance(model, Decoder), "the shapes are decoders"
    count = max(2, load.tokens_per_step // _MICRO_BATCH_TOKENS)
    pipe = package.RoundPipe(
        nn.Sequential(_First(model), *map(_Middle, model.blocks), _Last(model)),
        optim_dtype=torch.bfloat16 if load.dtype == "pure_bf16" else torch.float32,
        name="model",
        model_run_config=package.RoundPipeRunConfig(num_microbatch=count),
        # By default torch would lock up to twice the memory.
        pin_model="register" if load.device == "cuda" else "off",
    )
    optimizer, remark = _optimizer_of(package, pipe.optim_parameters(), load)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def step(index: int) -> float:
        batch = batch_of(load.tokens(index))
        loss = pipe.forward_backward(
            input_args=(batch["input_ids"], batch["labels"]), loss_fn=lambda loss, _: loss / count
        )
        pipe.step(update)
        return float(loss)

    remarks = {"optimizer": remark, "updates": "beside the next step, whose weights are one step old"}
    return step, remarks | {"micro_batches": str(count)}


def _optimizer_of(
    package: Any, params: Iterable[nn.Parameter], load: Load
) -> tuple[torch.optim.Optimizer, str]:
    """Return RoundPipe's optimizer, which it compiles. It is for fp32; torch's if it cannot be compiled."""
    params, lr = list(params), load.learning_rate
    if load.dtype == "pure_bf16":
        return torch.optim.AdamW(params, lr=lr, fused=True), "torch's fused AdamW: its own has no bf16"
    try:
        own = package.optim.Adam(params, lr=lr, weight_decay=0.01, decoupled_weight_decay=True)
    except (OSError, RuntimeError, ImportError) as error:
        reason = (str(error).splitlines() or ["no reason was given"])[0]
        return torch.optim.AdamW(params, lr=lr, fused=True), f"torch's fused AdamW: its own failed: {reason}"
    return own, "its own AdamW"


# MegaTrain: a model with the attributes that the package looks for, as models of transformers have them.


class _Rotary(nn.Module):
    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self._rotations = model._rotations

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        turns = self._rotations(positions)
        assert turns is not None, "a Llama rotates queries and keys"
        return turns

    def __deepcopy__(self, memo: object) -> _Rotary:
        return self  # it has no weights, and its function belongs to the whole model


class _Layer(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(
        self,
        x: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        use_cache: bool = False,
        output_attentions: bool = False,
    ) -> Tensor:
        # The package passes the other arguments too.
        after: Tensor = self.block(x, AttentionContext(None, position_embeddings))[0]
        return after


class _LikeTransformers(nn.Module):
    def __init__(self, model: Decoder) -> None:
        super().__init__()
        config = model.config
        self.config = SimpleNamespace(
            model_type="llama",
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_heads,
        )
        self.model = nn.Module()
        self.model.embed_tokens = model.embedding
        self.model.layers = nn.ModuleList(map(_Layer, model.blocks))
        self.model.norm = model.norm
        self.model.rotary_emb = _Rotary(model)
        self.lm_head = model.head


def megatrain(load: Load, model: nn.Module) -> tuple[Callable[[int], float], dict[str, str]]:
    """Return the step of MegaTrain, and remarks on how it was set up.

    Args:
        load: the batches.
        model: the module, in host memory, in bf16.
    """
    sys.path.insert(0, os.environ[MEGATRAIN])
    from infinity.config.training import CPUMasterConfig
    from infinity.model.cpu_master import CPUMasterModel

    assert isinstance(model, Decoder), "the shapes are decoders"
    config = CPUMasterConfig(
        dataset_path="none",  # it is required, and not read
        attn_implementation="sdpa",
        batch_size=load.batch,
        max_seq_len=load.sequence,
        dtype=torch.bfloat16,
    )
    master = CPUMasterModel(_LikeTransformers(model), config)
    optimizer = torch.optim.AdamW(master.get_parameters(), lr=load.learning_rate, fused=True)

    def step(index: int) -> float:
        # It predicts each token from those before, so it gets the token after the last one too.
        tokens = load.tokens(index)
        loss, *_ = master.forward_and_backward(tokens, torch.ones_like(tokens), tokens)
        optimizer.step()
        master._sync_params_to_gpu()
        master.zero_grad()
        return float(loss)

    return step, {"optimizer": "torch's fused AdamW", "masters": "bf16, as in the package's example"}


PEERS: Mapping[str, Callable[[Load, nn.Module], tuple[Callable[[int], float], dict[str, str]]]] = {
    "roundpipe": roundpipe,
    "megatrain": megatrain,
}
"""Returns the step of a system and remarks, by its name."""
