"""Updates of pieces by the native kernel of Adam: all pieces of a group in one pass over their values.

[Note: what the native kernel updates] The kernel is bit-identical to torch's fused Adam and AdamW on the CPU.
It updates fp32 parameters in host memory whose wire values are fp32 or bf16, with dense gradients in fp32 or
bf16. `TorchPieces` updates everything else: other optimizers, Adam without `fused`, amsgrad, options that are
tensors, wire values in fp16, sparse gradients, and stages in device memory. `suits` decides this for each
parameter.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import torch

from headwater.core.stage import ParamSpec
from headwater.store.kept import Operands
from headwater.store.layout import MASTER_FIELD, TIES_FIELD, Piece, Scalars, StateLayout
from headwater.store.native_adam import ENCODINGS, AdamKernel, AdamPiece, AdamSettings
from headwater.store.piece_update import PieceUpdate, StageJob, batches
from headwater.store.rounding import place_of, state_stream

if TYPE_CHECKING:
    from headwater.optim.spec import OptimizerSpec

_MEAN, _SQUARE = "exp_avg", "exp_avg_sq"
_STATE = frozenset({_MEAN, _SQUARE})
_GRADIENT_DTYPES = _WIRE_DTYPES = frozenset({torch.float32, torch.bfloat16})


def suits(
    spec: ParamSpec,
    optimizer: OptimizerSpec,
    options: Mapping[str, Any],
    state: StateLayout,
    scalars: Scalars | None,
    gradient: torch.Tensor,
    factor: torch.Tensor | None,
) -> bool:
    """True if the native kernel can update a parameter: see [Note: what the native kernel updates].

    Args:
        spec: the parameter.
        optimizer: its optimizer.
        options: all options of the optimizer for this parameter.
        state: the optimizer's state tensors of the parameter.
        scalars: the optimizer's scalars of the parameter before the update.
        gradient: its summed gradient.
        factor: the factor of the gradient.
    """
    is_fused_adam = optimizer.foreign_class is None and optimizer.name in {"Adam", "AdamW"}
    is_fused_adam = is_fused_adam and bool(options["fused"]) and state.keys() == _STATE
    return (
        is_fused_adam
        and not (options["amsgrad"] or options["capturable"] or options["differentiable"])
        and all(isinstance(each, int | float) for each in _numbers(options))
        and spec.dtype == torch.float32
        and spec.wire_dtype in _WIRE_DTYPES
        and gradient.device.type == "cpu"
        and not gradient.is_sparse
        and gradient.dtype in _GRADIENT_DTYPES
        and (scalars is None or (scalars.keys() == {"step"} and isinstance(scalars["step"], torch.Tensor)))
        and (factor is None or (factor.dtype, factor.device.type) == (torch.float32, "cpu"))
    )


def _numbers(options: Mapping[str, Any]) -> tuple[object, ...]:
    return (options["lr"], *options["betas"], options["eps"], options["weight_decay"])


@final
class NativePieces(PieceUpdate):
    """Runs the native kernel over pieces of the parameters for which `takes` is true.

    Args:
        job: the update of a stage.
        kernel: returns the kernel, or `None` if torch's must be used; called when a parameter suits it.
    """

    def __init__(self, job: StageJob, kernel: Callable[[], AdamKernel | None]) -> None:
        self._job = job
        self._load = kernel
        self._params: dict[int, _Param | None] = {}

    def takes(self, param: int) -> bool:
        """True if pieces of a parameter of the stage, by index, are updated here."""
        return self._param(param) is not None

    def apply(self, pieces: Sequence[Piece], rest: torch.Tensor) -> None:
        whole = [piece for piece in pieces if not piece.is_compact]
        if whole:
            self._update(whole, rest)
        # In batches, because the operands of these pieces are copies.
        compact = [piece for piece in pieces if piece.is_compact]
        for batch in batches(compact, self._job.layout.piece_elements):
            self._update(batch, rest)

    def _update(self, pieces: Sequence[Piece], rest: torch.Tensor) -> None:
        # torch passes its number of threads to OpenMP when a thread first asks for it; the kernel uses it.
        torch.get_num_threads()
        kernel = self._load()
        assert kernel is not None, "only pieces that are taken are updated"
        places: dict[int, int] = {}  # of a parameter's settings in the call
        settings: list[AdamSettings] = []
        listed: list[AdamPiece] = []
        operands: list[Operands] = []
        for piece in pieces:
            param = self._param(piece.param)
            assert param is not None, "only pieces that are taken are updated"
            if piece.param not in places:
                places[piece.param] = len(settings)
                settings.append(param.settings)
            # Kept until the kernel has run: a gradient with other strides than the parameter's is copied.
            operands.append(self._job.operands(piece))
            listed.append(param.piece(operands[-1], places[piece.param], rest))
        kernel.run(listed, settings)
        for each in operands:
            each.put_back()
            param = self._param(each.piece.param)
            assert param is not None, "only pieces that are taken are updated"
            self._job.progress.note(each.piece, param.after)

    def _param(self, param: int) -> _Param | None:
        if param not in self._params:
            self._params[param] = self._prepared(param)
        return self._params[param]

    def _prepared(self, param: int) -> _Param | None:
        job = self._job
        if job.progress.undoable:  # the stage is in device memory, which the kernel cannot update
            return None
        spec, part = job.layout.stage.params[param], job.pending.parts[param]
        rule, before, gradient = job.rules.of(spec.name), job.scalars[param], job.gradient(param)
        options = rule.all_options(job.options(param), job.image.device)
        state = rule.state_layout(spec)
        if not suits(spec, rule.spec, options, state, before, gradient, part.factor) or self._load() is None:
            return None
        limit = part.update.max_value
        after = _counted(before)
        return _Param(
            spec,
            _settings(options, float(after["step"])),
            is_first=before is None,
            bf16_state=spec.bf16_state,  # the moments are fp32, so this decides: see `stored_dtype`
            factor=1.0 if part.factor is None else float(part.factor),
            limit=math.inf if limit is None else limit,
            after=after,
        )


@dataclasses.dataclass(frozen=True)
class _Param:
    """The update of one parameter, as the kernel needs it.

    Attributes:
        spec: the parameter.
        settings: the options of Adam.
        is_first: true if the state has no values yet.
        bf16_state: true if the moments are stored in bf16.
        factor: the gradient is multiplied by this.
        limit: the gradient's elements are then clipped to ± this.
        after: the scalars after the update.
    """

    spec: ParamSpec
    settings: AdamSettings
    is_first: bool
    bf16_state: bool
    factor: float
    limit: float
    after: Scalars

    def piece(self, operands: Operands, settings: int, rest: torch.Tensor) -> AdamPiece:
        """Return a piece as the kernel needs it.

        Args:
            operands: a piece of this parameter.
            settings: the place of the parameter's settings in the call.
            rest: the bytes of the piece's group.
        """
        piece, base = operands.piece, rest.data_ptr()
        fields = {field.name: base + field.offset for field in piece.fields}
        return AdamPiece(
            wire=operands.wire.data_ptr(),
            master=fields.get(MASTER_FIELD.get(piece.encoding, ""), 0),
            ties=fields.get(TIES_FIELD, 0),
            gradient=operands.gradient.data_ptr(),
            mean=fields[_MEAN],
            square=fields[_SQUARE],
            numel=operands.wire.numel(),
            mean_place=self._place(_MEAN, piece),
            square_place=self._place(_SQUARE, piece),
            settings=settings,
            encoding=ENCODINGS[piece.encoding],
            bf16_gradient=operands.gradient.dtype == torch.bfloat16,
            bf16_state=self.bf16_state,
            is_first=self.is_first,
            factor=self.factor,
            limit=self.limit,
        )

    def _place(self, state: str, piece: Piece) -> int:
        """Return the place in the table of random numbers for the first element of a piece."""
        if not self.bf16_state:
            return 0
        return place_of(state_stream(self.spec.name, state, int(self.after["step"])), piece.start)


def _settings(options: Mapping[str, Any], step: float) -> AdamSettings:
    beta1, beta2 = options["betas"]
    return AdamSettings(
        lr=options["lr"],
        beta1=beta1,
        beta2=beta2,
        eps=options["eps"],
        weight_decay=options["weight_decay"],
        step=step,
        decoupled=bool(options["decoupled_weight_decay"]),
        maximize=bool(options["maximize"]),
    )


def _counted(scalars: Scalars | None) -> Scalars:
    """Return the scalars after one more step. The step count is an fp32 tensor, as in torch."""
    step = torch.zeros((), dtype=torch.float32, device="cpu") if scalars is None else scalars["step"]
    return {"step": step + 1}
