"""Long work is named on stderr, short work is not."""

import threading

from headwater.core.patience import noticed


def test_long_work_is_named_with_what_it_does_now():
    said, second = [], threading.Event()

    def say(text):
        said.append(text)
        if len(said) == 2:
            second.set()

    with noticed("planning", silence_s=0.001, interval_s=0.001, say=say) as activity:
        while not said:
            pass
        activity.name = "planning: dry run of 2 samples"
        said.clear()
        assert second.wait(10)
    assert said[1].startswith("planning: dry run of 2 samples (")
    assert said[1].endswith("so far)")


def test_short_work_is_not():
    said = []
    with noticed("planning", silence_s=60, say=said.append):
        pass
    assert said == []
