"""Features of loops: the model's structure changes between steps."""

from __future__ import annotations

from headwater.conform.grammar.kinds import loop
from headwater.conform.grammar.program import WIDTH, Code

_LINEAR = f"nn.Linear({WIDTH}, {WIDTH})"
_STEPS = (1, 0)
_REBUILT = {"new": "optimizer = make_optimizer(model)", "none": ""}


def at(step: int, *lines: str) -> str:
    """Return lines that run in one step only."""
    body = "\n".join("    " + line for text in lines for line in text.splitlines() if line.strip())
    return f"if step == {step}:\n{body}"


def _group(parameters: str) -> str:
    return f'optimizer.add_param_group({{"params": {parameters}}})'


def _known(how: str, parameters: str) -> str:
    """Return the line that makes the optimizer know new parameters."""
    return _group(parameters) if how == "group" else _REBUILT[how]


_OPTIMIZER = ("new", "group", "none")


@loop(1, step=_STEPS, optimizer=_OPTIMIZER)
def replace_layer(n: int, other: str, *, step: int, optimizer: str) -> Code:
    """Return code that makes a random training loop replace a layer of the model."""
    known = _known(optimizer, f"list(model.{other}.parameters())")
    return Code(batch=at(step, f"model.{other} = {_LINEAR}", known))


@loop(step=_STEPS, optimizer=_OPTIMIZER, width=(2, 4))
def new_head(n: int, *, step: int, optimizer: str, width: int) -> Code:
    """Return code that makes a random training loop replace the model's head, possibly with another width."""
    known = _known(optimizer, "list(model.head.parameters())")
    return Code(batch=at(step, f"model.head = nn.Linear({WIDTH}, {width})", known))


@loop(1, step=_STEPS, optimizer=_OPTIMIZER, shape=("same", "transposed"))
def replace_parameter(n: int, other: str, *, step: int, optimizer: str, shape: str) -> Code:
    """Return code that makes a random training loop replace a parameter of the model."""
    value = f"torch.randn({WIDTH}, {WIDTH})" + (".t()" if shape == "transposed" else "")
    known = _known(optimizer, f"[model.{other}.weight]")
    return Code(batch=at(step, f"model.{other}.weight = nn.Parameter({value})", known))


@loop(
    step=_STEPS,
    what=("append", "pop", "insert", "identity", "swap", "reverse", "extend"),
    optimizer=("new", "none"),
)
def container_changes(n: int, *, step: int, what: str, optimizer: str) -> Code:
    """Return code that makes a random training loop add, remove or move layers of a container."""
    line = {
        "append": f"model.m{n}.append({_LINEAR})",
        "pop": f"model.m{n}.pop(1)",
        "insert": f"model.m{n}.insert(1, {_LINEAR})",
        "identity": f"model.m{n}[1] = nn.Identity()",
        "swap": f"model.m{n}[0], model.m{n}[1] = model.m{n}[1], model.m{n}[0]",
        "reverse": f"model.m{n} = nn.Sequential(*reversed(list(model.m{n})))",
        "extend": f"model.m{n}.extend([nn.Tanh(), {_LINEAR}])",
    }[what]
    return Code(
        init=f"self.m{n} = nn.Sequential({_LINEAR}, {_LINEAR}, nn.Tanh())",
        forward=f"x = self.m{n}(x)",
        batch=at(step, line, _REBUILT[optimizer]),
        squares=(f"m{n}[0]",),
    )


@loop(1, step=_STEPS, how=("weight", "bias", "storage", "from head"))
def tie_late(n: int, other: str, *, step: int, how: str) -> Code:
    """Return code that makes a random training loop tie parameters between steps."""
    line = {
        "weight": f"model.m{n}.weight = model.{other}.weight",
        "bias": f"model.m{n}.bias = model.{other}.bias",
        "storage": f"model.m{n}.weight.data = model.{other}.weight.data",
        "from head": f"model.m{n}.weight = model.{other}.weight\nmodel.m{n}.bias = model.first.bias",
    }[how]
    return Code(
        init=f"self.m{n} = {_LINEAR}",
        forward=f"x = torch.tanh(self.m{n}(x))",
        batch=at(step, line, "optimizer = make_optimizer(model)"),
    )


@loop(step=_STEPS, optimizer=("new", "none"))
def untie_late(n: int, *, step: int, optimizer: str) -> Code:
    """Return code that makes a random training loop separate tied parameters between steps."""
    return Code(
        init=f"self.a{n}, self.b{n} = {_LINEAR}, {_LINEAR}\nself.b{n}.weight = self.a{n}.weight",
        forward=f"x = torch.tanh(self.b{n}(torch.tanh(self.a{n}(x))))",
        batch=at(
            step, f"model.b{n}.weight = nn.Parameter(model.a{n}.weight.detach().clone())", _REBUILT[optimizer]
        ),
    )


@loop(1, step=_STEPS, back=(False, True), optimizer=("none", "new"))
def freeze(n: int, other: str, *, step: int, back: bool, optimizer: str) -> Code:
    """Return code that makes a random training loop freeze a layer and possibly unfreeze it a step later."""
    thaw = at(step + 1, f"model.{other}.requires_grad_(True)", _REBUILT[optimizer])
    frozen = at(
        step, f"model.{other}.requires_grad_(False)", f"model.{other}.zero_grad()", _REBUILT[optimizer]
    )
    return Code(batch=frozen + ("\n" + thaw if back else ""))


@loop(1, step=_STEPS, group=(False, True))
def thaw(n: int, other: str, *, step: int, group: bool) -> Code:
    """Return code that makes a random training loop keep a layer frozen at first, then train it."""
    known = _group(f"list(model.{other}.parameters())") if group else _REBUILT["new"]
    return Code(
        setup=f"model.{other}.requires_grad_(False)",
        batch=at(step, f"model.{other}.requires_grad_(True)", known),
    )


@loop(1, step=_STEPS, how=("layer", "class", "root"))
def forward_assigned(n: int, other: str, *, step: int, how: str) -> Code:
    """Return code that makes a random training loop replace the forward of a module between steps."""
    lines = {
        "layer": f"weight{n} = model.{other}\n"
        f"model.{other}.forward = lambda x: F.linear(x, weight{n}.weight) * 0.5",
        "class": f"class Half{n}(nn.Linear):\n    def forward(self, x): return super().forward(x) * 0.5\n"
        f"model.{other}.__class__ = Half{n}",
        "root": f"before{n} = model.forward\nmodel.forward = lambda x, tokens: before{n}(x * 0.5, tokens)",
    }[how]
    return Code(batch=at(step, lines))


@loop(1, step=_STEPS, how=("l1", "custom", "remove"))
def prune_late(n: int, other: str, *, step: int, how: str) -> Code:
    """Return code that makes a random training loop prune a layer between steps."""
    lines = [
        f"prune.l1_unstructured(model.{other}, 'weight', amount=0.3)"
        if how != "custom"
        else f"prune.custom_from_mask(model.{other}, 'weight', torch.eye({WIDTH}))"
    ]
    if how == "remove":
        lines.append(f"prune.remove(model.{other}, 'weight')")
    return Code(batch=at(step, *lines, _REBUILT["new"]))


@loop(1, step=_STEPS, how=("weight_norm", "remove"))
def parametrize_late(n: int, other: str, *, step: int, how: str) -> Code:
    """Return code that makes a random training loop add or remove a parametrization between steps."""
    if how == "weight_norm":
        return Code(batch=at(step, f"nn.utils.parametrizations.weight_norm(model.{other})", _REBUILT["new"]))
    return Code(
        init=f"self.m{n} = nn.utils.parametrizations.weight_norm({_LINEAR})",
        forward=f"x = torch.tanh(self.m{n}(x))",
        batch=at(step, f"parametrize.remove_parametrizations(model.m{n}, 'weight')", _REBUILT["new"]),
    )


@loop(1, step=_STEPS, kind=("forward", "backward", "removed"))
def hook_late(n: int, other: str, *, step: int, kind: str) -> Code:
    """Return code that makes a random training loop add or remove a module hook between steps."""
    hook = f"model.{other}.register_forward_hook(lambda module, args, out: out * 0.5)"
    if kind == "removed":
        return Code(setup=f"hook{n} = {hook}", batch=at(step, f"hook{n}.remove()"))
    if kind == "backward":
        hook = f"model.{other}.register_full_backward_hook(lambda module, given, got: (given[0] * 0.5,))"
    return Code(batch=at(step, hook))


@loop(step=_STEPS, how=("value", "register", "shape", "persistent"))
def buffer_late(n: int, *, step: int, how: str) -> Code:
    """Return code that makes a random training loop set, register or delete a buffer between steps."""
    line = {
        "value": f"model.b{n} = torch.full(({WIDTH},), 0.5)",
        "register": f"model.register_buffer('c{n}', torch.ones(()))",
        "shape": f"model.b{n} = torch.full((3, 1), 0.5)",
        "persistent": f"model.b{n}.fill_(0.5)",
    }[how]
    return Code(
        init=f"self.register_buffer('b{n}', torch.zeros({WIDTH}))",
        forward=f"x = x + self.b{n} + getattr(self, 'c{n}', 0)",
        batch=at(step, line),
    )


@loop(step=_STEPS, optimizer=("new", "group"))
def parameter_late(n: int, *, step: int, optimizer: str) -> Code:
    """Return code that makes a random training loop register a new parameter between steps."""
    known = _known(optimizer, f"[model.p{n}]")
    return Code(
        forward=f"x = x * getattr(self, 'p{n}', 1.0)",
        batch=at(step, f"model.p{n} = nn.Parameter(torch.full(({WIDTH},), 0.5))", known),
    )


@loop(step=_STEPS, how=("none", "parameter"))
def deleted(n: int, *, step: int, how: str) -> Code:
    """Return code that makes a random training loop remove a layer's bias between steps."""
    line = f"model.m{n}.bias = None" if how == "none" else f"model.m{n}.register_parameter('bias', None)"
    return Code(
        init=f"self.m{n} = {_LINEAR}",
        forward=f"x = torch.tanh(self.m{n}(x))",
        batch=at(step, line, _REBUILT["new"]),
    )


@loop(step=_STEPS, how=("double", "bfloat16"))
def converted(n: int, *, step: int, how: str) -> Code:
    """Return code that makes a random training loop change the dtype of a layer between steps."""
    return Code(
        init=f"self.m{n} = {_LINEAR}",
        forward=f"x = x + self.m{n}(x.to(self.m{n}.weight.dtype)).float().tanh()",
        batch=at(step, f"model.m{n}.{how}()", _REBUILT["new"]),
    )
