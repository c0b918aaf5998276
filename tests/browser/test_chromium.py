"""Which browser is used, and what is said where there is none."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from browser.chromium import NoBrowser, _candidates, launch


def test_a_browser_that_cannot_be_started_is_no_browser(playwright, monkeypatch, tmp_path):
    """CHROMIUM names this one and no other: nothing else is tried in its place, and what helps is said."""
    monkeypatch.setenv("CHROMIUM", str(tmp_path / "nothing"))
    with pytest.raises(NoBrowser, match="apt-get install chromium") as found:
        launch(playwright)
    assert "CHROMIUM: " in str(found.value)


def test_one_on_the_path_comes_before_a_download(monkeypatch, tmp_path):
    """Downloaded is only what nothing before it could stand in for, and only if it is not there yet."""
    fake, own = tmp_path / "bin" / "chromium", tmp_path / "own"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\n")
    fake.chmod(0o755)
    downloads = []
    monkeypatch.delenv("CHROMIUM", raising=False)
    monkeypatch.setenv("PATH", str(fake.parent))
    monkeypatch.setattr("browser.chromium.subprocess.run", lambda words, **_: downloads.append(words))
    found = _candidates(SimpleNamespace(chromium=SimpleNamespace(executable_path=str(own))))
    assert next(found) == (str(fake), str(fake))
    assert downloads == []
    assert next(found) == ("playwright install chromium", str(own))
    assert [words[1:] for words in downloads] == [["-m", "playwright", "install", "chromium"]]
    own.write_text("")
    assert len(list(_candidates(SimpleNamespace(chromium=SimpleNamespace(executable_path=str(own)))))) == 2
    assert len(downloads) == 1
