"""Features of models: control flow, checkpointing and autograd within the forward."""

from __future__ import annotations

from headwater.conform.grammar.kinds import layer
from headwater.conform.grammar.program import WIDTH, Code, dedented

_LINEAR = f"nn.Linear({WIDTH}, {WIDTH})"


@layer(
    what=("linear", "dropout", "batch norm", "buffer", "shared"),
    reentrant=(False, True),
    nested=(False, True),
)
def checkpoint(n: int, *, what: str, reentrant: bool, nested: bool) -> Code:
    """Return code that makes a random model's forward call `torch.utils.checkpoint`."""
    inner = {
        "linear": f"nn.Sequential({_LINEAR}, nn.Tanh(), {_LINEAR})",
        "dropout": f"nn.Sequential({_LINEAR}, nn.Dropout(0.3), {_LINEAR})",
        "batch norm": f"nn.Sequential({_LINEAR}, nn.BatchNorm1d(3), {_LINEAR})",
        "buffer": f"nn.Sequential({_LINEAR}, Running{n}(), {_LINEAR})",
        "shared": f"nn.Sequential({_LINEAR}, nn.Tanh(), self.first)",
    }[what]
    top = f"""
        class Running{n}(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("mean", torch.zeros({WIDTH}))

            def forward(self, x):
                self.mean.mul_(0.9).add_(x.detach().mean((0, 1)))
                return x - 1
    """
    call = f"torch.utils.checkpoint.checkpoint(self.m{n}, x, use_reentrant={reentrant})"
    if nested:
        call = (
            f"torch.utils.checkpoint.checkpoint(lambda x: torch.tanh({call}), x, use_reentrant={reentrant})"
        )
    return Code(
        top="import torch.utils.checkpoint\n\n" + (dedented(top) if what == "buffer" else ""),
        init=f"self.m{n} = {inner}",
        forward=f"x = {call}",
        squares=(f"m{n}[0]",),
    )


@layer(on=("data", "step", "random", "batch size"))
def branch(n: int, *, on: str) -> Code:
    """Return code that makes a random model's forward choose between two layers."""
    init = f"self.a{n}, self.b{n}, self.calls{n} = {_LINEAR}, {_LINEAR}, 0"
    chosen = {
        "data": "x.mean() > 0",
        "step": f"self.calls{n} % 2",
        "random": "torch.rand(()) > 0.5",
        "batch size": "len(x) % 2",
    }[on]
    return Code(
        init=init,
        forward=f"""
            self.calls{n} += 1
            if {chosen}:
                x = torch.tanh(self.a{n}(x))
            else:
                x = torch.sigmoid(self.b{n}(x))
        """,
        squares=(f"a{n}", f"b{n}"),
    )


@layer(until=("data", "random", "calls"))
def repeat(n: int, *, until: str) -> Code:
    """Return code that makes a random model call a layer a number of times that can change."""
    count = {
        "data": "1 + int(x.abs().sum().item()) % 3",
        "random": "int(torch.randint(1, 4, ()))",
        "calls": f"1 + self.calls{n} % 3",
    }[until]
    return Code(
        init=f"self.m{n}, self.calls{n} = {_LINEAR}, 0",
        forward=f"""
            self.calls{n} += 1
            for _ in range({count}):
                x = torch.tanh(self.m{n}(x))
        """,
        squares=(f"m{n}",),
    )


@layer(how=("permutation", "stochastic depth", "reversed"))
def order(n: int, *, how: str) -> Code:
    """Return code that adds to a random model layers whose order or number changes from step to step."""
    chosen = {
        "permutation": "torch.randperm(3).tolist()",
        "stochastic depth": "[i for i in range(3) if not self.training or torch.rand(()) > 0.4]",
        "reversed": f"range(3) if self.calls{n} % 2 else (2, 1, 0)",
    }[how]
    return Code(
        init=f"self.m{n}, self.calls{n} = nn.ModuleList({_LINEAR} for _ in range(3)), 0",
        forward=f"""
            self.calls{n} += 1
            for index in {chosen}:
                x = torch.tanh(self.m{n}[index](x))
        """,
        squares=tuple(f"m{n}[{index}]" for index in range(3)),
    )


@layer(how=("item", "add", "relu", "setitem", "out"))
def in_place_activation(n: int, *, how: str) -> Code:
    """Return code that makes a random model change an activation in place."""
    lines = {
        "item": f"x = self.m{n}(x)\nx[:, 0] = 0",
        "add": f"x = self.m{n}(x).add_(1).mul_(0.5)",
        "relu": f"x = F.relu_(self.m{n}(x))",
        "setitem": f"h{n} = self.m{n}(x)\nh{n}[..., :3] *= 2\nx = h{n}",
        "out": f"h{n} = x.clone()\nh{n}[:, 1:] = self.m{n}(x)[:, :-1]\nx = h{n}",
    }[how]
    return Code(init=f"self.m{n} = {_LINEAR}", forward=lines, squares=(f"m{n}",))


@layer(saves=("weight", "both"))
def function(n: int, *, saves: str) -> Code:
    """Return code that makes a random model apply a custom `autograd.Function` to a weight."""
    back = "(got.flatten(0, 1).t() @ x.flatten(0, 1)).t()"
    return Code(
        top=dedented(f"""
            class Product{n}(torch.autograd.Function):
                @staticmethod
                def forward(ctx, x, w):
                    ctx.save_for_backward({"x, w" if saves == "both" else "w"})
                    {"" if saves == "both" else "ctx.x = x.detach()"}
                    return x @ w

                @staticmethod
                def backward(ctx, got):
                    {"x, w = ctx.saved_tensors" if saves == "both" else "(w,), x = ctx.saved_tensors, ctx.x"}
                    return got @ w.t(), {back}
        """),
        init=f"self.w{n} = nn.Parameter(torch.randn({WIDTH}, {WIDTH}) / 3)",
        forward=f"x = torch.tanh(Product{n}.apply(x, self.w{n}))",
    )


@layer(how=("grad", "functional_call", "vmap", "func.grad", "jacobian"))
def inner_derivative(n: int, *, how: str) -> Code:
    """Return code that makes a random model's forward compute derivatives or make functional calls."""
    init = f"self.m{n} = {_LINEAR}"
    lines = {
        "grad": f"""
            with torch.enable_grad():
                v{n} = x if x.requires_grad else x.detach().requires_grad_()
                e{n} = self.m{n}(v{n}).tanh().square().sum()
                x = x - torch.autograd.grad(e{n}, v{n}, create_graph=self.training)[0]
        """,
        "functional_call": f"""
            weights{n} = {{name: 0.5 * value for name, value in self.m{n}.named_parameters()}}
            x = torch.tanh(torch.func.functional_call(self.m{n}, weights{n}, (x,)))
        """,
        "vmap": f"x = torch.tanh(torch.func.vmap(self.m{n})(x))",
        "func.grad": f"""
            x = x - torch.func.grad(lambda v: self.m{n}(v).tanh().square().sum())(x)
        """,
        "jacobian": f"""
            x = x + torch.func.vmap(torch.func.jacrev(self.m{n}))(x.flatten(0, 1)).sum(1).view(x.shape)
        """,
    }[how]
    return Code(init=init, forward=lines)


@layer(dtype=("bfloat16", "float16"), cache=(True, False))
def autocast(n: int, *, dtype: str, cache: bool) -> Code:
    """Return code that makes a random model's forward enter autocast."""
    return Code(
        init=f"self.m{n} = {_LINEAR}",
        forward=f"""
            with torch.autocast("cpu", dtype=torch.{dtype}, cache_enabled={cache}):
                h{n} = self.m{n}(torch.tanh(self.m{n}(x)))
            x = x + h{n}.float()
        """,
        squares=(f"m{n}",),
    )


@layer(of=("matrix", "output"))
def sparse(n: int, *, of: str) -> Code:
    """Return code that adds to a random model a sparse tensor that the forward makes."""
    if of == "matrix":
        return Code(
            init=f"self.m{n} = {_LINEAR}",
            forward=f"""
                graph{n} = torch.eye(3).roll(1, 0).to_sparse()
                x = torch.tanh(self.m{n}(torch.stack([torch.sparse.mm(graph{n}, rows) for rows in x])))
            """,
        )
    return Code(
        top=dedented(f"""
            class Spread{n}(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.linear = {_LINEAR}

                def forward(self, x, graph):
                    return torch.stack([torch.sparse.mm(graph, rows) for rows in self.linear(x)])
        """),
        init=f"self.m{n} = Spread{n}()",
        forward=f"x = torch.tanh(self.m{n}(x, torch.eye(3).roll(1, 0).to_sparse()))",
    )


@layer(how=("dict", "tuple", "object", "keyword", "nested list"))
def passing(n: int, *, how: str) -> Code:
    """Return code that adds to a random model a layer that takes and returns tensors within other objects."""
    given, unpacked, returned, read = {
        "dict": ("{'x': x}", "given['x']", "{'x': x, 'n': None}", "['x']"),
        "tuple": ("(x, tokens)", "given[0]", "(x, x.mean())", "[0]"),
        "object": ("Box(x)", "given.x", "Box(x)", ".x"),
        "keyword": ("x", "given", "x", ""),
        "nested list": ("[[x], 3]", "given[0][0]", "[[x], x.sum()]", "[0][0]"),
    }[how]
    box = """
        class Box:
            def __init__(self, x):
                self.x = x
    """
    name = "given=" if how == "keyword" else ""
    top = dedented(f"""
        class Takes{n}(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = {_LINEAR}

            def forward(self, given):
                x = torch.tanh(self.linear({unpacked}))
                return {returned}
    """)
    return Code(
        top=(dedented(box) + "\n\n\n" if how == "object" else "") + top,
        init=f"self.m{n} = Takes{n}()",
        forward=f"x = self.m{n}({name}{given}){read}",
    )


@layer(how=("set", "instance", "method"))
def odd_call(n: int, *, how: str) -> Code:
    """Return code that makes a random model call a layer in an unusual way."""
    init = f"self.m{n} = {_LINEAR}"
    if how == "set":
        return Code(
            init=f"{init}\nlinear{n} = self.m{n}\nself.m{n}.forward = "
            f"lambda x: F.linear(x, linear{n}.weight) * 2",
            forward=f"x = torch.tanh(self.m{n}(x))",
        )
    if how == "instance":
        return Code(init=f"{init}\nself.call{n} = [self.m{n}]", forward=f"x = torch.tanh(self.call{n}[0](x))")
    return Code(init=init, forward=f"x = torch.tanh(self.m{n}.forward(x))", squares=(f"m{n}",))


@layer()
def straight_through(n: int) -> Code:
    """Return code that makes a random model round a weight and ignore the rounding in the gradient."""
    return Code(
        init=f"self.m{n} = {_LINEAR}",
        forward=f"""
            w{n} = self.m{n}.weight
            w{n} = w{n} + ((w{n} * 8).round() / 8 - w{n}).detach()
            x = torch.tanh(F.linear(x, w{n}, self.m{n}.bias))
        """,
        squares=(f"m{n}",),
    )


@layer(how=("bernoulli", "gumbel", "normal"))
def noise(n: int, *, how: str) -> Code:
    """Return code that makes a random model's forward draw random numbers."""
    return Code(
        init=f"self.m{n} = {_LINEAR}",
        forward={
            "bernoulli": f"x = self.m{n}(x) * torch.bernoulli(torch.full_like(x, 0.7))",
            "gumbel": f"x = F.gumbel_softmax(self.m{n}(x), hard=True) + x",
            "normal": f"x = torch.tanh(self.m{n}(x)) + 0.1 * torch.randn_like(x)",
        }[how],
        squares=(f"m{n}",),
    )


@layer()
def scan(n: int) -> Code:
    """Return code that adds to a random model a state-space scan with input-dependent steps."""
    return Code(
        init=f"""
            self.a{n} = nn.Parameter(torch.randn({WIDTH}))
            self.m{n} = nn.Linear({WIDTH}, 2 * {WIDTH})
        """,
        forward=f"""
            step{n}, put{n} = self.m{n}(x).chunk(2, -1)
            state{n}, out{n} = torch.zeros_like(x[:, 0]), []
            for position in range(x.shape[1]):
                keep = torch.exp(-F.softplus(step{n}[:, position]) * self.a{n}.sigmoid())
                state{n} = keep * state{n} + put{n}[:, position]
                out{n}.append(state{n})
            x = x + torch.stack(out{n}, 1)
        """,
    )


@layer()
def numpy_call(n: int) -> Code:
    """Return code that makes a random model use a number that numpy computes from its tensors."""
    return Code(
        init=f"self.m{n} = {_LINEAR}",
        forward=f"""
            x = torch.tanh(self.m{n}(x))
            x = x * float(1 + abs(self.m{n}.weight.detach().numpy()).mean()) - x.detach().numpy().mean()
        """,
    )
