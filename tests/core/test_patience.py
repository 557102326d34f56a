"""Long work is announced on stderr, short work is not."""

import time

from headwater.core.patience import notice_if_long


def test_a_notice_names_the_current_activity():
    said = []
    with notice_if_long("planning", silence_s=0.001, interval_s=0.001, say=said.append) as activity:
        while not said:
            time.sleep(0.001)
        activity.name = "planning: dry run of 2 samples"
        while not said[-1].startswith("planning: dry run of 2 samples ("):
            time.sleep(0.001)
    assert said[0].startswith("planning (")
    assert said[-1].endswith("so far)")


def test_short_work_is_not_announced():
    said = []
    with notice_if_long("planning", silence_s=60, say=said.append):
        pass
    assert said == []
