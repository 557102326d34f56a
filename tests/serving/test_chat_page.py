"""The chat page in a real browser, without a connection to other hosts."""

import pytest
from playwright.sync_api import expect, sync_playwright
from serving_samples import ServerProcess, post

CHROMIUM = "/usr/bin/chromium"
TOKEN = "0123456789abcdef0123456789abcdef"
PATIENCE_MS = 100_000
"""How long a slow machine may take for one step of a page."""


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        expect.set_options(timeout=PATIENCE_MS)
        yield found
        found.close()


@pytest.fixture
def page(browser):
    """A page that fails the test if a script fails."""
    errors, addresses = [], []
    with browser.new_page() as found:
        found.set_default_timeout(PATIENCE_MS)
        found.on("pageerror", lambda error: errors.append(error))
        found.on("request", lambda request: addresses.append(request.url))
        yield found
    assert errors == []
    assert all(address.startswith("http://127.0.0.1:") for address in addresses)


def ask(page, text, tokens):
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Most tokens").fill(str(tokens))
    page.get_by_label("Message").fill(text)
    page.get_by_label("Message").press("Enter")


def answer_of(url, model, messages, tokens):
    body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": tokens}
    answer = post(f"{url}/v1/chat/completions", json=body).json()
    return answer["choices"][0]["message"]["content"]


def test_a_conversation(server, page):
    page.goto(server.url)
    expect(page.get_by_label("Model").locator("option")).to_have_text(["small", "long"])
    page.get_by_label("Model").select_option("long")
    messages = [{"role": "user", "content": "Who runs?"}]
    first = answer_of(server.url, "long", messages, 12)
    ask(page, "Who runs?", 12)
    log = page.get_by_role("log").get_by_role("listitem")
    expect(log.nth(1).locator("span")).to_have_text(first)
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "And <b>now</b>?"}]
    ask(page, "And <b>now</b>?", 12)
    expect(log).to_have_count(4)
    expect(log.nth(2)).to_have_text("YouAnd <b>now</b>?")
    expect(log.nth(3).locator("span")).to_have_text(answer_of(server.url, "long", messages, 12))
    page.get_by_role("button", name="New chat").click()
    expect(log).to_have_count(0)


def test_the_default_of_most_tokens_leaves_room_for_messages(server, page):
    page.goto(server.url)
    tokens = page.get_by_label("Most tokens")
    expect(tokens).to_have_value("48")  # the model `small` has 96 positions
    page.get_by_label("Message").fill("Who runs?")
    page.get_by_label("Message").press("Enter")
    log = page.get_by_role("log").get_by_role("listitem")
    expect(log).to_have_count(2)
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    expect(page.locator("#problem")).to_have_text("")
    page.get_by_label("Model").select_option("long")
    expect(tokens).to_have_value("256")


def test_an_answer_can_be_stopped(server, page):
    page.goto(server.url)
    page.get_by_label("Model").select_option("long")
    ask(page, "Who runs?", 30_000)
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    expect(page.get_by_label("Message")).to_be_focused()


def test_a_new_chat_during_an_answer_begins_without_it(server, page):
    page.goto(server.url)
    page.get_by_label("Model").select_option("long")
    ask(page, "Who runs?", 30_000)
    log = page.get_by_role("log").get_by_role("listitem")
    expect(log.nth(1).locator("span")).not_to_be_empty()
    page.get_by_role("button", name="New chat").click()
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "Who walks?", 5)
    assert sent.value.post_data_json["messages"] == [{"role": "user", "content": "Who walks?"}]
    expect(log).to_have_count(2)


def test_errors_are_shown_and_the_message_is_kept(server, page):
    page.goto(server.url)
    ask(page, "mill " * 300, 5)
    expect(page.get_by_role("alert")).to_contain_text("shorten the prompt")
    expect(page.get_by_label("Message")).to_have_value("mill " * 300)
    expect(page.get_by_role("log").get_by_role("listitem")).to_have_count(0)


def test_a_server_with_a_token_asks_for_it(folders, page):
    with ServerProcess(folders["small"], token=TOKEN) as server:
        page.goto(server.url)
        expect(page.get_by_role("alert")).to_contain_text("the token is missing or wrong")
        page.get_by_role("textbox", name="Token").fill(TOKEN)
        page.get_by_role("textbox", name="Token").press("Tab")
        expect(page.get_by_label("Model").locator("option")).to_have_text(["small"])
        expect(page.locator("#problem")).to_be_empty()  # hidden, so it has no role
        ask(page, "Who runs?", 5)
        expect(page.get_by_role("log").get_by_role("listitem")).to_have_count(2)


def test_every_field_has_a_name_and_the_keyboard_reaches_it(server, page):
    page.goto(server.url)
    fields = page.locator("input:visible, select, textarea, button:visible")
    for place in range(fields.count()):
        name = fields.nth(place).evaluate("e => e.labels?.[0]?.textContent || e.textContent")
        assert name.strip()
    page.get_by_label("Model").focus()
    visited = []
    for _ in range(6):
        visited.append(page.evaluate("document.activeElement.id"))
        page.keyboard.press("Tab")
    assert visited == ["model", "temperature", "tokens", "clear", "log", "text"]
    assert page.evaluate("document.documentElement.lang") == "en"
