"""An update in device memory allocates no more than the plan counts for it."""

import weakref

import pytest
from harness import History, Setting, regression
from test_device_double import double_of, on_double
from test_device_tier import steps_of
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headwater.optim.spec import OptimizerSpec
from headwater.plan.footprint import Footprint
from headwater.plan.options import optimizer_state_bytes
from headwater.store.updater import Updater

SCALARS_BYTES = 1024

OPTIMIZERS = {
    "AdamW": {},
    "Adam": {"amsgrad": True, "weight_decay": 0.1},
    "SGD": {},
    "SGD with momentum": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "RMSprop": {"centered": True, "momentum": 0.9, "weight_decay": 0.1},
    "Adagrad": {"weight_decay": 0.1},
    "Adadelta": {"weight_decay": 0.1},
    "Adamax": {"weight_decay": 0.1},
    "NAdam": {"weight_decay": 0.1},
    "RAdam": {"weight_decay": 0.1},
    "ASGD": {"weight_decay": 0.1},
    "Rprop": {},
    "Lion": {"weight_decay": 0.1},
}


class Allocated(TorchDispatchMode):
    """A context that measures the memory that operators allocate in it.

    Attributes:
        now: bytes that exist.
        peak: the most bytes that existed at one time.
    """

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._known = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        given = {id(tensor.untyped_storage()) for tensor in tensors}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and id(leaf.untyped_storage()) not in given | self._known:
                self._note(leaf.untyped_storage())
        return result

    def _note(self, storage):
        key, count = id(storage), storage.nbytes()
        self._known.add(key)
        self.now += count
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key, count).atexit = False

    def _forget(self, key, count):
        self._known.discard(key)
        self.now -= count


WAYS = {name: (None,) if name == "Lion" else (None, False, True) for name in OPTIMIZERS}
"""The values of `foreach` of each optimizer; Lion has one implementation."""


@pytest.mark.parametrize(("name", "foreach"), [(name, way) for name in sorted(WAYS) for way in WAYS[name]])
def test_an_update_allocates_no_more_than_the_plan_counts(name, foreach, monkeypatch, tmp_path):
    kind, options = name.split()[0], dict(OPTIMIZERS[name])
    if foreach is not None:
        options["foreach"] = foreach
    spec = OptimizerSpec(kind, {"lr": 0.01, **options})
    peak, counted = allocated_and_counted(spec, nn.Linear(64, 64), monkeypatch, tmp_path)
    assert 0 < peak <= counted + SCALARS_BYTES


WHOLE = {
    "Adafactor": {"weight_decay": 0.1},
    "Lamb": {"weight_decay": 0.1},
    "Muon": {"weight_decay": 0.1},
}


@pytest.mark.parametrize(
    ("name", "foreach"),
    [("Lamb", None), ("Muon", None), *(("Adafactor", way) for way in (None, False, True))],
)
def test_an_update_of_a_whole_large_parameter_allocates_no_more_than_the_plan_counts(
    name, foreach, monkeypatch, tmp_path
):
    for module in ("store.layout", "store.build", "plan.memory.device"):
        monkeypatch.setattr(f"headwater.{module}.DEVICE_PIECE_ELEMENTS", 2048)
    options = dict(WHOLE[name])
    if foreach is not None:
        options["foreach"] = foreach
    spec = OptimizerSpec(name, {"lr": 0.01, **options})
    layer = nn.Linear(128, 96, bias=False)
    peak, counted = allocated_and_counted(spec, layer, monkeypatch, tmp_path)
    assert layer.weight.numel() > 2 * 2048, "more than the pieces of other optimizers"
    assert 0.4 * counted < peak <= counted + SCALARS_BYTES


def allocated_and_counted(spec, layer, monkeypatch, folder):
    """Return the most bytes that updates of a layer on a device allocate, and those that the plan counts."""
    job = regression(lambda: nn.Sequential(layer), 8, layer.in_features, optimizer=spec)
    double, allocated, apply = double_of(0, monkeypatch), Allocated(), Updater.apply

    def applied(self, *args):
        with allocated:
            return apply(self, *args)

    monkeypatch.setattr(Updater, "apply", applied)
    with double, on_double(job, Setting(on_device=(0,)), folder) as engine:
        steps_of(engine, job, History(), range(3))
        engine.store.flush()
        footprint = Footprint(
            engine.plan.trace,
            optimizer_state_bytes=optimizer_state_bytes(spec),
            base_bytes=0,
            update_kind=spec.update_kind_on("cpu"),
        )
        counted = footprint.memory(engine.plan).device["staging"]
    double.end()
    return allocated.peak, counted
