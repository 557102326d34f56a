"""Ranks that receive a signal at different moments end after the same step."""

from types import SimpleNamespace

from headwater.core.errors import StoreError
from headwater.trainer.interrupt import Interrupt
from headwater.trainer.loop import Trainer


def asked_to_stop(interrupt, others, meanwhile=lambda: None, failure=None):
    """Return True if a rank is asked to stop, with the other ranks' answers and a call while it waits."""

    def gather(value):
        meanwhile()
        return [value, *others]

    engine = SimpleNamespace(fabric=SimpleNamespace(gather=gather))
    trainer = SimpleNamespace(_engine=engine, _callbacks=SimpleNamespace(failure=failure))
    return Trainer._asked_to_stop(trainer, interrupt)


def test_a_signal_during_the_agreement_is_handled_after_the_next_step():
    interrupt = Interrupt()
    assert not asked_to_stop(interrupt, [0.0], lambda: setattr(interrupt, "requested", True))
    assert asked_to_stop(interrupt, [0.0])


def test_a_signal_received_by_another_rank_is_handled_here():
    interrupt = Interrupt()
    assert not asked_to_stop(interrupt, [0.0])
    assert asked_to_stop(interrupt, [1.0])
    assert interrupt.requested


def test_a_callback_that_fails_stops_all_ranks():
    interrupt = Interrupt()
    assert asked_to_stop(interrupt, [0.0], failure=StoreError("its disk is gone"))
    assert asked_to_stop(Interrupt(), [float(interrupt.requested)])
