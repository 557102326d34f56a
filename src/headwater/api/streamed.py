"""A module whose weights are streamed while somebody else's loop trains it."""

from __future__ import annotations

import dataclasses
import gc
import logging
import tempfile
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn
from torch.utils.hooks import RemovableHandle

from headwater.api import transaction
from headwater.api.backend import Backend
from headwater.api.calls import Call, asked_precision, guard_call, own_randomness, stand_in_loss
from headwater.api.early import EarlyOptions, check
from headwater.api.machine import (
    NO_UPDATES,
    device_of,
    fixed_by,
    optimizer_state_bytes,
    resources_of,
)
from headwater.core.buffers import tune_allocator
from headwater.core.copies import apart
from headwater.core.empty import initial_values
from headwater.core.errors import StreamError
from headwater.core.precision import Precision
from headwater.core.seeding import drawing_devices
from headwater.core.stage import ParamSpec
from headwater.core.trees import tensors_in
from headwater.fabric.fabric import ALONE, Fabric
from headwater.fabric.membership import current
from headwater.optim.spec import OptimizerSpec
from headwater.plan.budget import make_plan
from headwater.plan.calibrate import calibrate
from headwater.plan.partition import Partition, find_stages
from headwater.plan.trace import trace_step
from headwater.plan.types import WHOLE_STORE, Plan, StoreShare, Trace
from headwater.store.replicas import take_from_first_host
from headwater.store.rule import SeveralRules, UpdateRule
from headwater.store.store import WeightStore
from headwater.store.takeover import take_over
from headwater.stream.engine import Engine, Initial

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _Updated:
    """How a parameter is updated.

    Attributes:
        spec: by what kind of optimizer.
        by: the optimizer, for as long as it lives.
    """

    spec: OptimizerSpec
    by: Callable[[], torch.optim.Optimizer | None]


owners: weakref.WeakKeyDictionary[WeightStore, StreamedModel] = weakref.WeakKeyDictionary()
"""The model of each store."""


class StreamedModel:
    """Streams the weights of `model` from its first forward on; its shapes decide the plan.

    Attributes:
        model: the user's module.
        backend: what the run may take.
        precision: of the run, if known before the first forward; otherwise what autocast asks for around it.
        engine: the engine; `None` before the first forward.
        fabric: the ranks that train it together, from the first forward on.

    Args:
        model: the user's module.
        backend: what the run may take.
    """

    def __init__(self, model: nn.Module, backend: Backend) -> None:
        self.model = model
        self.backend = backend
        self.precision: Precision | None = None
        self.engine: Engine | None = None
        self.fabric: Fabric = ALONE
        self._scalars_shared = 0  # commits whose optimizer scalars all ranks have
        self._optimizers: dict[str, _Updated] = {}  # by name of the parameter
        self._trained: frozenset[str] = frozenset()
        self._largest_batch = 0
        self._disk: tempfile.TemporaryDirectory[str] | None = None
        self._undo_buffers: Callable[[], None] = _nothing
        self._hook = self._hook_forward()
        self._is_planning = False
        self._unguard = guard_call(model, self._randomness, self._forget_call)
        transaction.register(self)

    def __reduce_ex__(self, protocol: object) -> Any:
        raise StreamError(
            f"a {type(self.model).__name__} that is compiled cannot be copied or pickled",
            remedy="copy it before it is compiled, or load its state_dict() into a module of the same class",
        )

    def _hook_forward(self) -> RemovableHandle:
        return self.model.register_forward_pre_hook(self.before_forward, with_kwargs=True, prepend=True)

    def _be_first(self) -> None:
        """Have our hook on the forward come before those of the engine: it may replace the engine."""
        self._hook.remove()
        self._hook = self._hook_forward()

    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See to it that there is an engine for a batch like this one; a hook on every forward of the model.

        What was trained once stays in the plan, as loops freeze one model while they train another.
        """
        size = sum(tensor.numel() for tensor in tensors_in((args, kwargs)))
        if self.engine is None or torch.is_grad_enabled():
            size = int(max(current().gather(size)))  # ranks plan alike
        fits = size <= self._largest_batch and _trained(self.model) <= self._trained
        if self.engine is not None and (fits or not torch.is_grad_enabled()):
            return
        self._largest_batch = max(size, self._largest_batch)
        self._trained |= _trained(self.model)
        with torch.inference_mode(False), torch.enable_grad(), _unfrozen(self.model, self._trained):
            self._start((args, kwargs))
        assert self.engine is not None, "it was just built"
        self.engine.executor.enter_model()

    def _randomness(self) -> AbstractContextManager[None]:
        """Surrounds a call of the model."""
        fabric = current()
        if fabric.size == 1 or self._is_planning or not self.model.training:
            return nullcontext()
        return own_randomness(fabric.rank)

    def _forget_call(self) -> None:
        """A call of the model was interrupted."""
        if self.engine is not None:
            self.engine.executor.reset()

    def _start(self, call: Call) -> None:
        """Plan for this call of the model, and move the weights to a store of that plan."""
        if self.engine is None:
            self.fabric = current()
            for optimizer in live_optimizers(self.model):
                self._note(optimizer)
        device = device_of(self.backend.config)
        precision = self.engine.plan.precision if self.engine else self.precision or asked_precision(device)
        self._hook.remove()  # the dry run is no call of the user's
        self._is_planning = True
        try:
            with torch.random.fork_rng(devices=drawing_devices()):  # it belongs to the user
                self._stop_early(call, precision, device)
                trace = self._trace(apart(call), precision)
                self._rebuild(self._plan(trace, precision, device))
        finally:
            self._is_planning = False
            self._be_first()

    def _trace(self, call: Call, precision: Precision) -> Trace:
        partition = find_stages(self.model, precision)
        if self.engine is None:
            return self._dry_run(call, precision, partition)
        self.engine.store.flush()  # no update must meet fake tensors
        with self.engine.executor.paused():
            return self._dry_run(call, precision, _with_masters_of(self.engine, partition))

    def _dry_run(self, call: Call, precision: Precision, partition: Partition) -> Trace:
        return trace_step(
            self.model,
            call,
            precision,
            loss_function=stand_in_loss,
            partition=partition,
            inference=not self._trained,
        )

    def _stop_early(self, call: Call, precision: Precision, device: str) -> None:
        """Do what the backend asks for in place of training, and end the script."""
        backend = self.backend
        if not (backend.compile_only or backend.validate_only):
            return
        options = EarlyOptions(
            compile_only=backend.compile_only,
            validate_only=backend.validate_only,
            compile_dir=backend.compile_dir,
            precision=precision,
            device=device,
            resources=resources_of(backend.config),
        )
        report = check(self.model, *call, options)
        assert report is not None, "something was asked for"
        Console().print(report.render())
        raise SystemExit(0)

    def _plan(self, trace: Trace, precision: Precision, device: str) -> Plan:
        disk = self._folder()

        def make() -> Plan:
            return make_plan(
                lambda size: trace,
                batch_size=trace.micro_batch_size,
                precision=precision,
                optimizer_state_bytes=self._state_bytes(),
                resources=resources_of(self.backend.config, disk),
                device=device,
                calibration=calibrate(device, disk),
                fixed=fixed_by(self.backend.config, trace.micro_batch_size),
                ranks=self.fabric.local_size,
                share=self._share(),
            )

        return dataclasses.replace(self.fabric.agree(make), disk=disk)

    def _share(self) -> StoreShare:
        """What of the store is on this host: all of it, for each rank to read."""
        if self.fabric.size == 1:
            return WHOLE_STORE
        return StoreShare(
            disk_ranks=self.fabric.local_size,
            images=1,  # updates come before the forward; see `apply_updates`
            sums_stay=self.fabric.num_hosts > 1,
        )

    def _state_bytes(self) -> int:
        return max((optimizer_state_bytes(entry.spec) for entry in self._optimizers.values()), default=0)

    @property
    def _rule(self) -> UpdateRule:
        specs = {name: entry.spec for name, entry in self._optimizers.items()}
        return SeveralRules(specs) if specs else UpdateRule(NO_UPDATES)

    def _folder(self) -> Path | None:
        """A folder of this model's own on the disk of the backend."""
        if self.backend.config.disk is None:
            return None
        if self._disk is None:
            parent = self.backend.config.disk.path
            parent.mkdir(parents=True, exist_ok=True)
            self._disk = tempfile.TemporaryDirectory(dir=parent, prefix="model-")
        return Path(self._disk.name)

    def _rebuild(self, plan: Plan) -> None:
        """Stream by this plan and the present rule from now on; weights and optimizer state are kept."""
        config, before = self.backend.config, self.engine
        if plan.device == "cpu" and config.allocator == "tuned":
            tune_allocator(keep=plan.memory_is_ample)
        if before is not None:
            before.detach()
        self.engine = Engine(
            self.model,
            plan,
            self._rule,
            initial=self._initial(),
            fast_matmul=config.matmul == "fast",
            compile_blocks=config.compile,
            verify_disk=config.verify_disk,
            fabric=self.fabric,
            own_loop=True,
        )
        owners[self.engine.store] = self
        self._be_first()
        if before is not None:
            if self.fabric.size > 1:
                before.store.flush()
                before.store.share_scalars()
            take_over(self.engine.store, before.store)
            before.hand_over(self.engine)
            return
        if self.fabric.num_hosts > 1:
            take_from_first_host(self.engine.store, self.fabric)
        if transaction.is_open():
            self.begin_step()

    def _initial(self) -> Initial | None:
        """Where the values of the parameters are, if not in the parameters."""
        if self.engine is not None:
            return self.engine.master
        known = initial_values(self.model)
        if not known:
            return None
        params = dict(self.model.named_parameters())
        return lambda spec: known[spec.name]() if spec.name in known else params[spec.name].detach()

    def update_with(self, optimizer: torch.optim.Optimizer) -> None:
        """Let this optimizer update those of its parameters that are ours; its state begins anew.

        Raises:
            ConfigError: if streaming cannot serve it.
        """
        assert self.engine is not None, "only streamed parameters are asked for"
        before = self._rule_key()
        fresh = self._note(optimizer)
        if not fresh:
            return
        if self._rule_key() != before:
            self._rebuild(self.engine.plan)
        store = self.engine.store
        for stage in store.stages:
            scalars = store.scalars(stage.index)
            for index, param in enumerate(stage.params):
                if param.name in fresh:
                    scalars[index] = None

    def _rule_key(self) -> dict[str, OptimizerSpec]:
        return {name: entry.spec for name, entry in self._optimizers.items()}

    def _note(self, optimizer: torch.optim.Optimizer) -> set[str]:
        """Remember who updates what; the names of parameters that another optimizer had, or none."""
        names = {id(param): name for name, param in self.model.named_parameters()}
        own = {names[id(p)] for group in optimizer.param_groups for p in group["params"] if id(p) in names}
        fresh = {name for name in own if not self._is_updated_by(name, optimizer)}
        if fresh:
            spec = OptimizerSpec.of(optimizer)
            self._optimizers |= {name: _Updated(spec, weakref.ref(optimizer)) for name in own}
        return fresh

    def _is_updated_by(self, name: str, optimizer: torch.optim.Optimizer) -> bool:
        return name in self._optimizers and self._optimizers[name].by() is optimizer

    # a step as a transaction

    def begin_step(self) -> None:
        if self.engine is not None:
            self.engine.store.begin_transaction()
            self._undo_buffers = self.engine.buffers.remember()

    def end_step(self) -> None:
        if self.engine is not None:
            self.engine.store.end_transaction()
            self.apply_updates()
        self._undo_buffers = _nothing

    def apply_updates(self) -> None:
        """Of several ranks, let all do their share of updates now; then each may read weights by itself."""
        assert self.engine is not None, "only then there are updates"
        if self.fabric.size > 1:
            self.engine.store.flush()

    def share_scalars(self) -> None:
        """Let every rank have the optimizer scalars of all parameters; all ranks ask alike.

        Raises:
            StreamError: if this one asks alone, and does not have them.
        """
        store = None if self.engine is None else self.engine.store
        if store is None or self.fabric.size == 1 or store.num_commits == self._scalars_shared:
            return
        if current().size == 1:
            raise StreamError(
                "the state of an optimizer is asked for on one rank, and each has a part of it",
                where="step closure",
                remedy="ask for it in a checkpoint_closure, or in the loop",
            )
        store.share_scalars()
        self._scalars_shared = store.num_commits

    def abort_step(self) -> None:
        if self.engine is None:
            return
        self.engine.executor.reset()
        if not self.engine.store.roll_back():
            logger.warning("the step had been used by a forward after optimizer.step(): it stays applied")
        self._undo_buffers()
        self.end_step()

    def release(self) -> None:
        """Stop streaming; the model's parameters get their values and gradients back."""
        transaction.unregister(self)
        self._hook.remove()
        self._unguard()
        if self.engine is not None:
            self.engine.detach()
            for name, value in self.engine.named_masters():
                self.model.get_parameter(name).data = value
            for name, gradient in self.engine.named_gradients():
                self.model.get_parameter(name).grad = gradient
            self.engine.close()
            self.engine = None
        if self._disk is not None:
            self._disk.cleanup()


def _with_masters_of(engine: Engine, partition: Partition) -> Partition:
    """The same stages; what is at rest shows its wire dtype, and the engine knows that of the masters."""
    known = {param.name: param for stage in engine.plan.trace.stages for param in stage.params}

    def corrected(param: ParamSpec) -> ParamSpec:
        return dataclasses.replace(known[param.name], requires_grad=param.requires_grad, split_master=True)

    stages = (
        dataclasses.replace(stage, params=tuple(corrected(param) for param in stage.params))
        for stage in partition.stages
    )
    return dataclasses.replace(partition, stages=tuple(stages))


def _nothing() -> None:
    pass


def _trained(model: nn.Module) -> frozenset[str]:
    return frozenset(name for name, param in model.named_parameters() if param.requires_grad)


@contextmanager
def _unfrozen(model: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Within it these parameters require gradients."""
    frozen = [param for name, param in model.named_parameters() if name in names and not param.requires_grad]
    for param in frozen:
        param.requires_grad_(True)
    try:
        yield
    finally:
        for param in frozen:
            param.requires_grad_(False)


def live_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Every optimizer over parameters of `model`, whoever built it; the newest last.

    A trainer's wrapper of an optimizer shows the groups of another, and has none itself: it is left out.
    """
    params = set(map(id, model.parameters()))
    return [
        found
        for found in gc.get_objects()
        if issubclass(type(found), torch.optim.Optimizer)
        and "param_groups" in vars(found)
        and any(id(param) in params for group in found.param_groups for param in group["params"])
    ]
