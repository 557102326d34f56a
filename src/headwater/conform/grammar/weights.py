"""Features of models: how weights are shared, stored and computed."""

from __future__ import annotations

from headwater.conform.grammar.kinds import layer
from headwater.conform.grammar.program import TOKENS, WIDTH, Code, dedented


@layer(
    init=("randn", "t()", "expanded clone", "as_strided", "empty beside"), mode=("matmul", "einsum", "linear")
)
def parameter(n: int, *, init: str, mode: str) -> Code:
    """Return code that adds to a random model a parameter outside its layers, possibly not contiguous."""
    value = {
        "randn": f"torch.randn({WIDTH}, {WIDTH}) / 3",
        "t()": f"(torch.randn({WIDTH}, {WIDTH}) / 3).t()",
        "expanded clone": f"torch.randn(1, {WIDTH}).expand({WIDTH}, {WIDTH}).clone() / 3",
        "as_strided": f"(torch.randn(2, {WIDTH}, {WIDTH}) / 3).permute(1, 2, 0)[..., 0]",
        "empty beside": f"torch.randn({WIDTH}, {WIDTH}) / 3",
    }[init]
    use = {
        "matmul": f"x @ self.w{n}",
        "einsum": f"torch.einsum('bsi,ij->bsj', x, self.w{n})",
        "linear": f"F.linear(x, self.w{n})",
    }[mode]
    empty = f"\nself.e{n} = nn.Parameter(torch.empty(0, 4))" if init == "empty beside" else ""
    more = f" + self.e{n}.sum()" if empty else ""
    return Code(init=f"self.w{n} = nn.Parameter({value}){empty}", forward=f"x = torch.tanh({use}{more})")


@layer(shape=("()", "(1,)", "(3, 1)", "(6,)"))
def scale(n: int, *, shape: str) -> Code:
    """Return code that adds to a random model a small parameter that scales the hidden state."""
    return Code(init=f"self.w{n} = nn.Parameter(torch.ones({shape}))", forward=f"x = x * self.w{n}")


@layer(1, what=("weight", "bias", "both"))
def tie(n: int, other: str, *, what: str) -> Code:
    """Return code that adds to a random model a layer whose parameters are those of another layer."""
    names = ("weight", "bias") if what == "both" else (what,)
    lines = [f"self.m{n}.{name} = self.{other}.{name}" for name in names]
    return Code(
        init="\n".join([f"self.m{n} = nn.Linear({WIDTH}, {WIDTH})", *lines]),
        forward=f"x = torch.tanh(self.m{n}(x))",
    )


@layer(1, how=("same", "t()", "half", "setup"))
def storage_tie(n: int, other: str, *, how: str) -> Code:
    """Return code that adds to a random model a layer whose weight shares another layer's storage."""
    value = {
        "same": f"{other}.weight.data",
        "t()": f"{other}.weight.data.t()",
        "half": f"{other}.weight.data",
        "setup": f"{other}.weight.data",
    }[how]
    line = f"m{n}.weight.data = "
    init = f"self.m{n} = nn.Linear({WIDTH}, {WIDTH})"
    if how == "setup":
        return Code(
            init=init,
            setup=f"model.{line}model.{value}",
            forward=f"x = torch.tanh(self.m{n}(x))",
        )
    if how == "half":
        return Code(
            init=f"{init}\nself.w{n} = nn.Parameter(self.{other}.weight.data[:3])",
            forward=f"x = torch.tanh(self.m{n}(x)) + (x @ self.w{n}.t()).mean(-1, keepdim=True)",
        )
    return Code(init=f"{init}\nself.{line}self.{value}", forward=f"x = torch.tanh(self.m{n}(x))")


@layer()
def views_of_one(n: int) -> Code:
    """Return code that adds to a random model two parameters that are views of one tensor."""
    return Code(
        init=f"""
            base{n} = torch.randn(2 * {WIDTH}, {WIDTH}) / 3
            self.a{n}, self.b{n} = nn.Parameter(base{n}[:{WIDTH}]), nn.Parameter(base{n}[{WIDTH}:])
        """,
        forward=f"x = torch.tanh(x @ self.a{n}) @ self.b{n}",
    )


@layer(1, how=("twice", "around", "by weight", "by transpose"))
def reuse(n: int, other: str, *, how: str) -> Code:
    """Return code that makes a random model use one of its layers, or the layer's weight, a second time."""
    return Code(
        forward={
            "twice": f"x = torch.tanh(self.{other}(torch.tanh(self.{other}(x))))",
            "around": f"x = self.{other}(x.tanh()) - x",
            "by weight": f"x = F.linear(x, self.{other}.weight)",
            "by transpose": f"x = F.linear(x.tanh(), self.{other}.weight.t(), self.{other}.bias)",
        }[how]
    )


@layer(1)
def alias(n: int, other: str) -> Code:
    """Return code that registers a layer of a random model under a second name and calls the layer by it."""
    return Code(init=f"self.alias{n} = self.{other}", forward=f"x = torch.tanh(self.alias{n}(x))")


@layer()
def embedding_head(n: int) -> Code:
    """Return code that adds to a random model an embedding that shares its weight with an output layer."""
    return Code(
        init=f"""
            self.e{n} = nn.Embedding({TOKENS}, {WIDTH})
            self.h{n} = nn.Linear({WIDTH}, {TOKENS}, bias=False)
            self.h{n}.weight = self.e{n}.weight
        """,
        forward=f"x = x + self.e{n}(tokens) + self.h{n}(x).logsumexp(-1, keepdim=True).tanh()",
    )


@layer(
    kind=("weight_norm", "spectral_norm", "orthogonal", "symmetric", "old weight_norm", "old spectral_norm"),
    cached=(False, True),
)
def parametrized(n: int, *, kind: str, cached: bool) -> Code:
    """Return code that adds to a random model a layer whose weight is computed by a parametrization."""
    made, top = f"nn.Linear({WIDTH}, {WIDTH})", ""
    if kind == "symmetric":
        top = f"""
            class Symmetric{n}(nn.Module):
                def forward(self, w):
                    return w.triu() + w.triu(1).transpose(-1, -2)
        """
        init = (
            f"self.m{n} = {made}\nparametrize.register_parametrization(self.m{n}, 'weight', Symmetric{n}())"
        )
    elif kind.startswith("old "):
        init = f"self.m{n} = nn.utils.{kind.removeprefix('old ')}({made})"
    else:
        init = f"self.m{n} = nn.utils.parametrizations.{kind}({made})"
    use = f"x = torch.tanh(self.m{n}(x))"
    if cached and not kind.startswith("old "):
        use = f"with parametrize.cached():\n    x = self.m{n}(torch.tanh(self.m{n}(x)))"
    return Code(top=dedented(top), init=init, forward=use)


@layer(where=("detached", "part", "cat", "norm", "masked"))
def weight_read(n: int, *, where: str) -> Code:
    """Return code that makes a random model read a layer's weight with operators outside of that layer."""
    return Code(
        init=f"self.m{n} = nn.Linear({WIDTH}, {WIDTH})",
        forward={
            "detached": f"x = self.m{n}(x) + F.linear(x, self.m{n}.weight.detach())",
            "part": f"w{n} = self.m{n}.weight\n"
            f"x = torch.cat([F.linear(x, w{n}[:3]), F.linear(x, w{n}[3:])], -1)",
            "cat": f"x = F.linear(x, torch.cat([self.m{n}.weight, self.m{n}.weight]))[..., :{WIDTH}]",
            "norm": f"x = self.m{n}(x) / self.m{n}.weight.norm()",
            "masked": f"x = F.linear(x, self.m{n}.weight * (self.m{n}.weight.abs() > 0.1), self.m{n}.bias)",
        }[where],
        squares=(f"m{n}",),
    )


@layer(how=("clamp", "renorm", "mul", "copy"))
def changed_in_forward(n: int, *, how: str) -> Code:
    """Return code that adds to a random model a weight that its forward changes in place."""
    line = {
        "clamp": f"self.m{n}.weight.clamp_(-0.2, 0.2)",
        "renorm": f"self.m{n}.weight.renorm_(2, 0, 0.5)",
        "mul": f"self.m{n}.weight.mul_(0.9)",
        "copy": f"self.m{n}.weight.copy_(self.m{n}.weight.t().contiguous())",
    }[how]
    return Code(
        init=f"self.m{n} = nn.Linear({WIDTH}, {WIDTH})",
        forward=f"with torch.no_grad():\n    {line}\nx = torch.tanh(self.m{n}(x))",
        squares=(f"m{n}",),
    )


@layer(how=("renorm", "momentum", "data in place", "training only"))
def data_in_forward(n: int, *, how: str) -> Code:
    """Return code that adds to a random model a weight whose `.data` its forward assigns."""
    init = f"self.m{n} = nn.Linear({WIDTH}, {WIDTH})"
    use = f"x = torch.tanh(self.m{n}(x))"
    if how == "momentum":
        return Code(
            init=f"""
                {init}
                self.key{n} = nn.Linear({WIDTH}, {WIDTH}).requires_grad_(False)
            """,
            forward=f"""
                for key, query in zip(self.key{n}.parameters(), self.m{n}.parameters()):
                    key.data = key.data * 0.9 + query.data * 0.1
                x = torch.tanh(self.m{n}(x)) + self.key{n}(x).detach()
            """,
        )
    line = {
        "renorm": f"self.m{n}.weight.data = torch.renorm(self.m{n}.weight.data, 2, 0, 0.5)",
        "data in place": f"self.m{n}.weight.data.mul_(0.9)",
        "training only": f"if self.training:\n    self.m{n}.weight.data = self.m{n}.weight.data * 0.9",
    }[how]
    return Code(init=init, forward=f"{line}\n{use}")


@layer(how=("requires_grad", "no_grad", "detach", "bias", "module"))
def frozen(n: int, *, how: str) -> Code:
    """Return code that adds frozen parameters to a random model."""
    init = f"self.m{n} = nn.Linear({WIDTH}, {WIDTH})"
    use = f"x = x + torch.tanh(self.m{n}(x))"
    if how == "requires_grad":
        return Code(init=f"{init}.requires_grad_(False)", forward=use)
    if how == "bias":
        return Code(init=f"{init}\nself.m{n}.bias.requires_grad = False", forward=use, squares=(f"m{n}",))
    if how == "no_grad":
        return Code(init=init, forward=f"with torch.no_grad():\n    h{n} = self.m{n}(x)\nx = x + h{n}")
    if how == "detach":
        return Code(init=init, forward=f"x = x + self.m{n}(x).detach()", squares=(f"m{n}",))
    return Code(
        init=f"{init}\nself.n{n} = nn.Linear({WIDTH}, {WIDTH}).requires_grad_(False).eval()",
        forward=f"x = self.m{n}(x) + self.n{n}(x)",
    )


@layer(dtype=("float64", "bfloat16", "float16", "complex64"))
def other_dtype(n: int, *, dtype: str) -> Code:
    """Return code that adds to a random model parameters of a dtype other than float32."""
    back = ".real.float()" if dtype == "complex64" else ".float()"
    return Code(
        init=f"self.m{n} = nn.Linear({WIDTH}, {WIDTH}, dtype=torch.{dtype})",
        forward=f"x = x + self.m{n}(x.to(torch.{dtype})){back}.tanh()",
    )


@layer()
def integers(n: int) -> Code:
    """Return code that adds integer, boolean and trained parameters to a random model."""
    return Code(
        init=f"""
            self.i{n} = nn.Parameter(torch.arange({WIDTH}) % 2, requires_grad=False)
            self.b{n} = nn.Parameter(torch.tensor([True, False] * {WIDTH // 2}), requires_grad=False)
            self.w{n} = nn.Parameter(torch.ones({WIDTH}))
        """,
        forward=f"x = torch.where(self.b{n}, x * self.w{n}, x * self.i{n})",
    )


@layer(used=(False, True))
def unused(n: int, *, used: bool) -> Code:
    """Return code that adds to a random model parameters that are never read, or only in eval mode."""
    forward = f"if not self.training:\n    x = x + self.m{n}(x)" if used else ""
    return Code(init=f"self.m{n} = nn.Linear({WIDTH}, {WIDTH})", forward=forward)


@layer(1, mode=("training", "evaluation"), how=("scale", "fp32", "dtype", "numpy", "product"))
def other_read(n: int, other: str, *, mode: str, how: str) -> Code:
    """Return code that makes a random model read a layer's weight in one mode in another way."""
    weight = f"self.{other}.weight"
    read = {
        "scale": f"x = x * {weight}.square().mean()",
        "fp32": f"with torch.autocast('cpu', enabled=False):\n    x = F.linear(x.float(), {weight}).tanh()",
        "dtype": f"x = x.to({weight}.dtype) / 3",
        "numpy": f"x = x * float({weight}.detach().numpy().sum())",
        "product": f"x = F.linear(x, {weight}).tanh()",
    }[how]
    body = "\n".join(f"    {line}" for line in read.splitlines())
    return Code(forward=f"if {'' if mode == 'training' else 'not '}self.training:\n{body}")


@layer()
def empty_layer(n: int) -> Code:
    """Return code that adds to a random model a layer that has 0 outputs."""
    return Code(
        init=f"self.m{n} = nn.Linear({WIDTH}, 0)", forward=f"x = x + self.m{n}(x).sum(-1, keepdim=True)"
    )


@layer(rank=(1, 2), merged=(False, True))
def adapter(n: int, *, rank: int, merged: bool) -> Code:
    """Return code that adds to a random model a frozen layer with a low-rank adapter."""
    use = f"F.linear(x, self.m{n}.weight + self.b{n} @ self.a{n}, self.m{n}.bias)"
    if not merged:
        use = f"self.m{n}(x) + x @ self.a{n}.t() @ self.b{n}.t()"
    return Code(
        init=f"""
            self.m{n} = nn.Linear({WIDTH}, {WIDTH}).requires_grad_(False)
            self.a{n} = nn.Parameter(torch.randn({rank}, {WIDTH}))
            self.b{n} = nn.Parameter(torch.zeros({WIDTH}, {rank}))
        """,
        forward=f"x = torch.tanh({use})",
    )


@layer()
def hypernetwork(n: int) -> Code:
    """Return code that adds to a random model a layer whose weight another layer computes from the tokens."""
    return Code(
        init=f"self.m{n} = nn.Linear({TOKENS}, {WIDTH * WIDTH})",
        forward=f"""
            code{n} = F.one_hot(tokens, {TOKENS}).float().mean(1)
            x = torch.tanh(torch.bmm(x, self.m{n}(code{n}).view(-1, {WIDTH}, {WIDTH}) / 3))
        """,
    )


@layer()
def pruned(n: int) -> Code:
    """Return code that adds to a random model a layer that was pruned before training."""
    return Code(
        init=f"self.m{n} = nn.Linear({WIDTH}, {WIDTH})\n"
        f"prune.l1_unstructured(self.m{n}, 'weight', amount=0.3)",
        forward=f"x = torch.tanh(self.m{n}(x))",
    )
