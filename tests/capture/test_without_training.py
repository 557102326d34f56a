"""`compile_only` writes the plan, operators and graphs; `validate_only` reports errors with their place."""

import inspect
import json
import sys
import types

import capture_models
import pytest
import torch
from capture_models import WIDTH, Odd
from rich.console import Console
from torch import nn

import headwater
from headwater.api.planner import Planner
from headwater.api.pretrained import save_pretrained
from headwater.api.without_training import compile_only, validate_only
from headwater.config import load_params, shipped_params
from headwater.core import kernels
from headwater.core.errors import ConfigError, ModelError
from headwater.core.precision import Precision
from headwater.core.units import GIB, MIB
from headwater.optim.spec import OptimizerSpec
from headwater.plan.machine import LATE_BYTES, resident_bytes
from headwater.plan.types import Resources
from headwater.trainer.without_training import validate_run
from headwater.trainer.zoo_job import zoo_trainable

F = nn.functional
AMPLE = Resources(host_memory=64 * GIB)


def printed(report):
    console = Console(width=200)
    with console.capture() as capture:
        console.print(report.render())
    return capture.get()


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x)


def cross_entropy(model, batch):
    tokens, labels = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())


TOKENS = torch.zeros(4, 5, dtype=torch.long)


def test_compile_only_counts_the_weights_of_the_model_once(tmp_path):
    model = nn.Linear(4096, 4096)
    report = compile_only(model, torch.zeros(2, 4096), compile_dir=tmp_path, resources=AMPLE)
    # The process may have grown or shrunk by a few MiB after the plan was made.
    rest = report.plan.prediction.host_parts["interpreter"]
    assert rest < resident_bytes() + LATE_BYTES - 0.8 * model.weight.nbytes


def test_arguments_of_a_wrong_type_are_errors_that_say_what_to_pass(tmp_path):
    model, batch = nn.Linear(3, 3), torch.zeros(2, 3)
    for function, options in ((validate_only, {}), (compile_only, {"compile_dir": tmp_path})):
        for wrong, found in ((nn.Linear, "the class Linear"), (print, "a builtin_function_or_method")):
            with pytest.raises(ConfigError, match=f"expected a torch.nn.Module, got {found}"):
                function(wrong, batch, **options)
        with pytest.raises(ConfigError, match="expected an optimizer of torch, got 'Adam'"):
            function(model, batch, optimizer="Adam", **options)
        with pytest.raises(ConfigError, match="expected a known precision, got 'bf8'"):
            function(model, batch, precision="bf8", **options)
        assert function(model, batch, precision="bf16", **options).record.precision == Precision("bf16")
    for function in (headwater.compile, lambda model: save_pretrained(model, tmp_path / "new")):
        with pytest.raises(ConfigError, match=r"(?s)got the class Linear.*pass an object"):
            function(nn.Linear)


def test_compile_only_writes_plan_operators_and_graphs(tmp_path):
    model = Classifier()
    report = compile_only(
        model,
        (TOKENS, TOKENS),
        loss_function=cross_entropy,
        optimizer=torch.optim.AdamW(model.parameters()),
        compile_dir=tmp_path / "compile",
        resources=AMPLE,
    )
    names = {path.relative_to(report.compile_dir).as_posix() for path in report.files}
    assert names == {
        "plan.txt", "plan.json", "operators.txt", "operators.json",
        *(f"graphs/{name}{kind}" for name in ("embedding", "layers.0", "head") for kind in (".py", ".pt2")),
    }  # fmt: skip
    assert all(path.stat().st_size for path in report.files)
    plan = json.loads((report.compile_dir / "plan.json").read_text())
    assert [stage["name"] for stage in plan["trace"]["stages"]] == [
        "embedding", "layers.0", "layers.1", "layers.2", "head",
    ]  # fmt: skip
    data = json.loads((report.compile_dir / "operators.json").read_text())
    assert {graph["name"]: graph["modules"] for graph in data["graphs"]} == {
        "embedding": ["embedding"], "layers.0": ["layers.0", "layers.1", "layers.2"], "head": ["head"],
    }  # fmt: skip
    assert data["findings"] == []
    assert "layers.0, layers.1, layers.2" in (report.compile_dir / "operators.txt").read_text()


def test_operator_counts_equal_those_of_torch(tmp_path):
    from torch.utils.flop_counter import FlopCounterMode

    model = Classifier()
    batch = TOKENS, TOKENS
    report = compile_only(model, batch, loss_function=cross_entropy, compile_dir=tmp_path, resources=AMPLE)
    with FlopCounterMode(display=False) as counter:
        cross_entropy(model, batch).backward()
    stages = json.loads((tmp_path / "operators.json").read_text())["stages"]
    operators = [total for stage in stages for total in stage["operators"].values()]
    assert sum(total["flops"] for total in operators) == counter.get_total_flops()
    products = stages[1]["operators"]["aten.addmm"]
    elements = 20 * WIDTH  # tokens times width: what each product takes and gives beside its weights
    assert products["forward"] == 3
    assert products["read_bytes"] == 3 * 4 * (elements + WIDTH * WIDTH + WIDTH)
    assert products["written_bytes"] == 3 * 4 * elements
    assert report.record.trace.costs[1].saved_bytes > 0


def test_a_second_compilation_removes_the_graphs_of_the_first(tmp_path):
    (tmp_path / "graphs").mkdir()
    (tmp_path / "graphs" / "mine.py").write_text("# not ours")
    compile_only(Classifier(), (TOKENS, TOKENS), loss_function=cross_entropy, compile_dir=tmp_path)
    compile_only(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), torch.zeros(2, 8), compile_dir=tmp_path)
    graphs = sorted(path.name for path in (tmp_path / "graphs").glob("*.py"))
    assert graphs == ["0.py", "1.py", "mine.py"]


def test_a_plan_that_does_not_fit_is_reported_and_other_files_are_written(tmp_path):
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(8192, 8192) for _ in range(4)))
    report = compile_only(
        model, torch.zeros(1, 8192), compile_dir=tmp_path, resources=Resources(host_memory=512 * MIB)
    )
    assert report.plan is None
    assert report.refusal.startswith("the model does not fit: 512 MiB of host memory")
    assert (tmp_path / "plan.txt").read_text() == f"{report.refusal}\n"
    assert [path.name for path in report.files if path.suffix == ".py"] == ["0.py"]
    assert "no plan: the model does not fit" in printed(report)


def test_findings_are_reported_with_module_and_line(tmp_path):
    model = Odd()
    report = compile_only(model, torch.zeros(4, WIDTH), compile_dir=tmp_path, resources=AMPLE)
    text = printed(report)
    lines, start = inspect.getsourcelines(capture_models.Branches)
    line = start + next(i for i, line in enumerate(lines) if "if x.sum()" in line)
    assert "no graph: aten._local_scalar_dense (.item())" in text
    assert f"where: module layers.2\n  line: {capture_models.__file__}:{line}" in text
    assert text == printed(report)
    findings = json.loads((tmp_path / "operators.json").read_text())["findings"]
    assert {finding["operator"] for finding in findings} == {
        "aten._local_scalar_dense (.item())", "aten.nonzero", "Double", "forward",
    }  # fmt: skip


def test_without_torch_mlir_one_line_is_printed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_mlir", None)
    report = compile_only(nn.Linear(8, 4), torch.zeros(2, 8), compile_dir=tmp_path, resources=AMPLE)
    assert printed(report).count("torch-mlir is not installed: no MLIR is written") == 1
    assert not list(tmp_path.rglob("*.mlir"))


def test_with_torch_mlir_each_graph_is_lowered(tmp_path, monkeypatch):
    fx = types.ModuleType("torch_mlir.fx")
    fx.export_and_import = lambda program, *, func_name: f"func.func @{func_name} {len(program.graph.nodes)}"
    package = types.ModuleType("torch_mlir")
    monkeypatch.setitem(sys.modules, "torch_mlir", package)
    monkeypatch.setitem(sys.modules, "torch_mlir.fx", fx)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    compile_only(model, torch.zeros(2, 8), compile_dir=tmp_path, resources=AMPLE)
    texts = {path.name: path.read_text() for path in tmp_path.rglob("*.mlir")}
    assert {name: text.split()[:2] for name, text in texts.items()} == {
        "0.mlir": ["func.func", "@0"], "1.mlir": ["func.func", "@1"],
    }  # fmt: skip


def test_a_valid_model_gets_a_report_of_its_state():
    model = Classifier()
    model.layers[1].requires_grad_(False)
    report = validate_only(
        model, (TOKENS, TOKENS), loss_function=cross_entropy, optimizer=OptimizerSpec("AdamW", {"lr": 1e-3})
    )
    trained = sum(param.numel() for param in model.parameters() if param.requires_grad)
    assert report.state_bytes == 8 * trained
    assert report.record.unused == ()
    assert "batch: int64[4, 5], int64[4, 5]" in printed(report)


def test_bf16_state_is_counted_with_half_the_bytes():
    model, optimizer = nn.Linear(8, 4), OptimizerSpec("AdamW", {"lr": 1e-3})
    report = validate_only(model, torch.zeros(2, 8), optimizer=optimizer, optimizer_state="bf16")
    assert report.state_bytes == 4 * (8 * 4 + 4)


def test_a_check_of_a_run_counts_its_state_as_the_run_stores_it():
    def state_bytes(*words):
        init = load_params(shipped_params()["gpt/tiny"], words).init
        return validate_run(init, zoo_trainable(init), 4).state_bytes

    assert state_bytes("trainer.init.backend.optimizer_state=bf16") == state_bytes() // 2


def test_state_of_a_factored_optimizer_is_counted():
    model = nn.Linear(1000, 2000, bias=False, device="meta")
    report = validate_only(model, torch.zeros(2, 1000), optimizer=OptimizerSpec("Adafactor", {"lr": 1e-2}))
    assert report.state_bytes == 4 * (1000 + 2000)


def test_parameters_without_a_gradient_are_named():
    class Forgets(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.used(x).mean()

    report = validate_only(Forgets(), torch.zeros(2, 8))
    assert report.record.unused == ("unused.weight", "unused.bias")
    assert "without a gradient: unused.weight, unused.bias" in printed(report)


def test_warnings_of_torch_are_reported():
    model = nn.Linear(8, 4)
    report = validate_only(
        model, (torch.zeros(2, 8), torch.zeros(2, 1)), loss_function=lambda m, b: F.mse_loss(m(b[0]), b[1])
    )
    assert "warning: Using a target size (torch.Size([2, 1]))" in printed(report)


def here(text, function):
    lines, start = inspect.getsourcelines(function)
    return f"{__file__}:{start + next(i for i, line in enumerate(lines) if text in line)}"


def test_an_error_for_a_wrong_shape_has_module_line_shapes_and_remedy():
    model = Classifier()
    model.layers[1] = nn.Linear(WIDTH + 1, WIDTH)
    with pytest.raises(ModelError, match=r"RuntimeError: .*\[20, 8\] X \[9, 8\]") as caught:
        validate_only(model, (TOKENS, TOKENS), loss_function=cross_entropy)
    line = here("layer(x).tanh()", Classifier)
    assert caught.value.where == (
        f"module layers.1, {line}; input float32[4, 5, 8], weight float32[8, 9], bias float32[8]"
    )
    assert caught.value.remedy.startswith("pass module layers.1 tensors of the shape and dtype")


@pytest.mark.parametrize(
    ("labels", "story"),
    [
        (TOKENS.int(), "classes or indices as int64 or uint8, got int32"),
        (TOKENS.float(), "float32"),
        (TOKENS[:2], r"batch_size \(20\) to match target batch_size \(10\)"),
        (TOKENS[..., None].expand(4, 5, 2), r"batch_size \(20\) to match target batch_size \(40\)"),
    ],
)
def test_wrong_labels_are_reported_at_the_loss_function(labels, story):
    with pytest.raises(ModelError, match=story) as caught:
        validate_only(Classifier(), (TOKENS, labels), loss_function=cross_entropy)
    assert caught.value.where.startswith(f"outside the model, {here('F.cross_entropy', cross_entropy)}")
    assert caught.value.remedy.startswith("pass the loss function tensors")


@pytest.mark.parametrize(
    ("loss_function", "story"),
    [
        (lambda model, batch: model(batch), r"expected one number as the loss, got float32\[4, 5, 16\]"),
        (lambda model, batch: model(batch).argmax(-1).sum(), "depends on no trainable parameter"),
        (lambda model, batch: {"loss": model(batch).mean()}, "expected a tensor as the loss, got a dict"),
    ],
)
def test_an_invalid_loss_is_refused(loss_function, story):
    with pytest.raises(ModelError, match=story):
        validate_only(Classifier(), TOKENS, loss_function=loss_function)


def test_an_error_for_numpy_in_a_forward_names_the_line():
    class UsesNumpy(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            return self.linear(x).mean() * float(x.numpy().mean())

    with pytest.raises(ModelError, match="numpy") as caught:
        validate_only(UsesNumpy(), torch.zeros(2, 8))
    assert caught.value.where.startswith(f"the model itself, {here('x.numpy()', UsesNumpy)}; x float32[2, 8]")
    assert caught.value.remedy == "write this with torch operators: a dry run has shapes, but no values"


def test_an_optimizer_of_another_model_is_refused():
    optimizer = torch.optim.SGD([*nn.Linear(3, 5).parameters()], lr=0.1)
    with pytest.raises(
        ModelError, match=r"2 of 2 parameters of the optimizer are not in the model \(\[5, 3\]"
    ):
        validate_only(nn.Linear(8, 8), torch.zeros(2, 8), optimizer=optimizer)


def test_an_argument_that_the_optimizer_does_not_take_is_an_error():
    with pytest.raises(ConfigError, match="momentun"):
        validate_only(
            nn.Linear(8, 8), torch.zeros(2, 8), optimizer=OptimizerSpec("SGD", {"lr": 1, "momentun": 1})
        )


def test_frozen_models_cannot_be_trained():
    model = nn.Linear(8, 8).requires_grad_(False)
    with pytest.raises(ModelError, match="expected an output that depends on a trainable parameter"):
        validate_only(model, torch.zeros(2, 8))


def test_the_plan_follows_the_decisions_of_the_backend(tmp_path):
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    backend = headwater.backend("CSX", compile_only=True, compile_dir=tmp_path, num_slabs=3)
    with pytest.raises(SystemExit):
        headwater.compile(model, backend)(torch.zeros(2, 8))
    assert json.loads((tmp_path / "plan.json").read_text())["slabs"] == 3


def test_the_plan_for_an_own_loop_has_its_kernels_and_its_gradients(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "slow_half_dtypes", lambda: frozenset({torch.bfloat16}))
    backend = headwater.backend("CSX", compile_only=True, compile_dir=tmp_path, matmul="fast")
    with pytest.raises(SystemExit), torch.autocast("cpu", torch.bfloat16):
        headwater.compile(nn.Linear(8, 4), backend)(torch.zeros(2, 8))
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert (plan["kernels"], plan["user_loop"]) == ("converted", True)
    assert "products in bf16: by fp32 kernels" in (tmp_path / "plan.txt").read_text()


class InHalfPrecision(nn.Linear):
    def forward(self, x):
        output = super().forward(x)
        assert output.dtype == torch.bfloat16
        return output


def test_the_options_of_a_backend_decide_if_the_first_call_ends_the_script(tmp_path, capsys):
    model, call, bf16 = nn.Linear(8, 4), ((torch.zeros(2, 8),), {}), Precision("bf16")
    Planner(headwater.backend("CSX", compile_dir=tmp_path)).stop_early(model, call, bf16)
    assert not capsys.readouterr().out
    options = {"validate_only": True, "compile_dir": tmp_path}
    with pytest.raises(SystemExit):
        Planner(headwater.backend("CSX", **options)).stop_early(InHalfPrecision(8, 4), call, bf16)
    assert "valid: model, loss and batch" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    with pytest.raises(SystemExit):
        Planner(headwater.backend("CSX", compile_only=True, **options)).stop_early(
            nn.Linear(8, 4), call, bf16
        )
    assert json.loads((tmp_path / "operators.json").read_text())["precision"] == "bf16"
    assert (tmp_path / "graphs" / "model.py").is_file()
