"""Specs of optimizer objects: what is kept of them, and which classes of others can be streamed."""

import pytest
import torch

import headwater.optim
from headwater.core.errors import ConfigError, StreamError
from headwater.core.stage import ParamSpec
from headwater.optim import OptimizerSpec, group_options
from headwater.optim.probe import reads_variables
from headwater.store.rule import UpdateRule


def params():
    return [torch.nn.Parameter(torch.ones(4, 3)), torch.nn.Parameter(torch.ones(5, 2))]


class Plain(torch.optim.Optimizer):
    """Momentum, with a new state tensor at every step."""

    def __init__(self, params, lr=0.1, momentum=0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                state["velocity"] = state.get("velocity", 0) * group["momentum"] + param.grad
                state["steps"] = state.get("steps", 0) + 1
                param.sub_(state["velocity"], alpha=group["lr"] / state["steps"])


class Coupled(Plain):
    """Divides by the norm of all gradients."""

    def step(self):
        gradients = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for gradient in gradients:
            gradient.div_(norm)
        super().step()


class ClipsTogether(Plain):
    """Clips the norm of all gradients where it is large."""

    def step(self):
        torch.nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 5.0)
        super().step()


class CountsItself(Plain):
    """Keeps a count on the object."""

    count = 0

    def step(self):
        self.count += 1
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.div_(self.count)
        super().step()


class CountsInGroup(Plain):
    """Keeps a count in the group."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad / group["count"])


class CountsAlone(Plain):
    """Keeps a count that changes results only in the hundredth step."""

    count = 0

    def step(self):
        self.count += 1
        super().step()


class NumbersGroups(Plain):
    """Updates the first group only."""

    @torch.no_grad()
    def step(self):
        for number, group in enumerate(self.param_groups):
            for param in group["params"]:
                if param.grad is not None and number == 0:
                    param.sub_(param.grad)


class ScalesByAttribute(Plain):
    """Looks for a factor at each parameter."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad * getattr(param, "lr_scale", 1.0))


class Draws(Plain):
    """Draws random numbers."""

    def step(self):
        torch.rand(1)
        super().step()


class KeepsArgument(Plain):
    """Keeps an argument on the object alone."""

    def __init__(self, params, lr=0.1, clip=1.0):
        super().__init__(params, lr)
        self.clip = clip


class ScalesByLoss(Plain):
    """Multiplies gradients by the loss of its closure."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = 1.0 if closure is None else closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad * loss)


class StateAtBirth(Plain):
    """Makes its state in the constructor."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["sum"] = torch.zeros_like(param)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(self.state[param]["sum"].add_(param.grad))


class OddState(Plain):
    """Keeps a list."""

    def step(self):
        super().step()
        for state in self.state.values():
            state["history"] = [1]


class Late(Plain):
    """Begins to average its weights in a later step."""

    begins = 5

    @torch.no_grad()
    def step(self):
        super().step()
        for param, state in self.state.items():
            if state["steps"] == self.begins:
                state["average"] = param.clone()
            elif state["steps"] > self.begins:
                state["average"].lerp_(param, 0.1)


class MuchLater(Late):
    begins = 40


class Growing(Plain):
    """Keeps all gradients of the last steps."""

    @torch.no_grad()
    def step(self):
        super().step()
        for param, state in self.state.items():
            last = state.get("last", param.new_zeros(0, param.numel()))
            state["last"] = torch.cat([last, param.grad.view(1, -1)])[-4:]


class Wrapping(Plain):
    """Needs another optimizer."""

    def __init__(self, params, base):
        super().__init__(params)
        self.base = base


class Renaming(torch.optim.Optimizer):
    """Puts an argument into its defaults under another name."""

    def __init__(self, params, beta=0.9):
        super().__init__(params, {"lr": 0.1, "betas": (beta, beta)})

    def step(self):
        pass


class MyAdamW(torch.optim.AdamW):
    """Passes on what it gets."""

    def __init__(self, params, **kwargs):
        super().__init__(params, **kwargs)


class NeedsGradients(Plain):
    """Does not skip parameters that have no gradient."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad, alpha=group["lr"])


class DecaysAlways(Plain):
    """Decays parameters that have no gradient, too."""

    @torch.no_grad()
    def step(self):
        super().step()
        for group in self.param_groups:
            for param in group["params"]:
                param.mul_(0.99)


class TakesAnyOption(torch.optim.Optimizer):
    """Puts options whose names it does not list into its defaults, except one."""

    def __init__(self, params, lr=0.1, **options):
        self.scale = options.pop("scale", 1.0)
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                total = self.state[param].setdefault("sum", torch.zeros_like(param))
                if param.grad is not None:
                    total.mul_(group.get("momentum", 0.0)).add_(param.grad)
                    param.sub_(total, alpha=group["lr"] * self.scale)


BUILT = []
NORMS = []
CONSTANTS = {}
COUNT = 0


class CountsGlobally(Plain):
    """Counts its steps in a variable of the Python module, and divides by the count."""

    def step(self):
        global COUNT
        COUNT += 1
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.div_(COUNT)
        super().step()


class CountsOnClass(Plain):
    """Counts its steps in an attribute of its class, without an effect on the results."""

    steps = 0

    def step(self):
        type(self).steps += 1
        super().step()


class Logs(Plain):
    """Writes the norms of gradients to a list, in a method that `step` calls."""

    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.log(param.grad)
        super().step()

    def log(self, gradient):
        NORMS.append(gradient.norm().item())


class CachesConstants(Plain):
    """Computes a constant for each shape once."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    size = CONSTANTS.setdefault(param.shape, param.numel() ** 0.5)
                    param.sub_(param.grad, alpha=group["lr"] / size)


class Listed(Plain):
    """Adds an entry to a list for each object."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        BUILT.append(type(self))


def test_a_trial_undoes_what_a_step_changes_outside_of_the_optimizer():
    for make in (CountsGlobally, CountsOnClass, Logs):
        optimizer = make(params())
        with pytest.raises(ConfigError):
            OptimizerSpec.of(optimizer)
    assert COUNT == CountsOnClass.steps == 0
    assert not NORMS


def test_a_trial_undoes_what_a_constructor_changes():
    OptimizerSpec.of(Listed(params()))
    assert len(BUILT) == 1


def test_a_step_may_fill_a_cache_of_constants():
    OptimizerSpec.of(CachesConstants(params()))
    assert not CONSTANTS


def test_a_step_may_call_a_function_that_torch_has_compiled():
    @torch.compile(backend="eager")
    def scaled(value):
        return value * 0.5

    class Compiled(Plain):
        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        param.sub_(scaled(param.grad), alpha=group["lr"])

    OptimizerSpec.of(Compiled(params()))


def test_an_optimizer_that_takes_any_option_is_built_again_with_its_options():
    spec = OptimizerSpec.of(TakesAnyOption(params(), momentum=0.9))
    assert spec.kwargs == {"lr": 0.1, "momentum": 0.9}
    assert spec.build(params()).defaults == spec.kwargs


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda p: TakesAnyOption(p, scale=0.5), "its attribute 'scale' is not determined by its defaults"),
        (Coupled, "depends on other parameters"),
        (ClipsTogether, "depends on other parameters"),
        (CountsItself, "depends on other parameters, or on data outside `optimizer.state`"),
        (CountsInGroup, "depends on other parameters, or on data outside `optimizer.state`"),
        (CountsAlone, "depends on other parameters, or on data outside `optimizer.state`"),
        (NumbersGroups, "depends on other parameters, or on data outside `optimizer.state`"),
        (CountsGlobally, "depends on other parameters, or on data outside `optimizer.state`"),
        (CountsOnClass, "its step changes variables or objects outside of `optimizer.state`"),
        (Logs, "its step changes variables or objects outside of `optimizer.state`"),
        (ScalesByAttribute, "its step reads the attribute 'lr_scale' of parameters"),
        (Draws, "its step draws random numbers"),
        (lambda p: KeepsArgument(p, clip=0.5), "its attribute 'clip' is not determined by its defaults"),
        (StateAtBirth, "fails .KeyError"),
        (NeedsGradients, "its step fails for parameters whose `grad` is None .TypeError"),
        (DecaysAlways, "its step changes parameters whose `grad` is None"),
        (OddState, "expected its state 'history' to be a tensor or a number, got list"),
        (lambda p: Wrapping(p, Plain(p)), "its argument 'base' is not among its defaults"),
        (lambda p: Renaming(p, 0.5), "its option 'betas' is not an argument of its constructor"),
        (torch.optim.LBFGS, "LBFGS cannot be used here: it calls the model several times"),
    ],
)
def test_unstreamable_optimizers_are_refused_with_a_remedy(make, reason):
    with pytest.raises(ConfigError, match=reason) as caught:
        OptimizerSpec.of(make(params()))
    assert "optimizer = headwater.optim.AdamW(model.parameters(), lr=1e-3)" in caught.value.remedy


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (Late, r"step 5 keeps 'average' of shape \[3, 4\]"),
        (Growing, r"step 3 keeps 'last' of shape \[3, 12\]"),
    ],
)
def test_a_state_that_grows_is_refused_before_the_first_step(make, what):
    with pytest.raises(ConfigError, match=what) as caught:
        OptimizerSpec.of(make(params()))
    assert "state.setdefault(name, torch.zeros_like(param))" in caught.value.remedy
    assert "the plan reserves memory for these tensors alone" in caught.value.remedy


def test_a_state_that_grows_after_the_probe_is_refused_in_its_step():
    rule = UpdateRule(OptimizerSpec.of(MuchLater(params())))
    value, velocity, scalars = torch.ones(4, 3), {"velocity": torch.empty(4, 3)}, None
    for _ in range(39):
        (scalars,) = rule.apply([value], [torch.ones(4, 3)], [velocity], [scalars], {})
    with pytest.raises(StreamError, match=r"expected 'average' to be absent .* of shape \[4, 3\]") as caught:
        rule.apply([value], [torch.ones(4, 3)], [velocity], [scalars], {})
    assert "the plan reserves memory for these tensors alone" in caught.value.remedy


def transformers_adafactor(params, lr):
    optimization = pytest.importorskip("transformers.optimization")
    return optimization.Adafactor(params, lr=lr, relative_step=False, beta1=0.9)


@pytest.mark.parametrize("make", [Plain, MyAdamW, transformers_adafactor])
def test_streamable_foreign_classes_are_accepted(make):
    ours, theirs = params(), params()
    optimizer = make(theirs, lr=0.05)
    spec = OptimizerSpec.of(optimizer)
    assert spec.name == f"{type(optimizer).__module__}.{type(optimizer).__name__}"
    assert not spec.elementwise
    rule = UpdateRule(spec)
    layouts = [rule.state_layout(ParamSpec("p", tuple(p.shape), p.dtype, p.dtype)) for p in ours]
    states = [
        {name: torch.empty(state.shape or param.shape) for name, state in layout.items()}
        for param, layout in zip(ours, layouts, strict=True)
    ]
    scalars = [None, None]
    for step in range(50):
        for index, param in enumerate(theirs):
            param.grad = torch.sin(torch.arange(param.numel()) + step).view_as(param)
            (scalars[index],) = rule.apply(
                [ours[index].data], [param.grad.clone()], [states[index]], [scalars[index]], {"lr": 0.05}
            )
        optimizer.step()
        assert all(map(torch.equal, ours, theirs))


def test_a_trial_leaves_the_random_generators_as_they_were():
    before = torch.get_rng_state()
    with pytest.raises(ConfigError, match="draws random numbers"):
        OptimizerSpec.of(Draws(params()))
    assert torch.equal(torch.get_rng_state(), before)


def test_an_attribute_with_its_default_value_is_accepted():
    assert OptimizerSpec.of(KeepsArgument(params())).foreign_class is KeepsArgument


def test_only_a_step_with_a_closure_may_use_its_loss():
    OptimizerSpec.of(MyAdamW(params())).check_closure()
    spec = OptimizerSpec.of(ScalesByLoss(params()))
    with pytest.raises(ConfigError, match="uses the loss of its closure"):
        spec.check_closure()


def test_group_options_of_a_user_class_contain_all_entries_of_the_group():
    (group,) = Plain([{"params": params(), "lr_scale": 0.5, "initial_lr": 1.0}]).param_groups
    options = group_options(Plain(params()), group)
    assert options == {"lr": 0.1, "momentum": 0.9, "lr_scale": 0.5}


def test_a_class_object_may_be_given():
    spec = OptimizerSpec("Plain", {"lr": 0.5}, foreign_class=Plain)
    assert type(spec.build(params())) is Plain
    with pytest.raises(ConfigError, match="Coupled cannot be used here"):
        OptimizerSpec("Coupled", {"lr": 0.5}, foreign_class=Coupled)


def test_classes_of_torch_are_known_by_name():
    spec = OptimizerSpec.of(torch.optim.AdamW(params(), lr=torch.tensor(0.25), betas=(0.8, 0.9)))
    assert (spec.name, spec.foreign_class, spec.elementwise) == ("AdamW", None, True)
    assert spec.kwargs["lr"] == 0.25
    assert spec.kwargs["betas"] == (0.8, 0.9)
    assert not spec.kwargs.keys() & {"capturable", "differentiable"}


def test_default_settings_run_what_plain_pytorch_runs_on_the_device():
    optimizer = torch.optim.AdamW(params(), lr=0.1)
    assert OptimizerSpec.of(optimizer).build(params()).defaults["fused"] is False
    assert OptimizerSpec.of(optimizer, "cuda").build(params()).defaults["fused"] is True
    assert OptimizerSpec("AdamW", {"lr": 0.1}).build(params()).defaults["fused"] is True


def test_a_kernel_that_was_asked_for_is_kept():
    for option in ("fused", "foreach"):
        for value in (True, False):
            spec = OptimizerSpec.of(torch.optim.AdamW(params(), **{option: value}))
            assert spec.build(params()).defaults[option] is value


def test_lamb_and_lion_are_known():
    for name, elementwise in (("Lamb", False), ("Lion", True)):
        kind = getattr(headwater.optim, name)
        spec = OptimizerSpec.of(kind(params(), lr=0.5))
        assert (spec.name, spec.elementwise, spec.foreign_class) == (name, elementwise, None)
        assert type(OptimizerSpec(name, {"lr": 0.1}).build(params())) is kind


def test_a_class_with_a_known_name_is_still_foreign():
    class AdamW(Plain):
        pass

    assert OptimizerSpec.of(AdamW(params())).name.endswith("<locals>.AdamW")


def test_group_options_contain_only_the_optimizers_keys():
    groups = [{"params": params(), "lr": torch.tensor(0.5), "tags": ("a",), "betas": [0.5, 0.6]}]
    optimizer = torch.optim.Adam(groups, lr=0.1, eps=1e-5)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    options = group_options(optimizer, optimizer.param_groups[0])
    assert options == {
        "lr": 0.5, "betas": (0.5, 0.6), "eps": 1e-5, "weight_decay": 0, "amsgrad": False, "maximize": False,
        "decoupled_weight_decay": False,
    }  # fmt: skip


def test_parameters_of_every_form_are_taken():
    spec = OptimizerSpec("AdamW", {"lr": 0.1})
    model = torch.nn.Linear(2, 2)
    forms = (model.parameters(), model.named_parameters(), [{"params": model.parameters()}],
             [{"params": model.named_parameters()}], [{"params": model.weight}])  # fmt: skip
    for form in forms:
        optimizer = spec.build(form)
        assert optimizer.param_groups[0]["params"][0] is model.weight
        assert optimizer.defaults["fused"] is True
    for wrong in (model, [], 3):
        with pytest.raises(ConfigError, match="AdamW cannot be built"):
            spec.build(wrong)


SETTINGS = {"rate": 0.1}


class ReadsGlobal(Plain):
    def step(self):
        self.param_groups[0]["lr"] = SETTINGS["rate"]
        super().step()


class HasFactor(Plain):
    factor = 0.5


@pytest.mark.parametrize(("kind", "expected"), [(Plain, False), (ReadsGlobal, True), (HasFactor, True)])
def test_code_that_reads_variables_is_found(kind, expected):
    assert reads_variables(kind) is expected


def test_a_variable_of_a_function_among_the_arguments_is_found():
    rate = 0.1
    assert reads_variables(Plain, [lambda: rate])
    assert not reads_variables(Plain, [lambda: 0.1])
