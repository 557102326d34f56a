"""The page of the board in Chromium."""

import json
import re
import shutil
import sys
import time

import pytest
from board_runs import TOKEN, add_steps, make_run

from headwater.appliance.database import Database
from headwater.appliance.embedded import Caller, EmbeddedQueue
from headwater.appliance.folder import QueueFolder
from headwater.appliance.open import prepare
from headwater.appliance.queue import new_token
from headwater.appliance.types import Phase, Priority, Submission
from headwater.board.jobs import Jobs

COLORS = """canvas => new Set(new Uint32Array(
    canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.buffer)).size"""
"""Number of different colors in a chart."""

FOCUSED = """() => { const { ariaLabel, innerText, id } = document.activeElement;
    return ariaLabel || innerText || id; }"""
LABELLED = """[...document.querySelectorAll('input, select')].every(
    (each) => each.labels.length || each.ariaLabel)"""


def row(page, name):
    return page.locator(f"#run-rows tr[data-key='{name}']")


def text_of(page, name, cell):
    return row(page, name).locator(f"[data-cell={cell}]").inner_text()


def wait_for(condition, seconds=100):
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it did not happen"
        time.sleep(0.05)


def test_the_page_shows_runs_and_charts(serve, open_page, tmp_path):
    make_run(tmp_path, "sweep/small", 200)
    make_run(tmp_path, "large", 50, end_step=100)
    served = serve()
    page = open_page(served)
    page.wait_for_selector("#run-rows tr:nth-child(2)")
    assert text_of(page, "sweep/small", "state") == "complete"
    assert text_of(page, "sweep/small", "step") == "200 of 200"
    assert text_of(page, "large", "state").startswith("running")
    assert text_of(page, "large", "memory") == "3.00 GiB, plan 3.50 GiB, budget 4.00 GiB"
    assert text_of(page, "large", "eta") == "12.5 s"
    assert text_of(page, "large", "rate") == "65,536 tokens/s"
    loss = page.get_by_role("img", name=re.compile("^Loss"))
    wait_for(lambda: "large" in loss.get_attribute("aria-label"))
    assert "sweep/small 2.1" in loss.get_attribute("aria-label")
    assert page.locator("canvas.chart").count() == 5
    assert all(chart.evaluate(COLORS) > 10 for chart in page.locator("canvas.chart").all())
    # The token is in no address that the browser keeps.
    assert page.url == served.partition("#")[0]


def test_new_steps_and_new_runs_arrive_by_themselves(serve, open_page, tmp_path):
    run = make_run(tmp_path, "run", 20, end_step=1000)
    page = open_page(serve())
    page.wait_for_selector("#run-rows tr")
    assert text_of(page, "run", "step") == "20 of 1000"
    loss = page.get_by_role("img", name=re.compile("^Loss"))
    wait_for(lambda: "run" in loss.get_attribute("aria-label"))
    before = loss.get_attribute("aria-label")
    add_steps(run, 21, 400)
    wait_for(lambda: text_of(page, "run", "step") == "400 of 1000")
    wait_for(lambda: loss.get_attribute("aria-label") != before)
    make_run(tmp_path, "deep/down/other", 5)
    page.wait_for_selector("#run-rows tr[data-key='deep/down/other']")


def test_runs_are_compared_in_one_chart(serve, open_page, tmp_path):
    for name, offset in (("one", 0.0), ("two", 1.0)):
        make_run(tmp_path, name, 100, offset=offset)
    page = open_page(serve())
    loss = page.get_by_role("img", name=re.compile("^Loss"))
    wait_for(lambda: {"one", "two"} <= set(re.findall(r"one|two", loss.get_attribute("aria-label") or "")))
    both = loss.evaluate(COLORS)
    page.get_by_label("Show two in the charts").uncheck()
    wait_for(lambda: "two" not in loss.get_attribute("aria-label"))
    assert loss.evaluate(COLORS) < both
    page.get_by_role("button", name="Select all").click()
    wait_for(lambda: "two" in loss.get_attribute("aria-label"))
    page.get_by_label("Filter").fill("on")
    assert row(page, "one").count() == 1 and row(page, "two").count() == 0


def test_everything_works_with_the_keyboard(serve, open_page, tmp_path):
    make_run(tmp_path, "run", 100)
    page = open_page(serve())
    page.wait_for_selector("#run-rows tr")
    names = []
    for _ in range(16):
        page.keyboard.press("Tab")
        names.append(page.evaluate(FOCUSED))
    assert names[0] == "Skip to the charts" and "Show run in the charts" in names and "run" in names
    assert sum(name.startswith("Loss") for name in names) == 1
    loss = page.get_by_role("img", name=re.compile("^Loss"))
    loss.focus()
    page.keyboard.press("Home")
    assert page.locator("#readout").inner_text().startswith("Loss, step 1: run 4.95")
    page.keyboard.press("ArrowRight")
    assert page.locator("#readout").inner_text().startswith("Loss, step 2: run 4.90")
    row(page, "run").get_by_role("button").press("Enter")
    page.wait_for_selector("#details:not([hidden])")
    page.keyboard.press("Escape")
    assert page.locator("#details").is_hidden()
    assert page.evaluate("document.activeElement.innerText") == "run"


def test_details_show_plan_samples_timeline_and_the_end_of_the_log(serve, open_page, tmp_path):
    run = make_run(tmp_path, "run", 10)
    run.plan.write_text("Plan <b>of</b> the run")
    (run.path / "wsjob-000000000001.log").write_text("an early line\n" * 9000 + "the last line\n")
    sample = {"doc_id": 0, "arguments": [["Once upon", {"until": []}]], "filtered_resps": ["a <i>time</i>"]}
    (run.path / "story_10.json").write_text(json.dumps([sample]))
    profiler = pytest.importorskip("matplotlib.figure")
    run.profile.mkdir()
    profiler.Figure((2, 1)).savefig(run.profile / "timeline.png")
    page = open_page(serve())
    row(page, "run").get_by_role("button").click()
    page.wait_for_selector("#details:not([hidden])")
    content = page.locator("#details-content")
    page.wait_for_selector("#details h3:has-text('End of the log')")
    shown = content.inner_text()
    assert "Plan <b>of</b> the run" in shown and "a <i>time</i>" in shown and "Once upon" in shown
    assert "the last line" in shown and "0.375" in shown
    picture = page.get_by_role("img", name=re.compile("^Timeline"))
    wait_for(lambda: picture.evaluate("image => image.complete && image.naturalWidth > 0"))


def test_damaged_lines_and_a_folder_that_vanishes(serve, open_page, tmp_path):
    folder = tmp_path / "runs"
    damaged = make_run(folder, "damaged", 20)
    make_run(folder, "other", 20)
    page = open_page(serve(folder))
    page.wait_for_selector("#run-rows tr")
    with damaged.history.open("ab") as file:
        file.write(b"\0" * 600 + b"\n")
    page.wait_for_selector("text=1 damaged line of history.jsonl left out")
    shutil.rmtree(folder / "other")
    wait_for(lambda: row(page, "other").count() == 0)
    shutil.rmtree(folder)
    page.wait_for_selector("text=the folder does not exist any more")
    page.wait_for_selector("#no-runs")
    make_run(folder, "again", 20)
    page.wait_for_selector("#run-rows tr[data-key='again']")


def test_jobs_are_cancelled_and_get_another_priority(serve, open_page, tmp_path):
    folder = QueueFolder(tmp_path / "queue")
    prepare(folder, num_csx=1)
    queue = EmbeddedQueue(Database(folder), Caller.myself(), lambda: None)  # no supervisor: all jobs wait
    command = (sys.executable, "-c", "<script>alert(1)</script>")
    first, second = (queue.submit(Submission(command, tmp_path), new_token()) for _ in range(2))
    jobs = Jobs(lambda: EmbeddedQueue(Database(folder), Caller.myself(), lambda: None))
    page = open_page(serve(jobs=jobs))
    page.get_by_label(f"Priority of {second.name}").select_option("p1")
    wait_for(lambda: queue.show(second.name).priority == Priority.P1)
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_label(f"Cancel {first.name}").click()
    wait_for(lambda: queue.show(first.name).phase == Phase.CANCELLED)
    wait_for(lambda: page.get_by_label(f"Cancel {first.name}").count() == 0)
    assert page.get_by_label(f"Cancel {second.name}").count() == 1
    assert "<script>alert(1)</script>" in page.locator("#job-rows").inner_text()


def test_a_wrong_token_is_refused_and_a_right_one_accepted(serve, open_page, tmp_path):
    make_run(tmp_path, "run", 5)
    served = serve()
    page = open_page(served.replace(TOKEN, "wrong"))
    page.wait_for_selector("text=The token is missing or wrong.")
    page.get_by_label("Token").fill(TOKEN)
    page.keyboard.press("Enter")
    page.wait_for_selector("#run-rows tr")
    page.reload()
    page.wait_for_selector("#run-rows tr")
    assert all("401" in problem for problem in open_page.problems)
    open_page.problems.clear()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_enough_contrast(serve, open_page, tmp_path, scheme):
    make_run(tmp_path, "run", 5)
    page = open_page(serve(), color_scheme=scheme, reduced_motion="reduce")
    page.wait_for_selector("#run-rows tr")
    colors = page.evaluate(
        """() => ['page', 'panel', 'ink', 'quiet', 'accent', 'bad', 'good'].map(
            (name) => getComputedStyle(document.documentElement).getPropertyValue('--' + name).trim())"""
    )
    pages, texts = colors[:2], colors[2:]
    assert all(contrast(page, text) >= 4.5 for page in pages for text in texts)
    assert page.evaluate("getComputedStyle(document.querySelector('button')).transitionDuration") == "0s"
    assert page.evaluate(LABELLED)


def contrast(one, other):
    """The contrast of two colors `#rrggbb`, as WCAG 2 defines it."""

    def luminance(color):
        parts = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)
