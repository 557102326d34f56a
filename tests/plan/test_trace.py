"""The dry run: its findings, its cost, and that it changes nothing."""

from pathlib import Path

import pytest
import torch
from tests.fake_cuda import OnFakeCuda, fake_cuda
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from headwater.config.models.decoder import DecoderConfig
from headwater.core.precision import Precision
from headwater.models.loss import linear_cross_entropy
from headwater.models.registry import build_model
from headwater.plan.division import divide
from headwater.plan.partition import find_stages
from headwater.plan.trace import trace_step

BF16 = Precision("bf16")


def language_loss(model, tokens):
    return model(input_ids=tokens, labels=tokens).loss


def mean(model, x):
    return model(x).mean()


def trace_gpt(layers=4, hidden=256, vocabulary=1000, batch=2, length=128, precision=BF16):
    config = GPT2Config(
        n_layer=layers, n_embd=hidden, n_head=4, vocab_size=vocabulary, n_positions=length, use_cache=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    with torch.device("meta"):
        model = GPT2LMHeadModel(config)
    tokens = torch.zeros(batch, length, dtype=torch.long)
    return trace_step(model, tokens, precision, loss_function=language_loss)


@pytest.mark.parametrize(("layers", "hidden", "batch"), [(4, 256, 2), (3, 512, 1), (6, 128, 4)])
def test_flops_of_a_gpt_equal_the_formula(layers, hidden, batch):
    length, vocabulary = 128, 1000
    trace = trace_gpt(layers, hidden, vocabulary, batch, length)
    tokens = batch * length
    products = 2 * tokens * (12 * layers * hidden**2 + vocabulary * hidden)
    attention = 4 * layers * batch * length**2 * hidden
    forward = sum(cost.forward.flops for cost in trace.costs)
    backward = sum(cost.backward.flops for cost in trace.costs)
    assert forward == pytest.approx(products + attention, rel=0.01)
    assert backward == pytest.approx(2 * forward, rel=0.01)


class Classifier(nn.Module):
    """A model whose loss writes the gradient of the weight in place, some rows at a time."""

    def __init__(self, width, classes):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(classes, width, device="meta"))

    def forward(self, hidden):
        rows = torch.ones(len(hidden))
        return linear_cross_entropy(hidden, self.weight, None, torch.zeros(len(hidden)), rows, chunk_rows=32)


def test_flops_of_a_product_with_addition_are_counted():
    model, hidden = Classifier(64, 1000), torch.zeros(128, 64)
    trace = trace_step(model, hidden, Precision(), loss_function=lambda model, x: model(x))
    logits = gradient_of_weight = 2 * 128 * 64 * 1000
    assert (
        sum(cost.forward.flops + cost.backward.flops for cost in trace.costs) == logits + gradient_of_weight
    )


def test_flops_and_bytes_are_assigned_to_their_stage():
    trace = trace_gpt()
    blocks = [cost for stage, cost in zip(trace.stages, trace.costs, strict=True) if ".h." in stage.name]
    assert len({(cost.forward.flops, cost.saved_bytes, cost.output_bytes) for cost in blocks}) == 1
    assert blocks[0].forward.flops > 0
    hidden_bytes = 2 * 128 * 256
    assert hidden_bytes * 2 <= blocks[0].output_bytes <= hidden_bytes * 4 + 2 * 256 * 4
    assert blocks[0].input_bytes > 0
    assert all(cost.recomputable for cost in trace.costs)


class SharedInside(nn.Module):
    """A model in which a shared layer, which is a stage, runs in the middle of each block."""

    def __init__(self, shared):
        super().__init__()
        self.before, self.shared, self.after = nn.Linear(64, 64), shared, nn.Linear(64, 256)

    def forward(self, x):
        return self.after(self.shared(self.before(x)).relu()).mean(-1, keepdim=True) + x


class SharesALayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(64, 64)
        self.blocks = nn.ModuleList(SharedInside(self.shared) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_costs_around_a_shared_layer_belong_to_the_block():
    trace = trace_step(SharesALayer(), torch.zeros(8, 64), loss_function=mean)
    costs = {stage.name: cost for stage, cost in zip(trace.stages, trace.costs, strict=True)}
    product = 2 * 8 * 64 * 64
    assert costs["shared"].forward.flops == 3 * product
    assert costs["shared"].backward.flops == 2 * 3 * product
    for number in range(3):
        block = costs[f"blocks.{number}"]
        assert block.forward.flops == 5 * product
        # The first one's input needs no gradient.
        assert block.backward.flops == (10 if number else 9) * product
        assert block.saved_bytes == 8 * 64 * 4
    assert costs["shared"].input_bytes == 3 * 8 * 64 * 4


def saved_bytes(model, x):
    """Return the bytes that autograd keeps of a forward, without weights and input, each storage once."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()} | {x.untyped_storage().data_ptr()}
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x).mean()
    return sum(t.untyped_storage().nbytes() for address, t in kept.items() if address not in own)


def test_saved_bytes_are_those_that_autograd_keeps():
    model = nn.Sequential(
        *(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
            for _ in range(3)
        )
    )
    x = torch.randn(8, 64)
    trace = trace_step(model, x, loss_function=mean)
    inside = (
        saved_bytes(model, x) - 2 * x.nbytes
    )  # inputs of the second and third block are counted as inputs
    assert sum(cost.saved_bytes for cost in trace.costs) == pytest.approx(inside, rel=0.02)
    assert [cost.output_bytes for cost in trace.costs] == [x.nbytes] * len(trace.costs)


def bytes_kept_by_block(model, batch, precision):
    """Return the bytes of storages that autograd keeps of a real block, without its weights and its input."""
    block, kept = model.blocks[1], {}
    forward, own = block.forward, {param.untyped_storage().data_ptr() for param in model.parameters()}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def watched(x, *args, **kwargs):
        own.add(x.untyped_storage().data_ptr())
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return forward(x, *args, **kwargs)

    block.forward = watched
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision.mixed):
            model(batch).backward()
    finally:
        del block.forward
    return sum(t.untyped_storage().nbytes() for address, t in kept.items() if address not in own)


@pytest.mark.parametrize("samples", [1, 2, 5])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("precision", [Precision(), BF16])
def test_saved_bytes_of_a_block_are_its_storages_also_if_views_share_one(samples, dropout, precision):
    config = DecoderConfig(
        hidden_size=64, num_hidden_layers=3, num_heads=4, vocab_size=101, max_position_embeddings=48,
        dropout_rate=dropout, attention_dropout_rate=dropout, embedding_dropout_rate=dropout,
    )  # fmt: skip
    model, tokens = build_model(config, seed=0).train(), torch.randint(0, 101, (samples, 48))
    batch = {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}
    trace = trace_step(model, batch, precision)
    (cost,) = (
        cost for stage, cost in zip(trace.stages, trace.costs, strict=True) if stage.name == "blocks.1"
    )
    params = dict(model.named_parameters())
    for param in (param for stage in trace.stages for param in stage.params):
        params[param.name].data = params[param.name].data.to(param.wire_dtype)  # as the engine binds it
    # Fake tensors give the statistics of a LayerNorm 16 bits, real ones of the CPU 32.
    assert cost.saved_bytes == pytest.approx(bytes_kept_by_block(model, batch, precision), rel=0.01)


def test_new_bytes_are_those_of_the_large_tensors_that_torch_allocates():
    layers = [nn.LayerNorm(512), nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512), nn.ReLU(inplace=True)]
    model, x = nn.Sequential(*layers), torch.randn(1024, 512)
    cost = [cost for cost in trace_step(model, x, loss_function=mean).costs if cost.forward.flops]

    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as run:
        mean(model, x).backward()
    events = run.profiler.kineto_results.events()
    allocated = sum(
        event.nbytes() for event in events if event.name() == "[memory]" and event.nbytes() >= 1 << 20
    )
    counted = sum(each.forward.new_bytes + each.backward.new_bytes for each in cost)
    assert counted == pytest.approx(allocated, rel=0.05)


def test_stages_are_used_in_the_order_of_the_forward():
    trace = trace_gpt(layers=3)
    name = {stage.index: stage.name for stage in trace.stages}
    assert [name[stage] for stage in trace.uses] == [
        "transformer.wte",
        "transformer.wpe",
        "transformer.h.0",
        "transformer.h.1",
        "transformer.h.2",
        "transformer.ln_f",
        "transformer.wte",
    ]
    assert trace.schedule == trace.uses + trace.uses[::-1]
    assert trace.micro_batch_size == 2


def test_sites_are_the_modules_that_read_weights():
    trace = trace_gpt(layers=2)
    index = {stage.name: stage.index for stage in trace.stages}
    assert trace.sites["lm_head"] == (index["transformer.wte"],)
    assert trace.sites["transformer.wte"] == (index["transformer.wte"],)
    assert trace.sites["transformer.h.1"] == (index["transformer.h.1"],)


def test_a_weight_read_elsewhere_is_bound_there_too():
    class Reader(nn.Module):
        def forward(self, x, weight):
            return x @ weight

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
            self.reader = Reader()

        def forward(self, x):
            return self.reader(self.layers[1](self.layers[0](x)), self.layers[0].weight)

    trace = trace_step(Model(), torch.zeros(2, 4), loss_function=mean)
    assert trace.sites["reader"] == (0,)
    assert trace.uses == (0, 1, 0)


def test_an_unused_stage_is_bound_at_its_module():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    trace = trace_step(model, torch.zeros(2, 4), loss_function=lambda model, x: model[0](x).mean())
    assert trace.uses == (0,)
    assert trace.sites == {"0": (0,), "1": (1,)}


def test_a_given_partition_decides_the_stages():
    config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=50, n_positions=8, use_cache=False)
    model = GPT2LMHeadModel(config)
    partition = divide(model, find_stages(model, BF16), most_bytes=16 << 10)
    tokens = torch.zeros(1, 8, dtype=torch.long)
    trace = trace_step(model, tokens, BF16, loss_function=language_loss, partition=partition)
    assert trace.stages == partition.stages
    assert {"transformer.h.0.mlp.c_fc", "transformer.h.0.attn"} <= trace.sites.keys()


def test_the_dry_run_changes_no_model():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
            self.norm = nn.BatchNorm1d(4)
            self.calls, self.table = 0, None
            self.cache, self.seen = {}, ["nothing"]

        def forward(self, x):
            self.calls += 1
            self.cache[x.shape] = x
            self.seen.append(x)
            self.norm.register_forward_hook(lambda module, args, output: output)
            self.table = torch.arange(4.0)
            x = nn.functional.dropout(self.layers[0](x), 0.5)
            return self.norm(self.layers[1](x)) + self.table

    model, x = Counts(), torch.randn(3, 4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    identities = {name: id(value) for name, value in model.named_parameters()}
    random_state = torch.get_rng_state()
    trace_step(model, x, loss_function=mean)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert {name: id(value) for name, value in model.named_parameters()} == identities
    assert all(param.grad is None for param in model.parameters())
    assert (model.calls, model.table, model.cache, model.seen) == (0, None, {}, ["nothing"])
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert model.training


def test_results_that_depend_on_data():
    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            rows = (x[:, 0] > 0).nonzero().squeeze(-1)
            x = x.index_add(0, rows, self.layers[0](x[rows]))
            x = x + self.layers[1](x)[x > 0].sum()
            return x * x.sum().item() if bool((x > 0).any()) else self.layers[2](x)

    trace = trace_step(Routed(), torch.zeros(5, 4), loss_function=mean)
    assert trace.uses == (0, 1, 2)
    assert trace.costs[0].forward.flops == 2 * 5 * 4 * 4, "every row is taken to be selected"


class Images(nn.Module):
    """A model of images of any size in one row of patches; sizes decide shapes, tokens decide the layer."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.register_buffer("wanted", torch.tensor(7))

    def forward(self, patches, sizes, tokens):
        parts = patches.split(sizes.prod(-1).tolist())
        rows = torch.zeros(len(patches), dtype=torch.bool)
        rows[: int(sizes[0].prod())] = True
        x = (
            self.layers[0](torch.stack([part.sum(0) for part in parts])).sum()
            + self.layers[1](patches[rows]).sum()
        )
        found = torch.tensor([(tokens == self.wanted).sum(), tokens.max()])
        return x + self.layers[2](patches[:1]).sum() if found[0] == 2 else x


@pytest.mark.parametrize(("token", "uses"), [(7, (0, 1, 2)), (8, (0, 1))])
def test_integers_of_the_batch_have_their_values_in_the_dry_run(token, uses):
    batch = (torch.zeros(10, 4), torch.tensor([[1, 6], [2, 2]]), torch.tensor([token, token]))
    trace = trace_step(Images(), batch, loss_function=lambda model, batch: model(*batch))
    assert trace.uses == uses
    assert [cost.forward.flops for cost in trace.costs[:2]] == [2 * 2 * 4 * 4, 2 * 6 * 4 * 4]


def test_writing_unknown_numbers_makes_a_known_tensor_unknown():
    class Marks(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def forward(self, x):
            marks = torch.zeros(5, dtype=torch.bool)
            view = marks[1:]
            view.copy_(x[1:, 0] > 0)
            rows = marks.nonzero().squeeze(-1)
            noise = torch.randint(0, 2, (3,)).nonzero().squeeze(-1)
            return self.layers[0](x[rows]).sum() + self.layers[1](x[noise]).sum()

    trace = trace_step(Marks(), torch.ones(5, 4), loss_function=mean)
    assert [cost.forward.flops for cost in trace.costs] == [2 * 5 * 4 * 4, 2 * 3 * 4 * 4], (
        "all may be selected"
    )


def test_the_batch_is_not_written_to():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, tokens):
            tokens[0] = 7
            tokens += 1
            return self.layer(tokens.float())

    tokens = torch.arange(4)
    trace_step(Writes(), tokens, loss_function=mean)
    assert torch.equal(tokens, torch.arange(4))


class Routed(nn.Module):
    """A model that sorts and splits rows by the values of a weight, which a fake tensor does not have."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(4, 2)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        assert not self.gate.weight.isnan().sum() > 0
        chosen = self.gate(x).argmax(-1)
        parts = x[chosen.argsort()].split(chosen.bincount(minlength=2).tolist())
        return self.norm(torch.cat([layer(part) for layer, part in zip(self.experts, parts, strict=True)]))


def test_values_of_weights_may_decide_shapes():
    model, x = Routed(), torch.randn(7, 4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    trace = trace_step(model, x, loss_function=mean)
    assert [stage.name for stage in trace.stages][:2] == ["gate", "experts.0"]
    rows = model.gate(x).argmax(-1).bincount(minlength=2).tolist()
    assert [cost.forward.flops for cost in trace.costs[1:3]] == [2 * 4 * 4 * count for count in rows]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(param.grad is None for param in model.parameters())
    assert torch.equal(torch.get_rng_state(), random_state)


def test_values_of_a_batch_on_a_gpu_are_known_in_the_dry_run():
    torch.manual_seed(0)
    model, x = Routed(), torch.randn(7, 4)
    wanted = [cost.forward.flops for cost in trace_step(model, x, loss_function=mean).costs]
    with fake_cuda():
        found = trace_step(model, OnFakeCuda(x), loss_function=mean)
    assert [cost.forward.flops for cost in found.costs] == wanted


class Cut(nn.Module):
    """A model that computes with as many rows as the largest number of its batch says."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, lengths):
        rows = torch.minimum(lengths, torch.tensor(5)).max().item()
        return self.layer(torch.ones(rows, 4))


def test_integers_of_a_batch_on_a_gpu_decide_shapes():
    with fake_cuda():
        trace = trace_step(Cut(), OnFakeCuda(torch.tensor([2, 3])), loss_function=mean)
    assert [cost.forward.flops for cost in trace.costs] == [2 * 3 * 4 * 4]


class OnGpuByName(nn.Module):
    """A model whose forward names the GPU, and which has a tensor there that is not a buffer."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers
        self.scale = OnFakeCuda(torch.ones(4))

    def forward(self, x):
        zeros = torch.zeros(4, device="cuda") * torch.arange(4, device="cuda:0")
        return self.layers(x * self.scale + zeros)


@pytest.mark.parametrize("layers", [nn.Linear(4, 4), Routed()], ids=["fake tensors", "real tensors"])
def test_a_forward_that_names_the_gpu_is_traced_in_host_memory(layers):
    model, x = OnGpuByName(layers), torch.randn(7, 4)
    wanted = [cost.forward.flops for cost in trace_step(layers, x, loss_function=mean).costs]
    with fake_cuda():
        found = trace_step(model, OnFakeCuda(x), loss_function=mean)
    assert [cost.forward.flops for cost in found.costs] == wanted


def test_shapes_that_depend_on_weights_need_their_values():
    with pytest.raises(RuntimeError):
        trace_step(Routed().to("meta"), torch.randn(7, 4), loss_function=mean)


class Grouped(nn.Module):
    """A model that sends rows to the expert of their group; rows are too short for the bf16 kernel."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 4, 12))

    def forward(self, x):
        return torch._grouped_mm(x, self.up, offs=torch.tensor([1, 4, 6], dtype=torch.int32))


def test_grouped_products():
    trace = trace_step(nn.Sequential(Grouped(), nn.Linear(12, 1)), torch.randn(6, 4), loss_function=mean)
    plain = Grouped()(torch.randn(6, 4))
    assert plain.shape == (6, 12)
    assert trace.costs[0].output_bytes == plain.numel() * 4


def test_distributions_can_be_traced(monkeypatch):
    # `torch.compile`, which an earlier test may have called, turns these checks off in the whole process.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)

    def loss(model, x):
        return -torch.distributions.Categorical(logits=model(x)).log_prob(torch.tensor(1)).mean()

    assert trace_step(nn.Linear(4, 4), torch.zeros(2, 4), loss_function=loss).uses == (0,)
    with pytest.raises(ValueError, match="to satisfy"):
        torch.distributions.Categorical(logits=torch.tensor([float("nan")]))


def test_batches_with_shared_memory_can_be_traced():
    trace = trace_step(nn.Embedding(5, 4), torch.tensor([[1], [2]]).expand(2, 3), loss_function=mean)
    assert trace.uses == (0,)


def test_an_error_of_the_model_is_raised_unchanged():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        trace_step(nn.Linear(4, 4), torch.zeros(2, 5), loss_function=mean)


@pytest.mark.parametrize(
    "batch", [{"x": torch.zeros(6, 4)}, (torch.zeros(6, 4), "text"), [torch.zeros(6, 4, device="meta")]]
)
def test_batches_of_any_form_have_a_micro_batch_size(batch):
    def loss(model, batch):
        return model(batch["x"] if isinstance(batch, dict) else batch[0]).mean()

    assert trace_step(nn.Linear(4, 4), batch, loss_function=loss).micro_batch_size == 6


def status_kib(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))


def test_tracing_175_billion_parameters_needs_little_memory():
    trace_gpt()
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = status_kib("VmRSS")
    trace = trace_gpt(layers=96, hidden=12288, vocabulary=50257, batch=1, length=2048)
    assert 174e9 < sum(stage.numel for stage in trace.stages) < 176e9
    assert status_kib("VmHWM") - before < 200 * 1024


class InDrawnOrder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))

    def forward(self, x):
        for index in torch.randperm(5).tolist():
            x = self.layers[index](x)
        return x


def test_a_dry_run_has_the_order_that_the_next_forward_draws():
    model = InDrawnOrder()
    random_state = torch.get_rng_state()
    trace = trace_step(model, torch.ones(2, 4), loss_function=mean)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert list(trace.uses) == torch.randperm(5).tolist()  # each layer is a stage
