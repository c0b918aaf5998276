"""`forerun serve` as users run it: a process of its own on a socket."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class Served:
    """A running server."""

    process: subprocess.Popen[bytes]
    url: str
    key: str | None = None

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(60)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60)

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The answer of a request that succeeds."""
        return json.loads(self._read(path, json.dumps(body).encode()))

    def metric(self, name: str) -> float:
        """The value of a series, summed over its labels."""
        lines = [line for line in self._read("/metrics").splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def _read(self, path: str, body: bytes | None = None) -> str:
        headers = {} if self.key is None else {"authorization": f"Bearer {self.key}"}
        with urllib.request.urlopen(urllib.request.Request(self.url + path, body, headers), timeout=120) as answer:
            return answer.read().decode()


def forerun(*words: str, cache: Path) -> None:
    """Runs a command to its end."""
    done = subprocess.run([sys.executable, "-m", "forerun", *words], env=_environment(cache), capture_output=True)
    assert done.returncode == 0, (words, done.stderr.decode())


def start(folder: Path, cache: Path, *flags: str, key: str | None = None, port: int = 0) -> Served:
    """Starts a server and waits until it is ready. What it writes goes into `folder`."""
    log = folder / f"server-{time.monotonic_ns()}.log"
    command = [sys.executable, "-m", "forerun", "serve", "embedded", "--port", str(port), *flags]
    own = {} if key is None else {"FORERUN_API_KEY": key}
    with log.open("w") as file:
        process = subprocess.Popen(command, stderr=file, stdout=subprocess.DEVNULL, env={**_environment(cache), **own})
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        found = re.search(r"listening at (http://[\d.:]+)", log.read_text())
        if found and _ready(found[1]):
            return Served(process, found[1], key)
        assert process.poll() is None, log.read_text()
        time.sleep(0.1)
    process.kill()
    raise AssertionError(log.read_text())


def _environment(cache: Path) -> dict[str, str]:
    found = {name: value for name, value in os.environ.items() if name != "FORERUN_API_KEY"}
    return {**found, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "FORERUN_CACHE": str(cache)}


def _ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
            return answer.status == 200
    except (OSError, urllib.error.HTTPError):
        return False
