"""The public names are listed here, so that a change of the public API shows in a review."""

import importlib
import inspect

import pytest

SCHEDULES = [
    "Chained", "Constant", "CosineAnnealing", "CosineAnnealingWarmRestarts", "CosineDecay", "Cyclic",
    "Exponential", "InverseExponentialTimeDecay", "InverseSquareRootDecay", "Lambda", "Linear", "MultiStep",
    "Multiplicative", "OneCycle", "PiecewiseConstant", "Polynomial", "ScalePerParam", "Sequential", "Step",
]  # fmt: skip

PUBLIC = {
    "headwater": [
        "amp", "backend", "checkpoint_closure", "compile", "compile_only", "compile_step", "cross_entropy",
        "current_backend", "distributed", "empty_parameters", "experimental", "framework", "integrations",
        "load", "load_pretrained", "metrics", "optim", "profile", "release", "save", "save_pretrained",
        "sparse", "step_closure", "trace", "utils", "validate_only", "__version__",
    ],
    "headwater.sparse": [
        "Cadence", "Constant", "Cosine", "Cubic", "Exponential", "GMPSparsityOptimizer", "Linear", "Power",
        "RigLSparsityOptimizer", "SETSparsityOptimizer", "SparsityOptimizer", "StaticSparsityOptimizer",
    ],
    "headwater.optim": [
        "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Lamb", "Lion", "Muon",
        "NAdam", "Optimizer", "RAdam", "RMSprop", "Rprop", "SGD", "configure_lr_scheduler",
        "configure_optimizer", "configure_param_groups", "configure_scheduler", "lr_scheduler",
        "weight_decay_scheduler",
    ],
    "headwater.optim.lr_scheduler": ["LRScheduler", *(f"{name}LR" for name in SCHEDULES)],
    "headwater.optim.weight_decay_scheduler": [
        "WeightDecayScheduler",
        *(f"{name}WD" for name in SCHEDULES),
    ],
    "headwater.amp": ["GradScaler", "autocast", "get_half_dtype", "optimizer_step", "set_half_dtype"],
    "headwater.metrics": [
        "AUCMetric", "AccuracyMetric", "DiceCoefficientMetric", "FBetaScoreMetric", "MeanIOUMetric",
        "MeanMetric", "MeanPerClassAccuracyMetric", "Metric", "PerplexityMetric", "PrecisionAtKMetric",
        "RecallAtKMetric",
    ],
    "headwater.utils": ["CSConfig", "data", "tensorboard"],
    "headwater.utils.data": ["DataExecutor", "DataLoader"],
    "headwater.utils.tensorboard": ["SummaryWriter"],
    "headwater.distributed": ["get_ordinal", "is_streamer", "num_available", "num_tasks", "task_id"],
    "headwater.framework.torch": ["Session", "dataloader", "initialize", "modes", "module", "optimizer"],
    "headwater.run": ["PyTorchBaseModel", "main", "run"],
}  # fmt: skip


def module(name):
    if name in ("headwater.amp", "headwater.sparse"):  # names of the package, whose modules are others
        return getattr(importlib.import_module("headwater"), name.rpartition(".")[2])
    return importlib.import_module(name)


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_exist_and_have_docstrings(name):
    for public in PUBLIC[name]:
        thing = getattr(module(name), public)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            assert inspect.getdoc(thing), f"{name}.{public} has no docstring"


@pytest.mark.parametrize("name", ["headwater", "headwater.metrics", "headwater.utils.data"])
def test_no_other_name_is_public(name):
    assert sorted(module(name).__all__) == sorted(PUBLIC[name])


def test_the_package_lists_its_names():
    headwater = module("headwater")
    assert sorted(dir(headwater)) == sorted(PUBLIC["headwater"])
    with pytest.raises(AttributeError, match="no attribute 'complie'"):
        headwater.complie  # noqa: B018


@pytest.mark.parametrize("name", [n for n in PUBLIC["headwater"] if not n.startswith("_")])
def test_experimental_module_has_the_same_objects(name):
    assert getattr(module("headwater.experimental"), name) is getattr(module("headwater"), name)
