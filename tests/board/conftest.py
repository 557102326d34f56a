"""A board that is served in this process, and pages of a real Chromium that show it."""

import contextlib
import shutil

import pytest
from board_runs import TOKEN, serve_board


@pytest.fixture
def serve(tmp_path):
    """Serves the board of a folder, with jobs if they are given; returns its address with the token."""
    pytest.importorskip("uvicorn")
    with contextlib.ExitStack() as stack:

        def start(folder=tmp_path, jobs=None):
            return f"{serve_board(stack, folder, jobs)}#token={TOKEN}"

        yield start


@pytest.fixture(scope="module")
def chromium():
    """A real browser: the one of the system, since playwright would download another one."""
    sync_api = pytest.importorskip("playwright.sync_api")
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("no chromium: apt-get install chromium")
    with sync_api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium):
    """Opens an address in a new browser session; errors of scripts and blocked requests fail the test."""
    problems, contexts = [], []

    def start(address, **options):
        context = chromium.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: message.type == "error" and problems.append(message.text))
        page.set_default_timeout(100_000)
        page.goto(address)
        return page

    start.problems = problems
    yield start
    for context in contexts:
        context.close()
    assert problems == []
