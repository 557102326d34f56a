"""Modules with unusual inputs, outputs or contents."""

import contextlib
import copy
import dataclasses
import io
import logging
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from any_loop import Place, adamw, check, extreme_plans, randn, some_plan
from torch import nn
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from headwater.core.errors import StreamError
from headwater.stream.parameters import ParameterAtRest


def train(model, call, *, steps=4):
    """Take optimizer steps, each for the loss `call(number)`; return losses, model and optimizer."""
    optimizer = adamw(model.parameters())
    losses = []
    for number in range(steps):
        optimizer.zero_grad()
        loss = call(number)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model, optimizer


def layers(count=3, width=6):
    return nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(count))


@dataclasses.dataclass
class Output:
    """The output of a model, as a dataclass."""

    hidden: torch.Tensor
    all_hidden: list[torch.Tensor]
    named: dict[str, tuple[torch.Tensor, None]]
    count: int


class Nested(nn.Module):
    """A model that returns a dataclass with nested contents."""

    def __init__(self):
        super().__init__()
        self.layers = layers()

    def forward(self, x):
        every = []
        for layer in self.layers:
            x = layer(x)
            every.append(x)
        return Output(x, every, {"first": (every[0] * 2, None)}, len(every))


@extreme_plans
@pytest.mark.parametrize("used", ["hidden", "all", "named"])
def test_outputs_in_dataclasses_and_containers(plan, used, tmp_path):
    def script(place):
        model = place.compile(Nested())

        def call(number):
            output = model(torch.randn(3, 6))
            assert output.count == 3
            if used == "hidden":
                return output.hidden.square().mean()
            if used == "all":
                return sum(hidden.square().mean() for hidden in output.all_hidden)
            return output.named["first"][0].square().mean()

        return train(model, call)

    check(script, plan, tmp_path)


class Spectrum(nn.Module):
    """A model whose output is complex: a vector, or a number."""

    def __init__(self, *, reduced):
        super().__init__()
        self.layers = layers()
        self.reduced = reduced

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        values = torch.view_as_complex(x.view(-1, 3, 2)).conj()
        return values.sum() if self.reduced else values


@some_plan
@pytest.mark.parametrize("reduced", [False, True])
def test_complex_outputs(plan, reduced, tmp_path):
    def script(place):
        model = place.compile(Spectrum(reduced=reduced))
        return train(model, lambda number: model(torch.randn(4, 6)).abs().square().mean())

    check(script, plan, tmp_path)


class Flexible(nn.Module):
    """A model that takes keywords, lists, `None` and a flag."""

    def __init__(self):
        super().__init__()
        self.layers = layers()
        self.extra = nn.Linear(6, 6)

    def forward(self, parts, *, mask=None, scale=1.0, options=None):
        x = torch.cat(parts)
        for layer in self.layers:
            x = layer(x)
        if mask is not None:
            x = x * mask
        if options and options.get("extra"):
            x = self.extra(x)
        return x * scale


@extreme_plans
def test_arguments_of_every_kind_are_passed_on(plan, tmp_path):
    def script(place):
        model = place.compile(Flexible())

        def call(number):
            parts = [torch.randn(2, 6) for _ in range(2)]
            calls = [
                lambda: model(parts),
                lambda: model(parts, mask=torch.ones(4, 1), options={"extra": True}),
                lambda: model(parts=parts, scale=torch.tensor(2.0), options=None),
                lambda: model(parts, mask=None, options={"extra": False, "name": "x"}),
            ]
            return calls[number]().square().mean()

        return train(model, call)

    check(script, plan, tmp_path)


class Checkpointed(nn.Module):
    """A model that recomputes its layers in backward, with one of torch's checkpoint modes."""

    def __init__(self, way):
        super().__init__()
        self.layers = layers(4)
        self.dropout = nn.Dropout(0.2)
        self.way = way

    def forward(self, x):
        x = x * 1.0
        if self.way == "sequential":
            return checkpoint_sequential(nn.Sequential(*self.layers), 2, x, use_reentrant=False)
        for layer in self.layers:
            x = checkpoint(self.run, layer, x, use_reentrant=self.way == "reentrant")
        return x

    def run(self, layer, x):
        return self.dropout(layer(x))


@extreme_plans
@pytest.mark.parametrize("way", ["reentrant", "not reentrant", "sequential"])
def test_checkpointing_inside_the_model_equals_plain(plan, way, tmp_path):
    def script(place):
        model = place.compile(Checkpointed(way))
        return train(model, lambda number: model(torch.randn(3, 6, requires_grad=True)).square().mean())

    check(script, plan, tmp_path)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable.:FutureWarning")
@some_plan
def test_checkpointing_of_transformers_equals_plain(plan, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=23, n_positions=16, n_embd=8, n_layer=3, n_head=2)

    def script(place):
        model = transformers.GPT2LMHeadModel(config)
        model.gradient_checkpointing_enable()
        model = place.compile(model)
        tokens = torch.randint(23, (2, 8))
        return train(model, lambda number: model(input_ids=tokens, labels=tokens).loss)

    check(script, plan, tmp_path)


class Tied(nn.Module):
    """A model with a tied embedding and head, and a layer that is used twice."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.layers = layers()
        self.layers.append(self.layers[0])
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@extreme_plans
def test_tied_weights(plan, tmp_path):
    def script(place):
        model = place.compile(Tied())
        tokens = torch.arange(8).view(2, 4)
        loss_of = nn.functional.cross_entropy
        result = train(model, lambda number: loss_of(model(tokens).flatten(0, 1), tokens.flatten()))
        return result, model.head.weight is model.embedding.weight

    check(script, plan, tmp_path)


class Recurrent(nn.Module):
    """A model with a recurrent layer, a normalization with statistics, and a state that the loop carries."""

    def __init__(self):
        super().__init__()
        self.cell = nn.LSTM(6, 6, num_layers=2)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 6)

    def forward(self, x, state=None):
        x, state = self.cell(x, state)
        return self.head(self.norm(x.flatten(0, 1))), state


class Scaled(nn.Sequential):
    """Layers, and parameters of their container."""

    def __init__(self):
        super().__init__(*layers())
        self.scale = nn.Parameter(torch.ones(6))
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return super().forward(x) * self.scale


class ScaledList(nn.ModuleList):
    def __init__(self):
        super().__init__(layers())
        self.scale = nn.Parameter(torch.ones(6))


class WithScales(nn.Module):
    """A model of containers that have parameters. One of them is never called."""

    def __init__(self):
        super().__init__()
        self.called, self.iterated = Scaled(), ScaledList()

    def forward(self, x):
        x = self.called(x)
        for layer in self.iterated:
            x = layer(x) * self.iterated.scale
        return x


@extreme_plans
@pytest.mark.parametrize("kind", [Scaled, WithScales])
def test_containers_with_parameters(plan, kind, tmp_path):
    def script(place):
        model = place.compile(kind())
        return train(model, lambda number: model(randn(2, 6, seed=number)).square().mean())

    check(script, plan, tmp_path)


@extreme_plans
def test_recurrent_state_is_carried_between_steps(plan, tmp_path):
    def script(place):
        model = place.compile(Recurrent())
        state = None

        def call(number):
            nonlocal state
            output, state = model(torch.randn(4, 2, 6), state)
            state = tuple(part.detach() for part in state)
            return output.square().mean()

        return train(model, call)

    check(script, plan, tmp_path)


@extreme_plans
def test_backpropagation_through_time_equals_plain(plan, tmp_path):
    """Backpropagation through time: each call takes the state of the call before; then comes one backward."""

    def script(place):
        model = place.compile(Recurrent())

        def call(number):
            state, total = None, 0.0
            for _ in range(3):
                output, state = model(torch.randn(4, 2, 6), state)
                total = total + output.square().mean()
            return total

        return train(model, call)

    check(script, plan, tmp_path)


class Normalized(nn.Module):
    """A model whose weights are computed from others, by torch's old and new parametrizations."""

    def __init__(self):
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
        self.second = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
        self.third = nn.utils.parametrizations.orthogonal(nn.Linear(6, 6))

    def forward(self, x):
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


@extreme_plans
def test_parametrized_weights(plan, tmp_path):
    def script(place):
        model = place.compile(Normalized())
        return train(model, lambda number: model(torch.randn(3, 6)).square().mean())

    check(script, plan, tmp_path)


@extreme_plans
def test_functional_call_uses_the_given_weights(plan, tmp_path):
    """In an inner step of meta-learning the model runs with weights that are not its parameters."""

    def script(place):
        model = place.compile(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)))

        def call(number):
            own = dict(model.named_parameters())
            inner = model(torch.randn(3, 6)).square().mean()
            gradients = torch.autograd.grad(inner, list(own.values()), create_graph=True)
            adapted = {n: p - 0.1 * g for (n, p), g in zip(own.items(), gradients, strict=True)}
            return torch.func.functional_call(model, adapted, (torch.randn(3, 6),)).square().mean()

        return train(model, call)

    check(script, plan, tmp_path)


@some_plan
def test_the_model_is_part_of_a_larger_one(plan, tmp_path):
    def script(place):
        body = place.compile(Nested())
        model = nn.ModuleDict({"body": body, "head": nn.Linear(6, 2)})
        return train(
            model, lambda number: model["head"](model["body"](torch.randn(3, 6)).hidden).square().mean()
        )

    check(script, plan, tmp_path)


@some_plan
def test_two_models_may_share_a_submodule(plan, tmp_path):
    """A plain model uses a module of a streamed model."""

    def script(place):
        trunk = place.compile(Nested())
        heads = [nn.Linear(6, 2), nn.Linear(6, 3)]
        optimizer = adamw([*trunk.parameters(), *heads[0].parameters(), *heads[1].parameters()])
        losses = []
        for number in range(4):
            optimizer.zero_grad()
            loss = heads[number % 2](trunk(torch.randn(3, 6)).hidden).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, trunk, *heads, optimizer

    check(script, plan, tmp_path)


def two_layers():
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))


def test_a_model_with_a_compiled_part_is_refused(tmp_path):
    whole = two_layers()
    Place("memory", tmp_path).compile(whole[0])
    with pytest.raises(StreamError, match=r"a Linear inside this Sequential is compiled(.|\n)*release"):
        Place("memory", tmp_path).compile(whole)


def test_a_part_that_is_compiled_after_its_model_is_refused(tmp_path):
    whole = Place("memory", tmp_path).compile(two_layers())
    Place("memory", tmp_path).compile(whole[0])
    with pytest.raises(StreamError, match=r"a Linear inside this Sequential is compiled(.|\n)*where: 0"):
        whole(randn(3, 6, seed=0))


@some_plan
def test_a_model_whose_part_was_released_equals_plain(plan, tmp_path):
    def script(place):
        whole = two_layers()
        place.compile(whole[0])(randn(3, 6, seed=0)).sum().backward()
        place.release()
        place.compile(whole)
        return train(whole, lambda number: whole(randn(3, 6, seed=number)).square().mean())

    check(script, plan, tmp_path)


@pytest.mark.parametrize("pickled", [pickle.dumps, lambda model: torch.save(model, io.BytesIO())])
@pytest.mark.parametrize("is_called", [False, True])
def test_pickles_of_compiled_models_are_refused(pickled, is_called, tmp_path):
    model = Place("memory", tmp_path).compile(two_layers())
    if is_called:
        model(randn(3, 6, seed=0))
    with pytest.raises(StreamError, match=r"cannot be pickled(.|\n)*state_dict"):
        pickled(model)


def test_a_shallow_copy_of_a_streamed_parameter_is_refused(tmp_path):
    """In plain PyTorch it shares the memory of the parameter."""
    model = Place("memory", tmp_path).compile(two_layers())
    model(randn(3, 6, seed=0))
    param = next(model.parameters())
    with pytest.raises(
        StreamError, match=r"copy.copy would make a parameter(.|\n)*copy.deepcopy\(parameter\)"
    ):
        copy.copy(param)
    assert torch.equal(copy.deepcopy(param), param)


@extreme_plans
def test_a_step_with_cached_parametrizations(plan, tmp_path):
    def script(place):
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
        torch.nn.utils.parametrizations.weight_norm(model[2])
        place.compile(model)

        def call(number):
            with torch.nn.utils.parametrize.cached():
                losses = [model(randn(3, 6, seed=10 * number + part)).square().mean() for part in range(2)]
                return sum(losses) + model[2].weight.square().sum()

        return train(model, call)

    check(script, plan, tmp_path)


class DisablesHooks(nn.Sequential):
    def forward(self, x):
        with disable_saved_tensors_hooks("inside"):
            return super().forward(x)


@pytest.mark.parametrize("is_inside", [False, True])
@pytest.mark.parametrize("plan", ["slabs", "recompute"])
def test_disabled_hooks_for_saved_tensors_are_refused(plan, is_inside, tmp_path):
    layers = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)]
    model = Place(plan, tmp_path).compile(DisablesHooks(*layers) if is_inside else nn.Sequential(*layers))
    context = contextlib.nullcontext() if is_inside else disable_saved_tensors_hooks("outside")
    with pytest.raises(StreamError, match=r"disable_saved_tensors_hooks forbids them(.|\n)*remedy"), context:
        model(randn(3, 6, seed=0))
    if not is_inside:
        model(randn(3, 6, seed=0)).sum().backward()


def test_a_refused_forward_has_ended_so_that_changes_and_other_threads_are_noticed(tmp_path):
    def script(place):
        model = place.compile(nn.Sequential(*(nn.Linear(6, 6) for _ in range(3))))
        model(randn(3, 6, seed=0)).sum().backward()
        if place.plan is not None:
            with pytest.raises(StreamError), disable_saved_tensors_hooks("outside"):
                model(randn(3, 6, seed=1))
        model[2] = nn.Linear(6, 6)
        with ThreadPoolExecutor(1) as thread:
            output = thread.submit(model, randn(3, 6, seed=2)).result()
        assert place.plan is None or isinstance(model[2].weight, ParameterAtRest)
        return output.detach(), model

    check(script, "slabs", tmp_path)


def test_errors_of_the_forward_beside_disabled_hooks_are_raised_as_they_are(tmp_path):
    model = Place("memory", tmp_path).compile(two_layers())
    model(randn(3, 6, seed=0))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), disable_saved_tensors_hooks("no"):
        model(randn(3, 5, seed=0))


def test_a_first_batch_of_a_wrong_shape_logs_no_traceback_of_torch(tmp_path):
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(handler)
    try:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            Place("memory", tmp_path).compile(two_layers())(randn(3, 5, seed=0))
    finally:
        logger.removeHandler(handler)
    assert not records


class OtherNames(nn.Module):
    """A block that renames its parameters, as a wrapper does for a checkpoint."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def named_parameters(self, *args, **kwargs):
        return ((f"renamed.{name}", param) for name, param in self.layer.named_parameters())

    def forward(self, x):
        return self.layer(x).tanh()


class Preference(nn.Module):
    """A model whose `parameters` takes no arguments, and returns only those that the optimizer should get."""

    def __init__(self):
        super().__init__()
        self.policy = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), OtherNames(), nn.Linear(6, 6))
        self.reference = nn.Sequential(nn.Linear(6, 6), OtherNames(), nn.Linear(6, 6)).requires_grad_(False)

    def parameters(self):
        return self.policy.parameters()

    def forward(self, x):
        return self.policy(x) - self.reference(x)


@pytest.mark.parametrize("plan", ["memory", "slabs", "recompute on disk"])
def test_classes_that_override_the_methods_for_parameters(plan, tmp_path):
    def script(place):
        model = place.compile(Preference())
        return train(model, lambda number: model(randn(3, 6, seed=number)).square().mean())

    check(script, plan, tmp_path)
