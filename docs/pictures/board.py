"""Pictures of the board for the documentation: `python docs/pictures/board.py` writes them beside this file.

The script writes six runs with made-up losses, submits two jobs to a separate queue, and takes pictures of
their board in Chromium. It needs the package `headwater[dev]` and the program `chromium`.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "tests" / "board")]

from board_runs import TOKEN, made_up_sweep, serve_board  # noqa: E402

from headwater.appliance.database import Database  # noqa: E402
from headwater.appliance.embedded import Caller, EmbeddedQueue  # noqa: E402
from headwater.appliance.folder import QueueFolder  # noqa: E402
from headwater.appliance.open import prepare  # noqa: E402
from headwater.appliance.queue import new_token  # noqa: E402
from headwater.appliance.types import Priority, Submission  # noqa: E402
from headwater.board.jobs import Jobs  # noqa: E402


def jobs_of_a_queue(folder: Path) -> Jobs:
    """Return the jobs of a queue without a supervisor: two jobs wait."""
    place = QueueFolder(folder / "queue")
    prepare(place, num_csx=2)
    queue = EmbeddedQueue(Database(place), Caller.myself(), lambda: None)
    for name, priority in (("width_256", Priority.P2), ("width_512", Priority.P1)):
        words = ("headwater", "fit", "params.yaml", f"--model_dir=runs/sweep/{name}")
        queue.submit(Submission(words, folder, priority=priority, labels={"sweep": "width"}), new_token())
    return Jobs(lambda: EmbeddedQueue(Database(place), Caller.myself(), lambda: None))


def take(browser: Browser, address: str, path: Path, *, details: bool) -> None:
    """Take a picture of the page.

    Args:
        browser: a Chromium.
        address: address of the page.
        path: the PNG to write.
        details: open the details of a run, and take the picture of these.
    """
    context = browser.new_context(color_scheme="light", viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.goto(f"{address}#token={TOKEN}")
    page.wait_for_selector("canvas.chart[aria-label*='width_']")
    page.wait_for_selector("#job-rows tr")
    if details:
        page.get_by_role("button", name="sweep/width_128").click()
        page.wait_for_selector("#details img")
        page.wait_for_timeout(500)
        page.locator("#details").screenshot(path=path)
    else:
        page.wait_for_timeout(1000)
        page.screenshot(path=path, full_page=True)
    context.close()


def main() -> None:
    """Write all pictures."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        made_up_sweep(folder / "runs", HERE / "profile_timeline.png")
        jobs = jobs_of_a_queue(folder)
        address = serve_board(stack, folder / "runs", jobs)
        play = stack.enter_context(sync_playwright())
        browser = play.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        take(browser, address, HERE / "board.png", details=False)
        take(browser, address, HERE / "board_run.png", details=True)
        browser.close()


if __name__ == "__main__":
    main()
