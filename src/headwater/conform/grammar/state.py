"""Features of models: buffers, attributes and hooks."""

from __future__ import annotations

from headwater.conform.grammar.kinds import layer
from headwater.conform.grammar.program import WIDTH, Code, dedented


@layer(
    how=("counter", "in place", "replaced", "data", "non-persistent", "views", "made in forward", "int math")
)
def buffer(n: int, *, how: str) -> Code:
    """Return code that adds to a random model a buffer that the forward changes."""
    first = f"torch.zeros({WIDTH})"
    if how == "counter":
        return Code(
            init=f"self.register_buffer('b{n}', torch.zeros((), dtype=torch.long))",
            forward=f"self.b{n} += 1\nx = x / (1 + self.b{n})",
        )
    if how == "int math":
        return Code(
            init=f"self.register_buffer('b{n}', torch.tensor(1, dtype=torch.int32))",
            forward=f"self.b{n}.mul_(2).add_(1)\nx = x * (1 + 1 / self.b{n}.item())",
        )
    if how == "made in forward":
        return Code(
            init=f"self.register_buffer('b{n}', None)",
            forward=f"""
                if self.b{n} is None:
                    self.b{n} = x.detach().mean((0, 1))
                x = x - self.b{n}
            """,
        )
    line = {
        "in place": f"self.b{n}.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)",
        "replaced": f"self.b{n} = 0.9 * self.b{n} + 0.1 * x.detach().mean((0, 1))",
        "data": f"self.b{n}.data = self.b{n}.data + x.detach().mean((0, 1))",
        "non-persistent": f"self.b{n}.add_(x.detach().mean((0, 1)))",
        "views": f"self.b{n}[:3] += x.detach().mean((0, 1))[:3]",
    }[how]
    keep = ", persistent=False" if how == "non-persistent" else ""
    return Code(init=f"self.register_buffer('b{n}', {first}{keep})", forward=f"{line}\nx = x - self.b{n}")


@layer()
def shared_buffer(n: int) -> Code:
    """Return code that adds to a random model a buffer that two modules share."""
    return Code(
        top=dedented(f"""
            class Shift{n}(nn.Module):
                def __init__(self, shift):
                    super().__init__()
                    self.register_buffer("shift", shift)

                def forward(self, x):
                    self.shift.add_(0.1)
                    return x + self.shift
        """),
        init=f"""
            shift{n} = torch.zeros({WIDTH})
            self.m{n} = nn.Sequential(Shift{n}(shift{n}), nn.Linear({WIDTH}, {WIDTH}), Shift{n}(shift{n}))
        """,
        forward=f"x = torch.tanh(self.m{n}(x))",
        squares=(f"m{n}[1]",),
    )


@layer(1, kind=("forward", "pre", "output changed", "kwargs", "backward", "backward pre", "global"))
def module_hook(n: int, other: str, *, kind: str) -> Code:
    """Return code that adds to a random model a hook on one of its layers."""
    layer = f"model.{other}"
    return Code(
        setup={
            "forward": f"{layer}.register_forward_hook(lambda module, args, out: out * 0.9)",
            "pre": f"{layer}.register_forward_pre_hook(lambda module, args: (args[0] * 0.9,))",
            "output changed": f"{layer}.register_forward_hook(lambda module, args, out: out.mul_(0.9))",
            "kwargs": f"{layer}.register_forward_pre_hook("
            "lambda module, args, kwargs: ((args[0] + 0.1,), kwargs), with_kwargs=True)",
            "backward": f"{layer}.register_full_backward_hook("
            "lambda module, given, got: tuple(g * 0.5 if g is not None else None for g in given))",
            "backward pre": f"{layer}.register_full_backward_pre_hook(lambda module, got: (got[0] * 0.5,))",
            "global": f"{layer}.register_forward_hook("
            "lambda module, args, out: out + 0.1 * module.weight.sum())",
        }[kind]
    )


@layer(1, kind=("scale", "accumulated", "late"))
def parameter_hook(n: int, other: str, *, kind: str) -> Code:
    """Return code that adds to a random model a hook on a parameter."""
    weight = f"model.{other}.weight"
    scaled = f"{weight}.register_hook(lambda grad: grad * 0.5)"
    if kind == "late":
        return Code(begin=scaled)
    if kind == "scale":
        return Code(setup=scaled)
    return Code(
        setup=f"""
            def halve{n}(parameter):
                parameter.grad.mul_(0.5)
            {weight}.register_post_accumulate_grad_hook(halve{n})
        """
    )


@layer(1)
def tensor_hook(n: int, other: str) -> Code:
    """Return code that adds to a random model a hook on an activation."""
    return Code(
        forward=f"""
            x = self.{other}(x)
            if x.requires_grad:
                x.register_hook(lambda grad: grad * 0.5)
        """
    )


@layer(what=("output", "count", "graph", "list"))
def memory(n: int, *, what: str) -> Code:
    """Return code that adds to a random model an attribute that the forward keeps until the next forward."""
    init = f"self.m{n}, self.kept{n} = nn.Linear({WIDTH}, {WIDTH}), None"
    if what == "count":
        return Code(
            init=f"self.m{n}, self.kept{n} = nn.Linear({WIDTH}, {WIDTH}), 0",
            forward=f"self.kept{n} += 1\nx = torch.tanh(self.m{n}(x)) * self.kept{n}",
        )
    if what == "list":
        return Code(
            init=f"self.m{n}, self.kept{n} = nn.Linear({WIDTH}, {WIDTH}), []",
            forward=f"x = torch.tanh(self.m{n}(x))\nself.kept{n}.append(x)\nx = x + len(self.kept{n})",
        )
    kept = "x.detach()" if what == "output" else "x"
    return Code(
        init=init,
        forward=f"""
            x = torch.tanh(self.m{n}(x))
            if self.kept{n} is not None:
                x = x + self.kept{n}.detach().mean()
            self.kept{n} = {kept}
        """,
    )


@layer()
def extra_state(n: int) -> Code:
    """Return code that adds to a random model a module that has extra state in its state_dict."""
    return Code(
        top=dedented(f"""
            class Counter{n}(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.count = torch.zeros(())

                def forward(self, x):
                    self.count = self.count + 1
                    return x * self.count

                def get_extra_state(self):
                    return self.count

                def set_extra_state(self, state):
                    self.count = state
        """),
        init=f"self.m{n} = Counter{n}()",
        forward=f"x = self.m{n}(x).tanh()",
    )
