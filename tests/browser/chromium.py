"""A Chromium to test in: the one that is named, one that is installed, or playwright's own, downloaded if need be."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import Browser, Playwright
from playwright.sync_api import Error as PlaywrightError

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome", "chrome", "microsoft-edge")
HELP = """
No Chromium can be started, so the page cannot be tested. Any of these helps:
  - install one:       apt-get install chromium   (or your system's way)
  - name one:          CHROMIUM=/path/to/chromium make test-browser
  - download one:      .venv/bin/python -m playwright install --with-deps chromium
What was tried:
"""


class NoBrowser(Exception):
    """Nothing could be started; the message says what was tried and what to do."""


def launch(playwright: Playwright) -> Browser:
    """A headless browser. NoBrowser: there is none."""
    # Chromium's own sandbox does not work for root, as which containers run.
    args = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    tried = []
    for where, path in _candidates(playwright):
        try:
            return playwright.chromium.launch(executable_path=path, args=args)
        except PlaywrightError as error:
            tried.append(f"  {where}: {str(error).splitlines()[0]}")
            if where == "CHROMIUM":
                break  # somebody wants this one and no other
    raise NoBrowser(HELP + "\n".join(tried))


def _candidates(playwright: Playwright) -> Iterator[tuple[str, str]]:
    """(where it comes from, path); what is downloaded comes last, and only if nothing before it could be started."""
    named = os.environ.get("CHROMIUM")
    if named:
        yield "CHROMIUM", named
        return
    for name in NAMES:
        path = shutil.which(name)
        if path is not None:
            yield path, path
    own = playwright.chromium.executable_path
    if not Path(own).exists():
        subprocess.run([sys.executable, "-m", "playwright", "install", "chromium"], check=False, timeout=600)
    yield "playwright install chromium", own
