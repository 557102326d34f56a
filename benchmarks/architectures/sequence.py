"""Small text, sequence and recurrent models."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.architectures.catalogue import architecture, sequences, tokens


class Language(nn.Module):
    """Token embedding, blocks over [batch, length, 8], and a head tied to the embedding."""

    def __init__(self, *blocks: nn.Module, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList(blocks)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 20, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Causal(nn.Module):
    """Causal attention with rotary positions, shared keys, a bias of distances or a window."""

    def __init__(self, *, rotary: bool = False, shared: bool = False, slopes: bool = False, window: int = 0):
        super().__init__()
        self.rotary, self.shared, self.slopes, self.window = rotary, shared, slopes, window
        self.norm, self.query, self.out = nn.RMSNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.key_value = nn.Linear(8, 8 if shared else 16)
        self.gate, self.up, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        batch, length, _ = x.shape
        y = self.norm(x)
        query = self.query(y).view(batch, length, 2, 4).transpose(1, 2)
        key, value = self.key_value(y).view(batch, length, -1, 4).transpose(1, 2).chunk(2, 1)
        if self.rotary:
            query, key = _rotated(query), _rotated(key)
        distance = torch.arange(length)[:, None] - torch.arange(length)
        mask = torch.where(distance >= 0, 0.0, float("-inf"))
        if self.slopes:
            mask = mask - distance.abs() * torch.tensor([0.5, 0.25])[:, None, None]
        if self.window:
            mask = mask.masked_fill(distance >= self.window, float("-inf"))
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=self.shared)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, 8))
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


def _rotated(x):
    angles = torch.arange(x.shape[-2])[:, None] * torch.tensor([1.0, 0.1])
    left, right = x.chunk(2, -1)
    return torch.cat(
        [left * angles.cos() - right * angles.sin(), left * angles.sin() + right * angles.cos()], -1
    )


@architecture("GPT with tied embedding", "language")
def gpt():
    return Language(Causal(), Causal()), tokens()


@architecture("Llama (rotary, shared keys, gated)", "language")
def llama():
    return Language(Causal(rotary=True, shared=True), Causal(rotary=True, shared=True), tied=False), tokens()


@architecture("Distance slopes (ALiBi)", "language")
def alibi():
    return Language(Causal(slopes=True)), tokens()


@architecture("Sliding windows beside full attention", "language")
def windows():
    return Language(Causal(window=2), Causal(), Causal(window=3)), tokens()


@architecture("Universal transformer (one block, many times)", "language")
def universal():
    class Repeated(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Causal()

        def forward(self, x):
            for _ in range(3):
                x = self.block(x)
            return x

    return Language(Repeated()), tokens()


@architecture("Mixture of experts (two of four, load loss)", "language")
def experts():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.router = nn.Linear(8, 4)
            self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x):
            flat = x.flatten(0, 1)
            weight, choice = self.router(flat).softmax(-1).topk(2, -1)
            out = torch.zeros_like(flat)
            for index, expert in enumerate(self.experts):
                rows, place = (choice == index).nonzero(as_tuple=True)
                out = out.index_add(0, rows, expert(flat[rows]) * weight[rows, place, None])
            return x + out.view_as(x)

    return Language(Causal(), Experts()), tokens()


@architecture("Mixture of depths (tokens that skip a block)", "language")
def depths():
    class Skipping(nn.Module):
        def __init__(self):
            super().__init__()
            self.score, self.inner = nn.Linear(8, 1), nn.Linear(8, 8)

        def forward(self, x):
            score = self.score(x)[..., 0]
            rows = score.topk(2, 1).indices[..., None].expand(-1, -1, 8)
            chosen = x.gather(1, rows)
            changed = self.inner(chosen) * score.gather(1, rows[..., 0])[..., None].sigmoid()
            return x.scatter_add(1, rows, changed)

    return Language(Skipping(), Causal()), tokens()


@architecture("Early exit (confidence decides the depth)", "language")
def early_exit():
    class Exiting(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.out = nn.Embedding(20, 8), nn.Linear(8, 20)
            self.blocks = nn.ModuleList(Causal() for _ in range(4))

        def forward(self, ids):
            x, losses = self.embed(ids), []
            for block in self.blocks:
                x = block(x)
                logits = self.out(x)
                losses.append(F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))
                if logits.softmax(-1).max().item() > 0.2 and len(losses) > 1:
                    break
            return torch.stack(losses).mean()

    return Exiting(), tokens()


@architecture("Adaptive softmax", "language")
def adaptive_softmax():
    class Adaptive(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.block = nn.Embedding(40, 8), Causal()
            self.out = nn.AdaptiveLogSoftmaxWithLoss(8, 40, [10, 20])

        def forward(self, ids):
            return self.out(self.block(self.embed(ids)).flatten(0, 1), ids.flatten()).loss

    return Adaptive(), tokens(40)


@architecture("Encoder and decoder", "language")
def translation():
    class Translation(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(20, 8, padding_idx=0)
            self.model = nn.Transformer(8, 2, 2, 2, 16, dropout=0.1, batch_first=True)
            self.head = nn.Linear(8, 20)

        def forward(self, ids):
            source, target = self.embed(ids), self.embed(ids.flip(1))
            mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
            return self.head(self.model(source, target, tgt_mask=mask, tgt_is_causal=True))

    return Translation(), tokens()


@architecture("Perceiver (latents attend to inputs)", "language")
def perceiver():
    class Perceiver(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.latents = nn.Embedding(20, 8), nn.Parameter(torch.randn(3, 8))
            self.cross = nn.MultiheadAttention(8, 2, batch_first=True)
            self.own = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, ids):
            inputs, x = self.embed(ids), self.latents.expand(len(ids), -1, -1)
            for _ in range(2):
                x = x + self.cross(x, inputs, inputs, need_weights=False)[0]
                x = x + self.own(x, x, x, need_weights=False)[0]
            return x

    return Perceiver(), tokens()


@architecture("Linear attention", "language")
def linear_attention():
    class Linear(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x):
            query, key, value = self.qkv(x).chunk(3, -1)
            query, key = F.elu(query) + 1, F.elu(key) + 1
            state = torch.einsum("bsk,bsv->bskv", key, value).cumsum(1)
            norm = torch.einsum("bsk,bsk->bs", query, key.cumsum(1))
            return x + torch.einsum("bsk,bskv->bsv", query, state) / norm[..., None]

    return Language(Linear(), Linear()), tokens()


@architecture("Fourier mixing", "language")
def fourier():
    class Mix(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x):
            return x + self.inner(torch.fft.fft2(x).real)

    return Language(Mix(), Mix()), tokens()


@architecture("Reversible blocks (own autograd function)", "language")
def reversible():
    class Recomputed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x + (x @ weight).tanh()

        @staticmethod
        def backward(ctx, got):
            x, weight = ctx.saved_tensors
            with torch.enable_grad():
                x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
                out = x + (x @ weight).tanh()
            return torch.autograd.grad(out, (x, weight), got)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8) / 3)

        def forward(self, x):
            return Recomputed.apply(x, self.weight)

    return Language(Block(), Block()), tokens()


@architecture("LSTM language model", "recurrent")
def lstm():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.core = nn.Embedding(20, 8), nn.LSTM(8, 8, 2, dropout=0.2, batch_first=True)
            self.head = nn.Linear(8, 20)

        def forward(self, ids):
            return self.head(self.core(self.embed(ids))[0])

    return Recurrent(), tokens()


@architecture("Bidirectional GRU with attention pooling", "recurrent")
def gru():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.core, self.score = nn.GRU(8, 4, batch_first=True, bidirectional=True), nn.Linear(8, 1)

        def forward(self, x):
            x = self.core(x)[0]
            return (x * self.score(x).softmax(1)).sum(1)

    return Recurrent(), sequences()


@architecture("Sequence to sequence with scheduled sampling", "recurrent")
def scheduled_sampling():
    class Sampled(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.encoder = nn.Embedding(20, 8), nn.GRU(8, 8, batch_first=True)
            self.cell, self.head = nn.GRUCell(8, 8), nn.Linear(8, 20)

        def forward(self, ids):
            state = self.encoder(self.embed(ids))[1][0]
            word, outputs = ids[:, 0], []
            for position in range(1, ids.shape[1]):
                state = self.cell(self.embed(word), state)
                outputs.append(self.head(state))
                word = ids[:, position] if torch.rand(()) < 0.5 else outputs[-1].argmax(-1)
            return F.cross_entropy(torch.stack(outputs, 1).flatten(0, 1), ids[:, 1:].flatten())

    return Sampled(), tokens()


@architecture("Pointer network", "recurrent")
def pointer():
    class Pointer(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.cell = nn.LSTM(8, 8, batch_first=True), nn.LSTMCell(8, 8)
            self.start = nn.Parameter(torch.zeros(8))

        def forward(self, x):
            keys, (hidden, memory) = self.encoder(x)
            state, word, scores = (hidden[0], memory[0]), self.start.expand(len(x), -1), []
            for _ in range(3):
                state = self.cell(word, state)
                scores.append(torch.einsum("bsk,bk->bs", keys, state[0]))
                word = x[torch.arange(len(x)), scores[-1].argmax(-1)]
            return torch.stack(scores, 1)

    return Pointer(), sequences()


@architecture("Tree network (recursive calls)", "recurrent")
def tree():
    class Tree(nn.Module):
        def __init__(self):
            super().__init__()
            self.merge, self.head = nn.Linear(16, 8), nn.Linear(8, 2)

        def forward(self, x):
            return self.head(self.fold(x))

        def fold(self, x):
            if x.shape[1] == 1:
                return x[:, 0]
            half = x.shape[1] // 2
            return self.merge(torch.cat([self.fold(x[:, :half]), self.fold(x[:, half:])], -1)).tanh()

    return Tree(), sequences()


@architecture("State-space scan with selection (Mamba)", "state space")
def mamba():
    class Selective(nn.Module):
        def __init__(self):
            super().__init__()
            self.enter, self.leave = nn.Linear(8, 32), nn.Linear(16, 8)
            self.conv = nn.Conv1d(16, 16, 3, padding=2, groups=16)
            self.parameters_of = nn.Linear(16, 1 + 2 * 4)
            self.decay = nn.Parameter(torch.arange(1, 5).float().log().repeat(16, 1))
            self.skip = nn.Parameter(torch.ones(16))

        def forward(self, x):
            y, gate = self.enter(x).chunk(2, -1)
            y = F.silu(self.conv(y.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
            step, into, out = self.parameters_of(y).split([1, 4, 4], -1)
            step = F.softplus(step)
            state, outputs = y.new_zeros(len(x), 16, 4), []
            for t in range(x.shape[1]):
                keep = torch.exp(-step[:, t, :, None] * self.decay.exp())
                state = keep * state + step[:, t, :, None] * into[:, t, None] * y[:, t, :, None]
                outputs.append((state * out[:, t, None]).sum(-1))
            return x + self.leave((torch.stack(outputs, 1) + self.skip * y) * F.silu(gate))

    return Language(Selective(), Selective()), tokens()


@architecture("Diagonal state space by convolution (S4D)", "state space")
def s4d():
    class Diagonal(nn.Module):
        def __init__(self):
            super().__init__()
            self.decay, self.turn = nn.Parameter(torch.rand(8, 4)), nn.Parameter(torch.rand(8, 4))
            self.out = nn.Parameter(torch.randn(8, 4, 2))

        def forward(self, x):
            poles = torch.complex(-self.decay.exp(), self.turn)
            kernel = torch.einsum(
                "cn,cnl->cl",
                torch.view_as_complex(self.out),
                torch.exp(poles[..., None] * torch.arange(x.shape[1])),
            )
            size = 2 * x.shape[1]
            spectrum = torch.fft.rfft(x.transpose(1, 2), size) * torch.fft.rfft(kernel.real, size)
            return x + torch.fft.irfft(spectrum, size)[..., : x.shape[1]].transpose(1, 2)

    return Language(Diagonal(), Diagonal()), tokens()


@architecture("Linear recurrence with gates (RWKV)", "state space")
def rwkv():
    class Mix(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.Parameter(torch.full((3, 8), 0.5))
            self.receive, self.key, self.value = (nn.Linear(8, 8, bias=False) for _ in range(3))
            self.decay, self.bonus = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(8))

        def forward(self, x):
            before = F.pad(x, (0, 0, 1, -1))
            mixed = [x * m + before * (1 - m) for m in self.mix]
            gate, key, value = self.receive(mixed[0]).sigmoid(), self.key(mixed[1]), self.value(mixed[2])
            top = bottom = torch.zeros_like(x[:, 0])
            outputs = []
            for t in range(x.shape[1]):
                now = (key[:, t] + self.bonus).exp()
                outputs.append((top + now * value[:, t]) / (bottom + now))
                keep = torch.exp(-self.decay.exp())
                top, bottom = keep * top + key[:, t].exp() * value[:, t], keep * bottom + key[:, t].exp()
            return x + gate * torch.stack(outputs, 1)

    return Language(Mix(), Mix()), tokens()


@architecture("Memory that is written by the forward (delta rule)", "state space")
def delta():
    class Delta(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.rate = nn.Linear(8, 24), nn.Linear(8, 1)

        def forward(self, x):
            query, key, value = self.qkv(x).chunk(3, -1)
            key, rate = F.normalize(key, dim=-1), self.rate(x).sigmoid()
            memory, outputs = x.new_zeros(len(x), 8, 8), []
            for t in range(x.shape[1]):
                error = value[:, t] - torch.einsum("bij,bj->bi", memory, key[:, t])
                memory = memory + rate[:, t, :, None] * error[:, :, None] * key[:, t, None]
                outputs.append(torch.einsum("bij,bj->bi", memory, query[:, t]))
            return x + torch.stack(outputs, 1)

    return Language(Delta()), tokens()


@architecture("WaveNet (dilated causal convolutions)", "audio")
def wavenet():
    class Wave(nn.Module):
        def __init__(self):
            super().__init__()
            self.gates = nn.ModuleList(nn.Conv1d(8, 16, 2, dilation=2**i) for i in range(3))
            self.outs = nn.ModuleList(nn.Conv1d(8, 8, 1) for _ in range(3))

        def forward(self, x):
            x, total = x.transpose(1, 2), 0
            for index, (gate, out) in enumerate(zip(self.gates, self.outs, strict=True)):
                left, right = gate(F.pad(x, (2**index, 0))).chunk(2, 1)
                y = out(left.tanh() * right.sigmoid())
                x, total = x + y, total + y
            return total

    return Wave(), sequences()


@architecture("Speech encoder with CTC", "audio")
def ctc():
    class Speech(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.core = nn.Conv1d(8, 8, 3, padding=1), nn.GRU(8, 8, batch_first=True)
            self.head = nn.Linear(8, 5)

        def forward(self, x):
            x = self.core(self.conv(x.transpose(1, 2)).transpose(1, 2))[0]
            scores = self.head(x).log_softmax(-1).transpose(0, 1)
            lengths = torch.full((scores.shape[1],), scores.shape[0])
            targets = torch.arange(1, 3).expand(scores.shape[1], -1)
            return F.ctc_loss(scores, targets, lengths, torch.full((scores.shape[1],), 2))

    return Speech(), sequences()
