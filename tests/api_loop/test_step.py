"""The decorators of a training loop: the result of a step, and when closures run."""

import gc
import subprocess
import sys
import weakref

import pytest
import torch
from torch import nn

from headwater.api.step import (
    checkpoint_closure,
    compile_step,
    driven_by,
    step_closure,
    trace,
)
from headwater.api.transaction import register
from headwater.api.values import TracedValue, reading_is_free, traced
from headwater.core.errors import StreamError


class FakeLoop:
    """A loop whose kind of step the test sets."""

    def __init__(self, *, activation=True, checkpoint=True) -> None:
        self.at_activation_step = activation
        self.at_checkpoint_step = checkpoint


class Ledger:
    """A participant of transactions that records its calls."""

    def __init__(self) -> None:
        self.events = []
        register(self)

    def begin_step(self):
        self.events.append("begin")

    def end_step(self):
        self.events.append("end")

    def abort_step(self):
        self.events.append("abort")


def test_a_step_returns_values_without_their_graph():
    model = nn.Linear(3, 2)

    @trace
    def step(batch, *, scale):
        """A step."""
        outputs = model(batch) * scale
        return {"loss": outputs.sum(), "all": [outputs, "text", 3]}

    result = step(torch.ones(4, 3), scale=2.0)
    assert step.__name__ == "step" and step.__doc__ == "A step."
    loss, (outputs, *rest) = result["loss"], result["all"]
    assert type(loss) is TracedValue and type(outputs) is TracedValue and rest == ["text", 3]
    assert loss.grad_fn is None and not outputs.requires_grad
    with reading_is_free():
        assert torch.equal(outputs, model(torch.ones(4, 3)) * 2.0)


def test_the_result_of_a_step_keeps_no_activation_alive():
    kept = []

    @trace
    def step():
        activation = torch.ones(3, requires_grad=True) * 2
        kept.append(weakref.ref(activation))
        return (activation * activation).sum()

    loss = step()
    gc.collect()
    assert kept[0]() is None and loss.shape == ()


def test_a_step_is_a_transaction_and_a_nested_step_is_part_of_it():
    ledger = Ledger()

    @trace
    def inner(weight):
        return weight * 2

    @compile_step
    def outer(weight):
        (inner(weight)).backward()
        return weight.grad

    with reading_is_free():
        assert outer(torch.tensor(1.0, requires_grad=True)) == 2.0
    assert ledger.events == ["begin", "end"]


def test_a_failed_step_is_aborted_and_the_loop_continues():
    ledger = Ledger()

    @trace
    def step(divisor):
        return 1 // divisor

    with pytest.raises(ZeroDivisionError):
        step(0)
    assert step(1) == 1
    assert ledger.events == ["begin", "abort", "begin", "end"]


def test_methods_can_be_traced():
    class Trainer:
        factor = 3

        @trace
        def step(self, x):
            return x * self.factor

    assert Trainer().step(2) == 6


def test_closures_get_plain_values_and_return_none():
    seen = []

    @step_closure
    def gather(loss, *, name):
        seen.append((type(loss), loss.item(), name))
        return "dropped"

    assert gather(traced(torch.tensor(2.0, requires_grad=True) * 2), name="loss") is None
    assert seen == [(torch.Tensor, 4.0, "loss")] and gather.__name__ == "gather"


def test_a_closure_may_keep_its_arguments():
    kept, memory = [], []

    @step_closure
    def gather(value):
        kept.append(value)

    @trace
    def step():
        hidden = torch.ones(1000, requires_grad=True) * 2
        memory.append(weakref.ref(hidden))
        return hidden[:1]

    for _ in range(3):
        gather(step())
    gc.collect()
    assert [ref() for ref in memory] == [None] * 3
    assert sum(value.untyped_storage().nbytes() for value in kept) == 3 * 4


def test_closures_in_a_step_run_after_its_commit():
    ledger, seen = Ledger(), []
    total = torch.zeros(1)

    @step_closure
    def note(value):
        seen.append((value.item(), ledger.events[-1]))

    @trace
    def step(fails=False):
        note(total)
        total.add_(1.0)
        note(total)
        if fails:
            raise ValueError
        return total

    step()
    assert seen == [(0.0, "end"), (1.0, "end")], "with the values of when it was called"
    with pytest.raises(ValueError):
        step(fails=True)
    assert len(seen) == 2
    step()
    assert [value for value, _ in seen] == [0.0, 1.0, 2.0, 3.0]


def test_an_exception_in_a_closure_names_it_and_the_loop_continues():
    seen = []

    @step_closure
    def post_training_step(loss):
        if loss > 1:
            raise ValueError("too large")
        seen.append(loss.item())

    for loss in [0.0, 2.0, 1.0]:
        if loss == 2.0:
            with pytest.raises(ValueError, match="too large") as caught:
                post_training_step(torch.tensor(loss))
            assert "post_training_step" in caught.value.__notes__[0]
        else:
            post_training_step(torch.tensor(loss))
    assert seen == [0.0, 1.0]


def test_a_closure_called_in_a_closure_runs_at_once():
    seen = []

    @step_closure
    def inner(value):
        seen.append(value.item())

    @step_closure
    def outer(value):
        inner(value)
        seen.append("after")

    outer(torch.tensor(1.0))
    assert seen == [1.0, "after"]


def test_a_closure_that_evaluates_may_use_traced_steps_and_read_their_values():
    seen = []
    evaluate = trace(lambda: torch.tensor(3.0))

    @checkpoint_closure
    def save():
        seen.append(evaluate().item())  # would warn, and so fail, if it were not within a closure

    save()
    assert seen == [3.0]


@pytest.mark.parametrize("activation", [True, False])
@pytest.mark.parametrize("checkpoint", [True, False])
def test_the_loop_decides_which_closures_run(activation, checkpoint):
    seen = []
    note, save = step_closure(seen.append), checkpoint_closure(seen.append)
    with driven_by(FakeLoop(activation=activation, checkpoint=checkpoint)):
        note("note")
        save("save")
        with driven_by(FakeLoop(activation=True, checkpoint=False)):
            note("inner note")
            save("inner save")
    expected = ["note"] * activation + ["save"] * checkpoint + ["inner note"]
    assert seen == expected
    save("without a loop")
    assert seen[-1] == "without a loop"


def test_a_checkpoint_within_a_step_is_saved_after_the_step():
    ledger, seen = Ledger(), []
    save = checkpoint_closure(lambda: seen.append(ledger.events[-1]))
    trace(save)()
    assert seen == ["end"]


def test_a_checkpoint_within_a_closure_is_refused():
    save = checkpoint_closure(lambda: None)
    with pytest.raises(StreamError, match="in the loop, after the step"):
        step_closure(lambda: save())()


AT_EXIT = """
import dataclasses
from headwater.api import step

class Late:
    complete = False
    def query(self):
        return self.complete
    def synchronize(self):
        self.complete = True

made = step.host_call
step.host_call = lambda *call: dataclasses.replace(made(*call), copied=(Late(),))
show = step.step_closure(print)
show("first")
show("second")
print("the loop is over")
"""


def test_waiting_closures_run_when_the_program_ends():
    ran = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == ["the loop is over", "first", "second"]
