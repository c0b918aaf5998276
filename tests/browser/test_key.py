"""A server with a key: the page asks for it, keeps it for the tab, and says when it is wrong."""

from __future__ import annotations

from browser.conftest import screenshot, until_ready


def test_the_page_asks_for_the_key(visit, measured):
    """The page itself needs none; until there is one nothing is asked of the server that would be refused."""
    watched = visit(measured)
    page = watched.page
    page.wait_for_selector("#key-dialog[open]")
    screenshot(page, "key")
    assert page.evaluate("document.activeElement.id") == "key"
    asked = [url.removeprefix(measured.url) for url in watched.requests]
    assert all(path == "/" or path.startswith("/static/") for path in asked), asked
    page.keyboard.type(measured.key)
    page.keyboard.press("Enter")
    until_ready(page)
    assert page.locator("#key-dialog").is_hidden()
    assert page.locator("#about").inner_text().count("small") == 1


def test_the_key_lives_as_long_as_the_tab(visit, measured):
    """In sessionStorage and nowhere else: a reload knows it, another tab does not."""
    page = visit(measured).page
    page.fill("#key", measured.key)
    page.keyboard.press("Enter")
    until_ready(page)
    page.reload()
    until_ready(page)
    assert measured.key not in page.evaluate("JSON.stringify(localStorage) + document.cookie")
    assert page.evaluate("sessionStorage.getItem('forerun-key')") == measured.key
    other = visit(measured).page
    other.wait_for_selector("#key-dialog[open]")


def test_a_wrong_key_is_refused_and_asked_for_again(visit, measured):
    """With a word; afterwards the right one opens."""
    watched = visit(measured)
    page, watched.expected = watched.page, ("401",)
    page.fill("#key", "wrong")
    page.click("#key-form button.primary")
    page.wait_for_selector("#key-error >> text=did not accept")
    assert page.locator("#status").get_attribute("data-state") == "locked"
    page.keyboard.press("Escape")
    page.click("#key-open")
    page.fill("#key", measured.key)
    page.click("#key-form button.primary")
    until_ready(page)


def test_a_key_that_cannot_be_sent_is_no_silent_server(visit, measured):
    """Letters that no header carries: the browser would send nothing, which looks like a server that is gone."""
    page = visit(measured).page
    page.fill("#key", "ключ")
    page.click("#key-form button.primary")
    page.wait_for_selector("#key-error >> text=ASCII")
    assert page.locator("#key-dialog").is_visible()
    page.fill("#key", measured.key)
    page.keyboard.press("Enter")
    until_ready(page)
