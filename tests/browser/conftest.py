"""A real server, a real browser, and pages that are watched while a test drives them.

These tests need a browser, so they are collected only where they are asked for: `make test-browser` does. Where they
are asked for and there is no browser they fail.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from browser.served import Served, forerun, start

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Playwright, Route

ASKED = "FORERUN_BROWSER_TESTS"
SCREENSHOTS = Path(os.environ.get("FORERUN_SCREENSHOTS", "build/screenshots"))
KEY = "open-sesame"
CHAT = """{% for m in messages %}# {{ m['role'] }}: {{ m['content'] }}
{% endfor %}{% if add_generation_prompt %}def {% endif %}"""
WAIT = 30_000
"""Milliseconds that anything may take on a busy machine."""

if not os.environ.get(ASKED):
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def playwright() -> Iterator[Playwright]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as running:
        yield running


@pytest.fixture(scope="session")
def browser(playwright: Playwright) -> Iterator[Browser]:
    """The end of the whole run where there is none: no test may pass for want of a browser."""
    from browser.chromium import NoBrowser, launch

    try:
        running = launch(playwright)
    except NoBrowser as error:
        pytest.exit(str(error), returncode=1)
    yield running
    running.close()


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """What a newcomer starts: the embedded model, open, nothing measured. In float32, where decoding ahead and plainly
    give the same ids."""
    folder = tmp_path_factory.mktemp("served")
    flags = ("--drafter", "ngram,small", "--num-speculative-tokens", "4", "--dtype", "float32")
    memory = ("--kv-cache-memory-bytes", str(64 * 2**20))  # little, so that what is in use can be seen
    running = start(folder, folder / "cache", *flags, *memory)
    yield running
    running.stop()


@pytest.fixture(scope="session")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """With a key, a chat template, and everything that can be measured before, by the commands the page names."""
    folder = tmp_path_factory.mktemp("measured")
    cache, template = folder / "cache", folder / "chat.jinja"
    template.write_text(CHAT)
    drafter = ("--drafter", "small")
    forerun("profile", "embedded", *drafter, "--seconds", "4", "--rows", "24", "--requests", "4", cache=cache)
    forerun("calibrate", "embedded", *drafter, "--temperature", "0", "--max-tokens", "64", cache=cache)
    load = ("--concurrency", "1,2", "--fixed", "2", "--pairs", "1", "--requests", "2", "--max-tokens", "16")
    forerun("bench", "load", "--target", "embedded", *drafter, *load, "--bar", "0.01", cache=cache)
    running = start(folder, cache, *drafter, "--chat-template", str(template), key=KEY)
    yield running
    running.stop()


@dataclass
class Watched:
    """A page, and what it did that it should not."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    expected: tuple[str, ...] = ()
    """Parts of complaints that the test provokes."""

    def settle(self) -> None:
        """Asserts that the browser complained about nothing that was not provoked."""
        left = [one for one in self.complaints if not any(part in one for part in self.expected)]
        assert not left, left


Open = Callable[..., Watched]


@pytest.fixture
def visit(browser: Browser) -> Iterator[Open]:
    """Opens the page of a server. Afterwards: no error in the console, no request to anybody else."""
    opened: list[tuple[Watched, Any, str]] = []

    def visit(server: Served, view: str = "", **options: Any) -> Watched:
        options.setdefault("viewport", {"width": 1280, "height": 900})
        context = browser.new_context(**options)
        context.set_default_timeout(WAIT)
        watched = Watched(context.new_page())
        watch(watched)
        opened.append((watched, context, server.url))
        watched.page.goto(f"{server.url}/{view}")
        return watched

    yield visit
    for watched, context, url in opened:
        watched.settle()
        elsewhere = [one for one in watched.requests if not one.startswith((f"{url}/", "data:"))]
        assert not elsewhere, elsewhere
        context.close()


def watch(watched: Watched) -> None:
    page = watched.page
    page.on("console", lambda said: said.type in ("error", "warning") and watched.complaints.append(said.text))
    page.on("pageerror", lambda error: watched.complaints.append(f"uncaught: {error}"))
    page.on("request", lambda request: watched.requests.append(request.url))


def until_ready(page: Page) -> Page:
    page.wait_for_selector('#status[data-state="ready"]')
    return page


def until(page: Page, expression: str) -> None:
    """Waits until it is true. Not playwright's own wait, which needs `eval`: the page forbids that."""
    for _ in range(WAIT // 100):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(100)
    raise AssertionError(f"never true: {expression}")


def answer_with(route: Route, tokens: Sequence[Mapping[str, Any]], text: str = "", **more: Any) -> None:
    """In place of the server: one event with these tokens."""
    provenance = {"verified": 1, "accepted": 0, "tokens": list(tokens)}
    choice = {"index": 0, "text": text, "finish_reason": "stop", "provenance": provenance, **more}
    body = f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n"
    route.fulfill(status=200, body=body, content_type="text/event-stream")


def screenshot(page: Page, name: str) -> None:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=True)
