"""Charts of what the server does, and the page when the server goes away and comes back."""

from __future__ import annotations

import threading

from browser.conftest import screenshot, until, until_ready
from browser.served import start


def test_the_charts_move(visit, served):
    """While answers are computed every chart shows them: speed, accepted length, positions, budget, queue, memory."""
    page = until_ready(visit(served, "#live").page)
    page.wait_for_selector("#chart-speed svg")
    before = page.locator("#chart-speed .line").get_attribute("d")
    bodies = [{"prompt": f"class Queue{i}:\n", "max_tokens": 400, "temperature": 0} for i in range(3)]
    asking = [threading.Thread(target=served.post, args=("/v1/completions", body)) for body in bodies]
    for one in asking:
        one.start()
    until(page, "parseFloat(document.querySelector('#now-speed').textContent) > 0")
    until(page, "parseFloat(document.querySelector('#now-length').textContent) >= 1")
    until(page, "parseFloat(document.querySelector('#now-budget').textContent) > 0")
    until(page, "parseFloat(document.querySelector('#now-kv').textContent) > 0")
    until(page, "/[123] running/.test(document.querySelector('#now-queue').textContent)")
    page.wait_for_selector("#chart-positions .bar")
    for one in asking:
        one.join()
    page.wait_for_timeout(2500)
    assert page.locator("#chart-speed .line").get_attribute("d") != before
    assert 1 <= page.locator("#chart-positions .bar").count() <= 4
    page.locator("#table-positions summary").click()
    assert page.locator("#table-positions tbody tr").count() == page.locator("#chart-positions .bar").count()
    screenshot(page, "live-light")


def test_a_server_that_goes_away_is_found_again(visit, tmp_path):
    """The page says so, tries again by itself, and goes on when another server answers at the same address."""
    first = start(tmp_path, tmp_path / "cache", "--drafter", "ngram")
    watched = visit(first)
    page, watched.expected = until_ready(watched.page), ("net::ERR_", "503")
    page.fill("#max-tokens", "1800")
    page.click("#generate")
    page.wait_for_selector("#answers .token")
    first.kill()
    page.wait_for_selector("#notice:visible")
    assert "reconnect" in page.locator("#notice-text").inner_text()
    assert page.locator("#status").get_attribute("data-state") == "lost"
    page.wait_for_selector("#answers .answer .error")
    screenshot(page, "server-gone")
    second = start(tmp_path, tmp_path / "cache", "--drafter", "ngram", port=first.port)
    try:
        until_ready(page)
        page.wait_for_selector("#notice", state="hidden")
        page.fill("#max-tokens", "8")
        page.click("#generate")
        page.wait_for_selector("#answers .answer:first-child .badge.done")
    finally:
        page.goto("about:blank")
        second.stop()
