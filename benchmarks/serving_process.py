"""`forerun serve` as a process of its own, for as long as something is measured on it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

NAME = "bench"
"""The model's name, whatever is served."""
VERIFIED = "spec_decode_verified_tokens_total"
"""Draft tokens that the target was asked about."""
PATIENCE = 900.0
"""Seconds that loading may take."""


@dataclass(frozen=True)
class Served:
    """A server that is ready."""

    url: str
    process: psutil.Process

    def counted(self) -> dict[str, float]:
        """Its own counters: what a load tool must agree with."""
        names = ("generation_tokens_total", "request_success_total", "requests_refused_total", VERIFIED)
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            page = answer.read().decode()
        found = dict.fromkeys(names, 0.0)
        for line in page.splitlines():
            name = line.partition("{")[0].removeprefix("forerun:")
            if line.startswith("forerun:") and name in found:
                found[name] += float(line.rpartition(" ")[2])
        return found

    def info(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/server_info", timeout=30) as answer:
            return json.load(answer)

    def cpu_seconds(self) -> float:
        times = self.process.cpu_times()
        return times.user + times.system


@contextmanager
def served(target: str, flags: Sequence[str], log: Path) -> Iterator[Served]:
    """Serves a target with these flags of `forerun serve` at a port of its own.

    Raises:
        RuntimeError: it ended before it was ready; with what it said.
    """
    command = [sys.executable, "-m", "forerun", "serve", target, "--port", "0", "--served-model-name", NAME, *flags]
    open_to_all = {name: value for name, value in os.environ.items() if name != "FORERUN_API_KEY"}
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=file, env=open_to_all)
    try:
        yield Served(_ready(process, log), psutil.Process(process.pid))
    finally:
        process.terminate()
        process.wait(120)


def _ready(process: subprocess.Popen[bytes], log: Path) -> str:
    """Its address, once it can be used."""
    until = time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < until:
        found = re.search(r"listening at (http://[\d.]+:\d+)", log.read_text(encoding="utf-8"))
        if found is not None and _answers(f"{found[1]}/health"):
            return found[1]
        time.sleep(0.2)
    raise RuntimeError(f"the server is not ready: {log.read_text(encoding='utf-8')[-2000:]}")


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False
