"""The result of a dry run: the stages of a model, the order of their uses, and the cost of each."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from functools import cached_property

from headwater.core.stage import OptimizerState, ParamSpec, StageSpec, with_params


def members_of(stages: Sequence[StageSpec]) -> dict[int, tuple[int, ...]]:
    """Return the own stage of each divided block -> all its stages: the parts, and the own stage."""
    members: dict[int, tuple[int, ...]] = {}
    for stage in stages:
        block = stage.index if stage.part_of is None else stage.part_of
        members[block] = (*members.get(block, ()), stage.index)
    return {block: found for block, found in sorted(members.items()) if len(found) > 1}


@dataclasses.dataclass
class PhaseCost:
    """Cost of the operators of a stage in forward, or in backward without recomputation.

    Attributes:
        flops: floating-point operations (matrix products, attention, convolutions).
        attention_flops: the part of `flops` in torch's fused attention, which has a separate rate.
        kernel_attention_flops: the part of `flops` in the package's kernel of attention.
        new_bytes: bytes of the large tensors that the operators allocate. An allocator that returns pages
            gets new ones for each of them.
        operators: number of operators, views included.
    """

    flops: int = 0
    attention_flops: int = 0
    kernel_attention_flops: int = 0
    new_bytes: int = 0
    # The number is not compared: calls between stages count for either, and a dry run may skip equal stages.
    operators: int = dataclasses.field(default=0, compare=False)


@dataclasses.dataclass
class StageCost:
    """Cost of one micro-batch in a stage, summed over the stage's uses. A dry run adds it up.

    Attributes:
        forward: the operators of the forward.
        backward: the operators of the backward.
        saved_bytes: bytes that autograd keeps for the backward, without weights and stage inputs.
        input_bytes: bytes of the tensors that enter the stage, and are kept if it is recomputed.
        output_bytes: bytes of the tensors that leave it.
        transient_bytes: largest bytes of short-lived tensors alive at once within one operator call; in
            inference, largest bytes of all activations alive at once.
        cheap_bytes: the part of `saved_bytes` that cheap operators can compute again from the rest.
        again_bytes: bytes of all values that these operators compute.
        recomputable: True if the stage has a separate module whose forward can run again.
    """

    forward: PhaseCost = dataclasses.field(default_factory=PhaseCost)
    backward: PhaseCost = dataclasses.field(default_factory=PhaseCost)
    saved_bytes: int = 0
    input_bytes: int = 0
    output_bytes: int = 0
    transient_bytes: int = 0
    cheap_bytes: int = 0
    again_bytes: int = 0
    recomputable: bool = True


@dataclasses.dataclass(frozen=True)
class MaskedWeights:
    """The sizes of the masks of sparse training.

    Attributes:
        num_bytes: bytes of all masks.
        largest: number of elements of the largest masked parameter.
        largest_changing: the same, of those parameters whose masks change during training.
    """

    num_bytes: int = 0
    largest: int = 0
    largest_changing: int = 0


NO_MASKS = MaskedWeights()


@dataclasses.dataclass(frozen=True)
class Trace:
    """The dry run of one micro-batch on fake tensors.

    Attributes:
        stages: the stages of the model.
        uses: index of the stage at each use in forward order; backward runs them in reverse.
        costs: one per stage.
        sites: qualified module name -> stages bound while that module's forward runs.
        micro_batch_size: samples in the traced batch.
        inference: True if only the forward was run, without gradients.
        written: names of the parameters that the forward itself changes.
        assigned_after_use: those of them that get other memory after autograd has saved the old one.
        masks: the masks of sparse training. The dry run does not set them.
    """

    stages: tuple[StageSpec, ...]
    uses: tuple[int, ...]
    costs: tuple[StageCost, ...]
    sites: dict[str, tuple[int, ...]]
    micro_batch_size: int
    inference: bool = False
    written: tuple[str, ...] = ()
    assigned_after_use: tuple[str, ...] = ()
    masks: MaskedWeights = NO_MASKS

    @cached_property
    def params(self) -> tuple[ParamSpec, ...]:
        """The parameters of all stages."""
        return tuple(param for stage in self.stages for param in stage.params)

    @cached_property
    def schedule(self) -> tuple[int, ...]:
        """Stages in the order in which one micro-batch uses them, if no divided block is recomputed."""
        return self.uses if self.inference else self.uses + self.uses[::-1]

    @cached_property
    def first_use(self) -> dict[int, int]:
        """Stage -> the index of its first use in `uses`, at which its gradients are complete in backward."""
        return {stage: use for use, stage in reversed(list(enumerate(self.uses)))}

    @cached_property
    def last_use(self) -> dict[int, int]:
        """Stage -> the index of its last use in `uses`, which begins its backward."""
        return {stage: use for use, stage in enumerate(self.uses)}

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """For each part of a divided block, the block's own stage; for any other stage, the stage itself."""
        return tuple(stage.index if stage.part_of is None else stage.part_of for stage in self.stages)

    @cached_property
    def members(self) -> dict[int, tuple[int, ...]]:
        """The stages of each divided block; see `members_of`."""
        return members_of(self.stages)

    def storing(self, optimizer_state: OptimizerState) -> Trace:
        """Return this trace with `ParamSpec.bf16_state` set if `optimizer_state` is `bf16`."""
        if optimizer_state == "exact":
            return self
        in_bf16 = functools.partial(dataclasses.replace, bf16_state=True)
        return dataclasses.replace(self, stages=with_params(self.stages, in_bf16))

    def keeping(self, kept: Mapping[str, int]) -> Trace:
        """Return this trace with `ParamSpec.kept` set for masked parameters.

        Args:
            kept: name of a masked parameter -> the most elements that its masks keep.
        """
        if not kept:
            return self

        def changed(param: ParamSpec) -> ParamSpec:
            return param.keeping(kept[param.name]) if param.name in kept else param

        return dataclasses.replace(self, stages=with_params(self.stages, changed))
