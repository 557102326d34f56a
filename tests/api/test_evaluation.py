"""Forwards without gradients, with other batch sizes, or of parts of a model, before and between steps."""

import multiprocessing
import threading

import pytest
import torch
from any_loop import Net, Place, adamw, batches, check, every_plan, extreme_plans, loss_of, some_plan
from torch import nn

from headwater.core.errors import StreamError

WITHOUT = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


@extreme_plans
@pytest.mark.parametrize("without", WITHOUT)
@pytest.mark.parametrize("first", ["evaluation", "step"])
def test_evaluation_between_steps_equals_plain(plan, without, first, tmp_path):
    def script(place):
        model = place.compile(Net())
        optimizer = adamw(model.parameters())
        losses, scores = [], []

        def evaluate():
            model.eval()
            with WITHOUT[without]():
                scores.extend(loss_of(model(x), y).item() for x, y in batches(2, size=7, seed=2))
            model.train()

        if first == "evaluation":
            evaluate()
        for inputs, targets in batches(4):
            optimizer.zero_grad()
            loss = loss_of(model(inputs), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            evaluate()
        return losses, scores, model, optimizer

    check(script, plan, tmp_path)


@extreme_plans
def test_a_larger_batch_during_gradient_accumulation(plan, tmp_path):
    """The model is planned again in the middle of a gradient accumulation."""

    def script(place):
        model = place.compile(Net())
        optimizer = adamw(model.parameters())
        losses = []
        for number, size in enumerate([2, 5, 6, 9, 3, 11], start=1):
            ((inputs, targets),) = batches(1, size=size, seed=size)
            loss = loss_of(model(inputs), targets) / 2
            loss.backward()
            losses.append(loss.item())
            if number % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
        return losses, model, optimizer

    check(script, plan, tmp_path)


@extreme_plans
def test_a_larger_batch_between_forward_and_backward_of_another(plan, tmp_path):
    def script(place):
        model = place.compile(Net())
        optimizer = adamw(model.parameters())
        losses = []
        for sizes in [(2, 3), (4, 7)]:
            loss = sum(loss_of(model(x), y) for size in sizes for x, y in batches(1, size=size, seed=size))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, model, optimizer

    check(script, plan, tmp_path)


@some_plan
def test_a_model_may_be_evaluated_without_training(plan, tmp_path):
    def script(place):
        model = place.compile(Net().requires_grad_(False).eval())
        return [model(x) for x, _ in batches(3)], model

    check(script, plan, tmp_path)


@extreme_plans
@pytest.mark.parametrize("first", ["the part", "the whole"])
@pytest.mark.filterwarnings("ignore::headwater.api.step_hooks.NotStreamedWarning")
def test_a_submodule_of_a_streamed_model_can_be_called_directly(plan, first, tmp_path):
    def script(place):
        model = place.compile(Net())
        optimizer = adamw(model.parameters())
        losses = []

        def train_part():
            optimizer.zero_grad()
            loss = model.blocks[1](torch.randn(4, 12)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())

        def train_whole():
            optimizer.zero_grad()
            ((inputs, targets),) = batches(1)
            loss = loss_of(model(inputs), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())

        turns = [train_part, train_whole, train_part, train_whole]
        for turn in turns if first == "the part" else turns[1:]:
            turn()
        return losses, model, optimizer

    check(script, plan, tmp_path)


class Encoder(nn.Module):
    """A model with methods besides `forward`; one of them reads a weight directly."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(5, 8))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def encode(self, tokens):
        hidden = self.table[tokens]
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return hidden

    def forward(self, tokens):
        return self.encode(tokens) @ self.table.T


@extreme_plans
@pytest.mark.parametrize("first", ["the method", "the whole"])
@pytest.mark.filterwarnings("ignore::headwater.api.step_hooks.NotStreamedWarning")
def test_methods_other_than_forward_equal_plain(plan, first, tmp_path):
    def script(place):
        model = place.compile(Encoder())
        optimizer = adamw(model.parameters())
        tokens = torch.arange(4)
        losses = []

        def train(loss):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())

        if first == "the method":
            train(model.encode(tokens).square().mean())
        for _ in range(2):
            train(loss_of(model(tokens), tokens))
            train(model.encode(tokens).square().mean())
        with torch.no_grad():
            return losses, model.encode(tokens), model, optimizer

    check(script, plan, tmp_path)


@every_plan
def test_text_is_generated_between_steps(plan, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=23, n_positions=16, n_embd=8, n_layer=3, n_head=2)

    def script(place):
        model = place.compile(transformers.GPT2LMHeadModel(config))
        optimizer = adamw(model.parameters())
        tokens = torch.randint(23, (2, 8))
        losses, texts = [], []
        for _ in range(3):
            texts.append(model.generate(tokens[:, :3], max_new_tokens=4, do_sample=False, pad_token_id=0))
            optimizer.zero_grad()
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, texts, model, optimizer

    check(script, plan, tmp_path)


@some_plan
def test_two_threads_that_call_a_model_at_once_are_refused(plan, tmp_path):
    """In one forward, the weights of the other would be unbound."""
    place = Place(plan, tmp_path)
    inside, done = threading.Event(), threading.Event()

    class Waits(nn.Linear):
        def forward(self, x):
            if threading.current_thread() is not threading.main_thread():
                inside.set()
                assert done.wait(60)
            return super().forward(x)

    model = place.compile(nn.Sequential(nn.Linear(8, 8), Waits(8, 8), nn.Linear(8, 8)))
    inputs = torch.ones(2, 8)
    with torch.no_grad():
        expected = model(inputs)
    outputs = []

    def call():
        with torch.no_grad():
            outputs.append(model(inputs))

    thread = threading.Thread(target=call)
    thread.start()
    try:
        assert inside.wait(60)
        with torch.no_grad(), pytest.raises(StreamError, match="two threads call the model"):
            model(inputs)
    finally:
        done.set()
        thread.join()
    assert torch.equal(outputs[0], expected)
    place.release()


@pytest.mark.parametrize("plan", ["slabs", "disk"])
def test_a_call_in_a_forked_process_is_refused(plan, tmp_path):
    """The threads that fetch weights do not exist there, so the call would never end."""
    place = Place(plan, tmp_path)
    model = place.compile(Net())
    inputs = batches(1)[0][0]
    model(inputs)
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def call():
        for _ in range(4):  # a retry must not find a slab that was never filled
            with torch.no_grad(), pytest.raises(StreamError, match="in a fork of the process"):
                model(inputs)
        sender.send("refused")

    process = context.Process(target=call)
    process.start()
    try:
        assert receiver.poll(60) and receiver.recv() == "refused"
    finally:
        process.kill()
        process.join()
    place.release()
