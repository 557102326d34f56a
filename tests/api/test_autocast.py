"""Loops under autocast to bf16 compute the bits of plain PyTorch, whatever reads weights and gradients."""

import gc
import itertools
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import headwater as hw

WIDTH, WORDS = 16, 50
PLANS = {
    "memory": {"tier": "memory"},
    "disk": {"tier": "disk", "num_slabs": 2},
    "recomputed": {"tier": "disk", "num_slabs": 2, "activations": "recompute"},
}


class Net(nn.Module):
    """Embedding, three residual blocks, and a head. Embedding and norms read their weights in fp32."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)

    def block(self):
        return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        hidden = self.words(x)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden)


class Tied(Net):
    """The weight of the head, which autocast casts, is that of the embedding, which reads it in fp32."""

    def __init__(self):
        super().__init__()
        self.head.weight = self.words.weight


class LeavesAutocast(Net):
    """Each block has a router that computes in fp32."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.router = nn.Linear(WIDTH, 2)
            self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

        def forward(self, x):
            with torch.autocast("cpu", enabled=False):
                shares = self.router(x.float()).softmax(-1)
            return sum(shares[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))

    def block(self):
        return self.Block()


class Scaled(Net):
    """Each block has weights that are read by products of elements, by `cat`, and by products of matrices."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
            self.halves = nn.ParameterList(torch.randn(WIDTH // 2, WIDTH) / WIDTH for _ in range(2))
            self.low, self.high = (nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH) for _ in range(2))

        def forward(self, x):
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.scale
            return F.linear(x, torch.cat(list(self.halves))) + x @ self.low @ self.high[:, :WIDTH]

    def block(self):
        return self.Block()


class Shared(Net):
    """Each block runs twice, so that autograd adds two gradients of a copy in bf16."""

    def forward(self, x):
        hidden = self.words(x)
        for block in [*self.blocks, *self.blocks]:
            hidden = hidden + block(hidden)
        return self.head(hidden)


class Repeated(Net):
    """Each forward runs the blocks another number of times; in the dry run and the first forward, once."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        hidden = self.words(x)
        for block in [*self.blocks] * (1 + self.calls % 2):
            hidden = hidden + block(hidden)
        self.calls += 1
        return self.head(hidden)


class Checkpointed(Net):
    def forward(self, x):
        hidden = self.words(x)
        for block in self.blocks:
            hidden = hidden + checkpoint(block, hidden, use_reentrant=False)
        return self.head(hidden)


class NeedsValues(Net):
    """The forward computes with numpy, which fake tensors cannot."""

    def forward(self, x):
        scale = float(self.words(x).detach().numpy().max())
        return super().forward(x) * scale


class Attention(Net):
    def block(self):
        return nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)


def batch(step):
    return torch.randint(0, WORDS, (4, 8), generator=torch.Generator().manual_seed(step))


def loss_of(model, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.cross_entropy(model(x).flatten(0, 1).float(), x.flatten())


def built(kind, plan, tmp_path):
    """Return a model that is streamed with a plan; without a name of a plan, a plain one."""
    torch.manual_seed(0)
    model = kind()
    if plan is None:
        return model
    disk = {"disk": tmp_path} if PLANS[plan]["tier"] == "disk" else {}
    return hw.compile(model, hw.backend("CSX", **PLANS[plan], **disk))


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2)


def trained(model, step, optimizer=adamw):
    """Train with `step(model, optimizer, number)`; return the numbers that it returns, and the weights."""
    optimizer = optimizer(model.parameters())
    seen = []
    for number in range(4):
        seen.append(step(model, optimizer, number))
        optimizer.step()
        optimizer.zero_grad()
    return seen, {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_equal(step, kind, plan, tmp_path, **options):
    expected = trained(built(kind, None, tmp_path), step, **options)
    model = built(kind, plan, tmp_path)
    found = trained(model, step, **options)
    assert found[0] == expected[0]
    assert [name for name, value in expected[1].items() if not torch.equal(value, found[1][name])] == []
    hw.release(model)


def plain_step(model, optimizer, number):
    loss = loss_of(model, batch(number))
    loss.backward()
    return loss.item()


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    "kind",
    [Net, Tied, LeavesAutocast, Scaled, Shared, Repeated, Checkpointed, NeedsValues, Attention],
    ids=lambda kind: kind.__name__,
)
def test_each_weight_is_read_as_in_plain_pytorch(kind, plan, tmp_path):
    assert_equal(plain_step, kind, plan, tmp_path)


class OtherDtypes(Net):
    """Each block has layers whose dtypes autocast does not cast, and a layer in bf16."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(
                nn.Linear(WIDTH, WIDTH, dtype=dtype)
                for dtype in (torch.float64, torch.complex64, torch.bfloat16)
            )

        def forward(self, x):
            return sum(layer(x.to(layer.bias.dtype)).real.float().tanh() for layer in self.layers)

    def block(self):
        return self.Block()


class AsksForDtypes(Net):
    """Each block computes what the dtype of its weight decides. The last one also reads it in NumPy."""

    class Block(nn.Module):
        def __init__(self, how):
            super().__init__()
            self.layer, self.how = nn.Linear(WIDTH, WIDTH), how

        def forward(self, x):
            x = self.how(x * 1.001, self.layer.weight) * 3
            return self.layer(x)

    def __init__(self):
        super().__init__()
        ways = [
            lambda x, w: x.type(torch.result_type(w, x)).type_as(other=w),
            lambda x, w: x.to(w) if x.itemsize < w.itemsize else x,
            lambda x, w: x.type_as(w.t()) * float(np.abs(w.detach().numpy()).mean()),
        ]
        for block, how in zip(self.blocks, ways, strict=True):
            block.how = how

    def block(self):
        return self.Block(None)


class TorchLayers(Net):
    """Layers of torch, whose code depends on the dtype of their bias, and is another one in evaluation."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)
            self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
            self.decoder = nn.TransformerDecoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)

        def forward(self, x):
            x = self.first(x)
            return self.decoder(x + self.attention(x, x, x, need_weights=False)[0], x.flip(1))

    def block(self):
        return self.Block()


class Recurrent(Net):
    """On processors with products in bf16, the LSTM computes gradients of weights in fp32."""

    def __init__(self):
        super().__init__()
        del self.blocks
        self.recurrent = nn.LSTM(WIDTH, WIDTH, 2, bidirectional=True, batch_first=True)
        self.gated = nn.GRU(2 * WIDTH, WIDTH, batch_first=True)

    def forward(self, x):
        return self.head(self.gated(self.recurrent(self.words(x))[0])[0])


class InDrawnOrder(Net):
    """Two layers have the same weight, and each forward calls all layers in another order."""

    def __init__(self):
        super().__init__()
        del self.blocks
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.layers[2].weight = self.layers[0].weight

    def forward(self, x):
        hidden = self.words(x)
        for index in torch.randperm(3).tolist():
            hidden = torch.tanh(self.layers[index](hidden))
        return self.head(hidden)


def clipped_norm(model, optimizer, number):
    plain_step(model, optimizer, number)
    return nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()


def changed_gradients(model, optimizer, number):
    plain_step(model, optimizer, number)
    for param in model.parameters():
        param.grad.mul_(0.3).add_(param.detach(), alpha=1e-2)
    return [str(param.grad.dtype) for param in model.parameters()]


def accumulated(model, optimizer, number):
    losses = [plain_step(model, optimizer, 3 * number + part) for part in range(3)]
    return losses, nn.utils.clip_grad_value_(model.parameters(), 1e-3)


def gradients_of_inputs(model, optimizer, number):
    params = list(model.parameters())
    gradients = torch.autograd.grad(loss_of(model, batch(number)), params)
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient
    return [str(gradient.dtype) for gradient in gradients]


def penalized(model, optimizer, number):
    loss = loss_of(model, batch(number))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss + 1e-2 * (model.head.weight.square().sum() + model.blocks[1][1].weight.abs().sum())
    loss.backward()
    return loss.item()


def hooked(model, optimizer, number):
    if number == 0:
        for param in model.parameters():
            param.register_hook(lambda gradient: gradient / gradient.norm())
    return plain_step(model, optimizer, number)


def transformed(model, optimizer, number):
    """Differentiate the model as a function of a weight, with values that are read between two forwards."""
    loss = plain_step(model, optimizer, number)
    weights = {name: param.detach() for name, param in model.named_parameters()}

    def loss_for(weight):
        return loss_of(
            lambda x: torch.func.functional_call(model, {**weights, "blocks.0.1.weight": weight}, x), x
        )

    x = batch(number)
    return loss, torch.func.grad(loss_for)(weights["blocks.0.1.weight"]).sum().item()


def evaluated(model, optimizer, number):
    with torch.no_grad():
        before = loss_of(model.eval(), batch(10 + number)).item()
    model.train()
    return before, plain_step(model, optimizer, number)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    "step",
    [
        clipped_norm,
        changed_gradients,
        accumulated,
        gradients_of_inputs,
        penalized,
        hooked,
        evaluated,
    ],
    ids=lambda step: step.__name__,
)
def test_gradients_have_the_dtype_and_the_bits_of_plain_pytorch(step, plan, tmp_path):
    assert_equal(step, Tied, plan, tmp_path)


def losses_of(model, numbers):
    """Return the sum of the losses of several calls within one autocast block."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return sum(F.cross_entropy(model(x).flatten(0, 1).float(), x.flatten()) for x in map(batch, numbers))


def one_block(model, optimizer, number):
    loss = losses_of(model, (number, 10 + number, 20 + number))
    loss.backward()
    return loss.item(), nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()


def a_block_for_each_call(model, optimizer, number):
    loss = loss_of(model, batch(number)) + loss_of(model, batch(10 + number))
    loss.backward()
    return loss.item()


def blocks_in_turn(model, optimizer, number):
    """Two calls in one block, then one call in another block. Each block has its backward."""
    for numbers in ((number, 10 + number), (20 + number,)):
        losses_of(model, numbers).backward()
    return nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()


def accumulated_in_blocks(model, optimizer, number):
    """Two blocks, each with two calls and a backward, before one step."""
    for first in (number, 20 + number):
        losses_of(model, (first, 10 + first)).backward()
    return nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()


def skipped_steps(model, optimizer, number):
    """The gradients of two blocks are dropped, one before and one after their backward, as if not finite."""
    losses_of(model, (number, 10 + number)).backward()
    optimizer.zero_grad()
    dropped = losses_of(model, (number, 10 + number))
    del dropped
    losses_of(model, (20 + number, 30 + number)).backward()
    return nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()


def several_backwards_in_a_block(model, optimizer, number):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for x in (batch(number), batch(10 + number)):
            F.cross_entropy(model(x).flatten(0, 1).float(), x.flatten()).backward()
    return nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()


def gradients_of_one_block(model, optimizer, number):
    params = list(model.parameters())
    gradients = torch.autograd.grad(losses_of(model, (number, 10 + number)), params)
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient
    return [str(gradient.dtype) for gradient in gradients]


def blocks_in_a_block(model, optimizer, number):
    """Inner blocks do not end the outer one. In a block without a cache, each operator casts its weight."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for is_cached in (True, False):
            losses = []
            for part in range(2):
                x = batch(10 * part + number)
                with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=is_cached):
                    losses.append(F.cross_entropy(model(x).flatten(0, 1).float(), x.flatten()))
            sum(losses).backward()
    return nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()


def hooked_later(model, optimizer, number):
    """The hooks of some weights are registered between the forward and its backward."""
    loss = loss_of(model, batch(number))
    hooks = [
        block[1].weight.register_hook(lambda gradient: gradient / (3 * gradient.norm()))
        for block in model.blocks[:number]
    ]
    loss.backward()
    for hook in hooks:
        hook.remove()
    return loss.item()


def gradient_penalty(model, optimizer, number):
    """A gradient in one block is differentiated again, in the backward of a call in another block."""
    params = [block[3].weight for block in model.blocks]
    gradients = torch.autograd.grad(loss_of(model, batch(number)), params, create_graph=True)
    loss = sum(gradient.square().sum() for gradient in gradients)
    loss = loss + loss_of(model, batch(10 + number))
    loss.backward()
    return loss.item()


def checkpointed_call(model, optimizer, number):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = checkpoint(model, batch(number), use_reentrant=False)
        loss = F.cross_entropy(output.flatten(0, 1).float(), batch(number).flatten())
    loss.backward()
    return loss.item()


def another_graph_waits(model, optimizer, number):
    """The backward of the first call ends while the second call waits. The third call is in another block."""
    first, second = loss_of(model, batch(number)), loss_of(model, batch(10 + number))
    first.backward()
    (second + loss_of(model, batch(20 + number))).backward()
    return nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()


def retained_graph(model, optimizer, number):
    loss = loss_of(model, batch(number))
    loss.backward(retain_graph=True)
    (loss + loss_of(model, batch(10 + number))).backward()
    return nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()


def larger_batch(model, optimizer, number):
    """The second call may need a new plan while the first one waits."""
    loss = loss_of(model, batch(number)[: 1 + number]) + loss_of(model, batch(10 + number))
    loss.backward()
    return loss.item()


def second_call_detached(model, optimizer, number):
    """A call in one block, then two calls in another block. The last one is not trained."""
    loss = loss_of(model, batch(number))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, target = model(batch(10 + number)), model(batch(20 + number)).detach()
        loss = loss + F.mse_loss(output.float(), target.float())
    loss.backward()
    return loss.item()


def uncached(model, optimizer, number):
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        loss = F.cross_entropy(model(batch(number)).flatten(0, 1).float(), batch(number).flatten())
    loss.backward()
    return loss.item()


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", [Net, Tied, Shared, Repeated, Checkpointed], ids=lambda kind: kind.__name__)
def test_calls_in_one_autocast_block_add_gradients_in_16_bits_as_in_plain_pytorch(kind, plan, tmp_path):
    assert_equal(one_block, kind, plan, tmp_path)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    "step",
    [
        a_block_for_each_call,
        blocks_in_turn,
        accumulated_in_blocks,
        skipped_steps,
        several_backwards_in_a_block,
        gradients_of_one_block,
        gradient_penalty,
        hooked_later,
        checkpointed_call,
        another_graph_waits,
        retained_graph,
        larger_batch,
        second_call_detached,
        uncached,
        blocks_in_a_block,
    ],
    ids=lambda step: step.__name__,
)
def test_gradients_of_several_calls_have_the_bits_of_plain_pytorch(step, plan, tmp_path):
    assert_equal(step, Tied, plan, tmp_path)


@pytest.mark.parametrize("plan", PLANS)
def test_a_loss_scale_in_fp16_falls_and_rises_as_in_plain_pytorch(plan, tmp_path):
    """Sums of several calls in a block overflow in fp16, which skips steps."""

    def run(model):
        optimizer = adamw(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2)
        found = []
        for step in range(8):
            with torch.autocast("cpu", dtype=torch.float16):
                losses = [model(batch(10 * step + call)).float().square().mean() for call in range(3)]
            scaler.scale(sum(losses)).backward()
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            found.append((sum(losses).item(), str(norm.item()), scaler.get_scale()))
        return found

    expected = run(built(Net, None, tmp_path))
    scales = [scale for _, _, scale in expected]
    assert min(scales) < 2.0**20 and any(before < after for before, after in itertools.pairwise(scales))
    model = built(Net, plan, tmp_path)
    assert run(model) == expected
    hw.release(model)


@pytest.mark.parametrize("plan", PLANS)
def test_graphs_without_backward_are_freed(plan, tmp_path):
    """A node such as that of tanh saves its own output."""

    def net():
        return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))

    model = built(net, plan, tmp_path)
    outputs = []
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            outputs.append(weakref.ref(model(torch.ones(2, 4))))
    gc.collect()
    assert [output() for output in outputs] == [None] * 3
    hw.release(model)


def test_user_code_does_not_see_how_blocks_are_told_apart(tmp_path):
    seen = []

    def pack(tensor):
        seen.append(tensor.numel())
        return tensor

    model = built(Net, "memory", tmp_path)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss_of(model, batch(0)).backward()
    assert seen and 0 not in seen
    hw.release(model)


def test_calls_in_one_block_do_add_in_16_bits():
    """Otherwise the tests above would prove nothing."""
    model, x = built(Net, None, None), [batch(0), batch(1)]
    losses_of(model, (0, 1)).backward()
    together = model.head.weight.grad.clone()
    model.zero_grad()
    sum(loss_of(model, each) for each in x).backward()
    assert not torch.equal(model.head.weight.grad, together)


def test_transforms_between_forwards_read_the_weights(tmp_path):
    assert_equal(transformed, Tied, "memory", tmp_path)  # with few slabs a transform is refused


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ["Adafactor", "SGD", "RMSprop"])
def test_optimizers_compute_outside_of_autocast(name, plan, tmp_path):
    # Adafactor has a matrix product, which autocast would round.
    def optimizer(params):
        return getattr(torch.optim, name)(params, lr=1e-2)

    assert_equal(plain_step, Net, plan, tmp_path, optimizer=optimizer)


def ties(model):
    """Make each weight halfway between two numbers in bf16, where rounding has a choice."""
    with torch.no_grad():
        for param in model.parameters():
            bits = param.view(torch.int32)
            bits.copy_(bits >> 16 << 16 | 1 << 15)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "Adafactor"])
def test_weights_halfway_between_two_numbers_are_rounded_as_in_plain_pytorch(optimizer, plan, tmp_path):
    """Most gradients of SGD are too small to change a weight, so its weights stay halfway."""

    def step(model, optimizer, number):
        if number == 0:
            ties(model)
        return plain_step(model, optimizer, number)

    def made(params):
        return getattr(torch.optim, optimizer)(params, lr=1e-7)

    assert_equal(step, Net, plan, tmp_path, optimizer=made)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    "kind",
    [OtherDtypes, AsksForDtypes, TorchLayers, Recurrent, InDrawnOrder],
    ids=lambda kind: kind.__name__,
)
def test_layers_that_autocast_does_not_cast_or_that_ask_for_a_dtype(kind, plan, tmp_path):
    def step(model, optimizer, number):
        losses = evaluated(model, optimizer, number), plain_step(model, optimizer, 20 + number)
        return losses, {name: str(param.grad.dtype) for name, param in model.named_parameters()}

    assert_equal(step, kind, plan, tmp_path)


@pytest.mark.parametrize("plan", PLANS)
def test_values_in_the_dtype_that_a_weight_shows_keep_the_weight_in_fp32(plan, tmp_path):
    def step(model, optimizer, number):
        if number == 2:
            weight = model.blocks[1][1].weight
            weight.data = torch.linspace(-1, 1, weight.numel()).view(weight.shape).to(weight.dtype)
            model.to(next(model.head.parameters()).dtype)
        return plain_step(model, optimizer, number)

    assert_equal(step, Net, plan, tmp_path)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_layer_that_is_converted_between_steps_has_its_new_dtype(dtype, plan, tmp_path):
    def step(model, optimizer, number):
        if number == 2:
            model.blocks[1].to(dtype)
        return plain_step(model, optimizer, number)

    def made(params):
        return torch.optim.SGD(params, lr=1e-2)

    class Converted(Net):
        def forward(self, x):
            hidden = self.words(x)
            for block in self.blocks:
                hidden = hidden + block(hidden.to(block[1].bias.dtype)).float()
            return self.head(hidden)

    assert_equal(step, Converted, plan, tmp_path, optimizer=made)


def test_gradients_of_a_released_model_have_the_dtype_of_its_parameters(tmp_path):
    model = built(Net, "memory", tmp_path)
    trained(model, plain_step)
    hw.release(model)
    loss_of(model, batch(0)).backward()
    assert {param.grad.dtype for param in model.parameters()} == {torch.float32}
    model.zero_grad()
    model.bfloat16()(batch(0)).float().sum().backward()
    assert {param.grad.dtype for param in model.parameters()} == {torch.bfloat16}


def test_weights_that_are_only_cast_are_sent_in_bf16(tmp_path):
    model = built(Tied, "memory", tmp_path)
    plain_step(model, None, 0)
    assert model.words.weight.dtype == torch.float32
    assert model.blocks[0][0].weight.dtype == torch.float32
    weight = model.blocks[0][1].weight
    assert weight.home.spec.wire_dtype == torch.bfloat16
    found = weight.dtype, weight.data.dtype, weight.t().dtype, weight.grad.dtype
    assert found == (torch.float32,) * 4 and weight.nbytes == 4 * WIDTH**2  # as in plain PyTorch
