"""Features of models: ordinary modules."""

from __future__ import annotations

from headwater.conform.grammar.kinds import layer
from headwater.conform.grammar.program import TOKENS, WIDTH, Code


@layer(bias=(True, False), activation=("torch.tanh", "F.gelu", "F.relu", "F.silu"))
def linear(n: int, *, bias: bool, activation: str) -> Code:
    """Return code that adds a linear layer and an activation to a random model."""
    return Code(
        init=f"self.m{n} = nn.Linear({WIDTH}, {WIDTH}, bias={bias})",
        forward=f"x = {activation}(self.m{n}(x))",
        squares=(f"m{n}",) if bias else (),
    )


@layer(depth=(2, 3), residual=(False, True))
def stack(n: int, *, depth: int, residual: bool) -> Code:
    """Return code that adds to a random model linear layers in an `nn.Sequential`."""
    layers = ", nn.Tanh(), ".join([f"nn.Linear({WIDTH}, {WIDTH})"] * depth)
    return Code(
        init=f"self.m{n} = nn.Sequential({layers})",
        forward=f"x = {'x + ' if residual else ''}self.m{n}(x)",
        squares=tuple(f"m{n}[{2 * index}]" for index in range(depth)),
    )


@layer(wide=(1, 4), inplace=(False, True))
def block(n: int, *, wide: int, inplace: bool) -> Code:
    """Return code that adds to a random model a residual block with a layer norm and a wider inner layer."""
    inner = WIDTH * wide
    return Code(
        init=f"""
            self.norm{n} = nn.LayerNorm({WIDTH})
            self.up{n}, self.down{n} = nn.Linear({WIDTH}, {inner}), nn.Linear({inner}, {WIDTH})
            self.act{n} = nn.ReLU(inplace={inplace})
        """,
        forward=f"x = x + self.down{n}(self.act{n}(self.up{n}(self.norm{n}(x))))",
    )


@layer(kind=("GRU", "LSTM", "RNN"), layers=(1, 2), both=(False, True), dropout=(0.0, 0.3))
def recurrent(n: int, *, kind: str, layers: int, both: bool, dropout: float) -> Code:
    """Return code that adds to a random model a recurrent network over the sequence."""
    hidden = WIDTH // 2 if both else WIDTH
    dropped = dropout if layers > 1 else 0.0
    return Code(
        init=f"self.m{n} = nn.{kind}({WIDTH}, {hidden}, {layers}, batch_first=True, bidirectional={both}, "
        f"dropout={dropped})",
        forward=f"x = self.m{n}(x)[0]",
    )


@layer(kind=("GRUCell", "LSTMCell", "RNNCell"))
def cell(n: int, *, kind: str) -> Code:
    """Return code that adds to a random model a recurrent cell called once for each position."""
    first = f"state{n}[0]" if kind == "LSTMCell" else f"state{n}"
    return Code(
        init=f"self.m{n} = nn.{kind}({WIDTH}, {WIDTH})",
        forward=f"""
            state{n}, outputs{n} = None, []
            for position in range(x.shape[1]):
                state{n} = self.m{n}(x[:, position], state{n})
                outputs{n}.append({first})
            x = torch.stack(outputs{n}, 1)
        """,
    )


@layer(kind=("LayerNorm", "RMSNorm"), affine=(True, False))
def norm(n: int, *, kind: str, affine: bool) -> Code:
    """Return code that adds to a random model a norm over features."""
    return Code(
        init=f"self.m{n} = nn.{kind}({WIDTH}, elementwise_affine={affine})", forward=f"x = self.m{n}(x)"
    )


@layer(momentum=(0.1, None), track=(True, False))
def batch_norm(n: int, *, momentum: float | None, track: bool) -> Code:
    """Return code that adds to a random model a batch norm, whose statistics are buffers."""
    return Code(
        init=f"self.m{n} = nn.BatchNorm1d({WIDTH}, momentum={momentum}, track_running_stats={track})",
        forward=f"x = self.m{n}(x.transpose(1, 2)).transpose(1, 2)",
    )


@layer(kind=("GroupNorm(2, 6)", "InstanceNorm1d(6, affine=True, track_running_stats=True)"))
def channel_norm(n: int, *, kind: str) -> Code:
    """Return code that adds to a random model a norm over channels."""
    return Code(init=f"self.m{n} = nn.{kind}", forward=f"x = self.m{n}(x.transpose(1, 2)).transpose(1, 2)")


@layer(groups=(1, 2), mode=("zeros", "circular"), transposed=(False, True))
def convolution(n: int, *, groups: int, mode: str, transposed: bool) -> Code:
    """Return code that adds to a random model a convolution over the sequence."""
    made = f"nn.Conv1d({WIDTH}, {WIDTH}, 3, padding=1, groups={groups}, padding_mode={mode!r})"
    if transposed:
        made = f"nn.ConvTranspose1d({WIDTH}, {WIDTH}, 3, padding=1, groups={groups})"
    return Code(init=f"self.m{n} = {made}", forward=f"x = self.m{n}(x.transpose(1, 2)).transpose(1, 2)")


@layer(channels_last=(False, True), depthwise=(False, True))
def image(n: int, *, channels_last: bool, depthwise: bool) -> Code:
    """Return code that adds to a random model a 2D convolution, possibly with a channels_last weight."""
    moved = ".to(memory_format=torch.channels_last)" if channels_last else ""
    groups = ", groups=2" if depthwise else ""
    return Code(
        init=f"self.m{n} = nn.Conv2d(2, 2, 3, padding=1{groups}){moved}",
        forward=f"x = x + self.m{n}(x.reshape(-1, 2, 3, 3)).reshape(x.shape)",
    )


@layer(heads=(1, 2), dropout=(0.0, 0.2), extra=("", ", add_bias_kv=True", ", add_zero_attn=True", ", kdim=6"))
def attention(n: int, *, heads: int, dropout: float, extra: str) -> Code:
    """Return code that adds multi-head attention to a random model."""
    options = f"dropout={dropout}, batch_first=True{extra}"
    return Code(
        init=f"self.m{n} = nn.MultiheadAttention({WIDTH}, {heads}, {options})",
        forward=f"x = x + self.m{n}(x, x, x, need_weights=False)[0]",
    )


@layer(
    mask=("", ", src_key_padding_mask=tokens == 0", ", is_causal=True, mask=torch.ones(3, 3).triu(1).bool()")
)
def encoder(n: int, *, mask: str) -> Code:
    """Return code that adds to a random model a transformer encoder, which has a fast path in eval mode."""
    made = f"nn.TransformerEncoderLayer({WIDTH}, 2, 8, dropout=0.1, batch_first=True)"
    padded = f"tokens[:, 0] = 1; x = self.m{n}(x{mask})" if "padding" in mask else f"x = self.m{n}(x{mask})"
    return Code(init=f"self.m{n} = nn.TransformerEncoder({made}, 2)", forward=padded)


@layer(first=(False, True))
def decoder(n: int, *, first: bool) -> Code:
    """Return code that adds to a random model a transformer decoder layer with cross-attention."""
    made = f"nn.TransformerDecoderLayer({WIDTH}, 2, 8, dropout=0.0, batch_first=True, norm_first={first})"
    return Code(init=f"self.m{n} = {made}", forward=f"x = self.m{n}(x, x.flip(1))")


@layer(
    padding=(False, True),
    max_norm=(None, 1.0),
    sparse=(False, True),
    scale=(False, True),
)
def embedding(n: int, *, padding: bool, max_norm: float | None, sparse: bool, scale: bool) -> Code:
    """Return code that adds to a random model an embedding of the tokens."""
    options = [
        "padding_idx=2" if padding else "",
        f"max_norm={max_norm}" if max_norm else "",
        "sparse=True" if sparse else "",
        "scale_grad_by_freq=True" if scale and not sparse else "",
    ]
    extra = "".join(f", {option}" for option in options if option)
    return Code(
        init=f"self.m{n} = nn.Embedding({TOKENS}, {WIDTH}{extra})", forward=f"x = x + self.m{n}(tokens)"
    )


@layer(mode=("mean", "sum", "max"))
def embedding_bag(n: int, *, mode: str) -> Code:
    """Return code that adds to a random model an embedding bag of the tokens."""
    return Code(
        init=f"self.m{n} = nn.EmbeddingBag({TOKENS}, {WIDTH}, mode={mode!r})",
        forward=f"x = x + self.m{n}(tokens)[:, None]",
    )


@layer(kind=("Dropout", "AlphaDropout", "Dropout1d"))
def dropout(n: int, *, kind: str) -> Code:
    """Return code that adds dropout to a random model."""
    return Code(init=f"self.m{n} = nn.{kind}(0.3)", forward=f"x = self.m{n}(x)")


@layer()
def bilinear(n: int) -> Code:
    """Return code that adds to a random model a bilinear layer of the hidden state and itself."""
    return Code(
        init=f"self.m{n} = nn.Bilinear({WIDTH}, {WIDTH}, {WIDTH})",
        forward=f"x = torch.tanh(self.m{n}(x, x.flip(1).contiguous()))",
    )


@layer(experts=(2, 3))
def mixture(n: int, *, experts: int) -> Code:
    """Return code that adds to a random model a mixture of experts. Each row uses one expert."""
    return Code(
        init=f"""
            self.router{n} = nn.Linear({WIDTH}, {experts})
            self.m{n} = nn.ModuleList(nn.Linear({WIDTH}, {WIDTH}) for _ in range({experts}))
        """,
        forward=f"""
            weight{n}, choice{n} = self.router{n}(x).softmax(-1).max(-1)
            out{n} = torch.zeros_like(x)
            for index, expert in enumerate(self.m{n}):
                rows = choice{n} == index
                if rows.any():
                    out{n}[rows] = expert(x[rows]) * weight{n}[rows][:, None]
            x = x + out{n}
        """,
        squares=tuple(f"m{n}[{index}]" for index in range(experts)),
    )


@layer(kind=("dict", "parameters", "named parameters"))
def container(n: int, *, kind: str) -> Code:
    """Return code that adds to a random model weights in a ModuleDict, ParameterList or ParameterDict."""
    if kind == "dict":
        return Code(
            init=f"self.m{n} = nn.ModuleDict({{'a': nn.Linear({WIDTH}, {WIDTH}), 'b': nn.Tanh()}})",
            forward=f"x = self.m{n}['b'](self.m{n}['a'](x))",
            squares=(f"m{n}['a']",),
        )
    weights = f"nn.Parameter(torch.randn({WIDTH}, {WIDTH}) / 3)"
    if kind == "parameters":
        return Code(
            init=f"self.m{n} = nn.ParameterList([{weights} for _ in range(2)])",
            forward=f"x = torch.tanh(x @ self.m{n}[0]) @ self.m{n}[1]",
        )
    return Code(
        init=f"self.m{n} = nn.ParameterDict({{'a': {weights}}})",
        forward=f"x = torch.tanh(x @ self.m{n}['a'])",
    )


@layer(lazy=("LazyLinear(6)", "LazyConv1d(3, 1)", "LazyBatchNorm1d()"))
def lazy(n: int, *, lazy: str) -> Code:
    """Return code that adds to a random model a lazy module (its first forward creates its parameters)."""
    return Code(init=f"self.m{n} = nn.{lazy}", forward=f"x = torch.tanh(self.m{n}(x))")


@layer()
def prelu(n: int) -> Code:
    """Return code that adds to a random model an activation that has a parameter."""
    return Code(init=f"self.m{n} = nn.PReLU(3)", forward=f"x = self.m{n}(x)")


@layer(packed_output=(False, True))
def packed(n: int, *, packed_output: bool) -> Code:
    """Return code that makes a random model pack its sequences."""
    through = f"self.inner{n}(packed{n})" if packed_output else f"packed{n}"
    inner = f"self.inner{n} = Packed{n}()" if packed_output else ""
    top = f"""
        class Packed{n}(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear({WIDTH}, {WIDTH})

            def forward(self, packed):
                return packed._replace(data=self.linear(packed.data))
    """
    return Code(
        top=dedent_class(top) if packed_output else "",
        init=f"self.m{n} = nn.GRU({WIDTH}, {WIDTH}, batch_first=True)\n{inner}".strip(),
        forward=f"""
            lengths{n} = torch.tensor([3, 2, 1, 1, 1])[: len(x)]
            packed{n} = nn.utils.rnn.pack_padded_sequence(x, lengths{n}, batch_first=True)
            packed{n} = {through}
            x = x + nn.utils.rnn.pad_packed_sequence(self.m{n}(packed{n})[0], batch_first=True)[0]
        """,
    )


def dedent_class(text: str) -> str:
    """Return module-level source without indentation, with blank lines around it."""
    import textwrap

    return textwrap.dedent(text).strip("\n")
