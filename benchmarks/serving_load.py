"""A standard load tool against `forerun serve`: GuideLLM, unchanged, from a virtual environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving_process import NAME, Served

GUIDELLM = "guidellm==0.8.1"
"""Its command line changes between minor versions."""


@dataclass(frozen=True)
class Load:
    """What is asked for."""

    streams: int
    """Requests at any time."""
    requests: int
    prompt_tokens: int
    output_tokens: int

    def __post_init__(self) -> None:
        for name in ("streams", "requests", "prompt_tokens", "output_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')}: must be at least 1, got {getattr(self, name)}")


def tool(folder: Path) -> Path:
    """GuideLLM's command in a virtual environment, which is made if it is not there.

    Raises:
        ValueError: the folder is somebody's, and nothing is installed there. RuntimeError: it cannot be installed.
    """
    command, done = folder / "bin" / "guidellm", folder / f"{GUIDELLM}.installed"
    if done.exists():
        return command
    if folder.exists() and any(folder.iterdir()) and not (folder / "pyvenv.cfg").exists():
        raise ValueError(f"--venv: {folder} is not empty and no virtual environment; name another folder")
    print(f"installing {GUIDELLM} into {folder}", file=sys.stderr)
    venv.create(folder, with_pip=True)
    try:
        subprocess.run([str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", GUIDELLM], check=True)
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"pip could not install {GUIDELLM} into {folder}") from error
    done.touch()
    return command


def command_line(tool: Path | str, url: str, tokenizer: Path | str, load: Load, body: Mapping[str, Any]) -> list[str]:
    """One run of GuideLLM: so many streams, synthetic prompts of a length, raw completions (a base model has no chats).

    `body` is added to every request. Outputs have exactly the length asked for: the tool sends ignore_eos.
    """
    backend = {
        "kind": "openai_http", "target": url, "model": NAME, "request_format": "/v1/completions",
        "extras": {"body": {"temperature": 0, **body}},
    }  # fmt: skip
    data = f"kind=synthetic_text,prompt_tokens={load.prompt_tokens},output_tokens={load.output_tokens}"
    return [
        str(tool), "run", "--backend", json.dumps(backend), "--data", data,
        "--profile", f"kind=concurrent,streams={load.streams}",
        "--constraint", f"kind=max_requests,count={load.requests}",
        "--tokenizer", f"kind=huggingface_auto,model={tokenizer}",
        "--metrics", "kind=generative,sample_size=0",
        "--disable-console-interactive",
    ]  # fmt: skip


def measure(
    tool: Path, served: Served, tokenizer: Path, load: Load, body: Mapping[str, Any], report: Path
) -> dict[str, Any]:
    """Runs the tool once and returns the numbers of its report, with what the server counted meanwhile.

    Raises:
        RuntimeError: the tool failed.
    """
    command = command_line(tool, served.url, tokenizer, load, body)
    before = served.counted()
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    done = subprocess.run(
        [*command, "--output", f"kind=json,path={report}"],
        env={**os.environ, **offline}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(f"guidellm failed with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    counted = {name: value - before[name] for name, value in served.counted().items()}
    return numbers(json.loads(report.read_text(encoding="utf-8"))) | {"counted": counted}


DISTRIBUTIONS = (
    "request_latency", "time_to_first_token_ms", "time_per_output_token_ms", "inter_token_latency_ms",
    "output_tokens_per_second", "requests_per_second", "output_token_count", "prompt_token_count",
)  # fmt: skip


def numbers(report: Mapping[str, Any]) -> dict[str, Any]:
    """What the page needs of GuideLLM's report of one run.

    Raises:
        ValueError: it is not a report of one benchmark.
    """
    benchmarks: Sequence[Mapping[str, Any]] = report.get("benchmarks", [])
    if len(benchmarks) != 1:
        raise ValueError(f"a report of one benchmark was expected, got {len(benchmarks)}")
    metrics = benchmarks[0]["metrics"]
    found: dict[str, Any] = {"requests": metrics["request_totals"], "version": report["metadata"]["guidellm_version"]}
    for name in DISTRIBUTIONS:
        good = metrics[name]["successful"] or {}
        kept = {part: good.get(part) for part in ("mean", "median", "total_sum")}
        found[name] = kept | {"p95": (good.get("percentiles") or {}).get("p95")}
    return found
