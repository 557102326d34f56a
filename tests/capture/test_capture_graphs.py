"""Captured graphs compute what the modules compute; operations that they cannot hold are reported."""

import inspect
import io
import logging

import pytest
import torch
from capture_models import (
    WIDTH,
    Branches,
    CustomFunction,
    GivesPair,
    Layer,
    Odd,
    Pair,
    Plain,
    ReadsNumber,
    Remembers,
    Selects,
    TakesPair,
)
from torch import nn

from headwater.core.precision import Precision
from headwater.plan.capture.graph import capture_stages
from headwater.plan.capture.record import record_step


def captured(model, batch=None, precision=None, **kwargs):
    batch = torch.zeros(4, WIDTH) if batch is None else batch
    record = record_step(model, batch, precision, **kwargs)
    return record, capture_stages(model, record)


class Stack(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def line_of(kind, text):
    """Return the number of the line of `kind` that contains `text`."""
    lines, start = inspect.getsourcelines(kind)
    return start + next(index for index, line in enumerate(lines) if text in line)


def loaded(graph):
    return torch.export.load(io.BytesIO(graph.serialised)).module()


def values(module):
    return {name: t.detach().clone() for name, t in [*module.named_parameters(), *module.named_buffers()]}


@pytest.mark.parametrize("kind", [Plain, ReadsNumber, Selects, CustomFunction, Remembers])
def test_graphs_compute_the_results_of_their_modules(kind):
    torch.manual_seed(0)
    model = Stack(kind())
    _, found = captured(model)
    (graph,) = found.graphs
    x = torch.randn(4, WIDTH)
    weights = values(model.layers[0])
    assert torch.equal(loaded(graph)(weights, [x])[0], model.layers[0](x))


def test_dataclasses_may_be_inputs_and_outputs_of_graphs():
    torch.manual_seed(0)
    _, found = captured(Odd())
    gives, takes = GivesPair(), TakesPair()
    by_kind = {graph.kind: graph for graph in found.graphs}
    x, y = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    assert all(map(torch.equal, loaded(by_kind["GivesPair"])(values(gives), [x]), (gives(x).first, x)))
    expected = takes(Pair(x, y), factor=3)
    assert torch.equal(loaded(by_kind["TakesPair"])(values(takes), [x, y])[0], expected)


def test_torch_transformer_layers_share_a_graph():
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True) for _ in range(3)]
    model = Stack(*layers)
    _, found = captured(model, torch.zeros(2, 5, WIDTH))
    (graph,) = found.graphs
    assert graph.modules == ("layers.0", "layers.1", "layers.2")
    x = torch.randn(2, 5, WIDTH)
    for layer in layers:
        torch.testing.assert_close(loaded(graph)(values(layer), [x])[0], layer(x))


def test_only_equal_modules_share_a_graph():
    class Scaled(Layer):
        def __init__(self, factor):
            super().__init__()
            self.factor = factor

        def forward(self, x):
            return self.linear(x) * self.factor

    _, found = captured(Stack(Scaled(2.0), Scaled(3.0), Scaled(2.0)))
    assert [graph.modules for graph in found.graphs] == [("layers.0", "layers.2"), ("layers.1",)]


def test_a_module_called_with_two_shapes_has_two_graphs():
    class TwoShapes(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Plain(), Plain()])

        def forward(self, x):
            return self.layers[1](self.layers[0](x)[:2]).mean() + self.layers[1](x).mean()

    _, found = captured(TwoShapes())
    assert {graph.name: graph.modules for graph in found.graphs} == {
        "layers.0": ("layers.0", "layers.1"),
        "layers.1": ("layers.1",),
    }


def test_a_shared_weight_is_in_the_graph_of_every_module_that_reads_it():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(16, WIDTH)
            self.head = nn.Linear(WIDTH, 16, bias=False)
            self.head.weight = self.embedding.weight
            self.layers = nn.ModuleList([Plain(), Plain()])

        def forward(self, tokens):
            x = self.embedding(tokens)
            for layer in self.layers:
                x = layer(x)
            return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())

    model = Tied()
    _, found = captured(model, torch.zeros(2, 3, dtype=torch.long))
    assert {graph.name: graph.stages for graph in found.graphs} == {
        "embedding": (0,), "layers.0": (1, 2), "head": (0,),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "operator", "text", "has_graph"),
    [
        (ReadsNumber, "aten._local_scalar_dense (.item())", ".item()", True),
        (Branches, "aten._local_scalar_dense (.item())", "if x.sum()", False),
        (Selects, "aten.nonzero", "nonzero()", True),
        (CustomFunction, "Double", "Double.apply", True),
        (Remembers, "forward", "def forward", True),
    ],
)
def test_operations_outside_of_a_graph_are_reported_with_module_and_line(kind, operator, text, has_graph):
    _, found = captured(Stack(Plain(), kind(), kind()))
    (finding,) = found.findings
    assert finding.operator == operator
    assert finding.captured is has_graph
    assert finding.modules == ("layers.1", "layers.2")
    assert (finding.place.file, finding.place.line) == (inspect.getfile(kind), line_of(kind, text))
    assert {graph.kind for graph in found.graphs} == {"Plain"} | ({kind.__name__} if has_graph else set())


def test_only_masks_have_a_data_dependent_shape():
    class Indexes(Layer):
        def forward(self, x):
            return self.linear(x)[torch.tensor([0, 1])]

    class Masks(Layer):
        def forward(self, x):
            return self.linear(x)[x[:, 0] > 0]

    assert not captured(Stack(Indexes()))[1].findings
    assert [finding.operator for finding in captured(Stack(Masks()))[1].findings] == ["aten.index"]


def test_capture_changes_no_model_and_prints_nothing(capfd, caplog):
    model = Odd()
    before = {name: (id(tensor), tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
    attributes = [set(vars(module)) for module in model.modules()]
    with caplog.at_level(logging.DEBUG, "headwater"):
        captured(model)
    assert [set(vars(module)) for module in model.modules()] == attributes
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert id(tensor) == before[name][0]
        assert torch.equal(tensor, before[name][1])
    assert capfd.readouterr() == ("", "")


def test_the_text_names_modules_and_the_users_lines():
    _, found = captured(Stack(Plain(), Plain()))
    (graph,) = found.graphs
    line = line_of(Plain, "self.linear(x)")
    assert (
        f"{inspect.getfile(Plain)}:{line} in layers.0.linear, code: return self.linear(x).tanh()"
        in graph.text
    )
    assert 'weights_linear_weight: "f32[8, 8]"' in graph.text
    compile(graph.text, "graph", "exec")


def test_mixed_precision_is_in_the_graph():
    _, found = captured(Stack(Plain()), precision=Precision("bf16"))
    assert 'weights_linear_weight: "bf16[8, 8]"' in found.graphs[0].text


def test_mlir_is_written_for_every_graph_and_a_failure_is_reported():
    def lower(program, name):
        if "layers.1" in name:
            raise RuntimeError("no conversion for aten.sigmoid")
        return f"func @{name}"

    class Other(Layer):
        def forward(self, x):
            return self.linear(x).sigmoid()

    model = Stack(Plain(), Other())
    record = record_step(model, torch.zeros(4, WIDTH))
    found = capture_stages(model, record, lower)
    assert [graph.mlir for graph in found.graphs] == ["func @layers.0", None]
    (finding,) = found.findings
    assert finding.problem == "no MLIR: no conversion for aten.sigmoid"
    assert finding.captured
