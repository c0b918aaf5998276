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


def test_every_series_of_the_charts_is_there(visit, served):
    """A series under another name would leave its chart empty, and nobody would know."""
    page = until_ready(visit(served, "#live").page)
    served.post("/v1/completions", {"prompt": "def area(shape):", "max_tokens": 32, "temperature": 0})
    missing = page.evaluate(
        """async () => { const m = await import('/static/prometheus.js');
        const found = m.snapshot(m.parse(await (await fetch('metrics')).text()));
        return Object.keys(found).filter((name) => found[name] === null); }"""
    )
    assert set(missing) <= {"gain"}  # where costs are not known there is none


def test_what_is_empty_says_so(visit, served):
    """Nothing is drafted while nothing is asked: the chart says that, rather than being blank."""
    page = until_ready(visit(served, "#live").page)
    until(page, "document.querySelector('#chart-length').textContent.includes('nothing in this time')")
    assert "nothing" not in page.locator("#chart-queue").text_content()


def test_an_alarm_is_said_once(visit, served):
    """It is put in when it begins, not with every reading: each time it would be read aloud."""
    page = visit(served, "#live").page

    def drifting(route):
        answer = route.fetch()
        series = 'forerun:spec_decode_drift_alarm{engine="0",drafter="small"} 1.0\n'
        route.fulfill(response=answer, body=answer.text() + series)

    page.route("**/metrics", drifting)
    page.wait_for_selector("#drift:visible")
    assert "small" in page.locator("#drift").inner_text()
    page.evaluate(
        """async () => { window.said = 0;
        new MutationObserver(() => { said += 1; }).observe(document.getElementById('drift'), { childList: true });
        const live = await import('/static/live.js'); for (let i = 0; i < 3; i++) live.draw(); }"""
    )
    assert page.evaluate("said") == 0
