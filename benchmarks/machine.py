"""What a result depends on beside the code: processor, memory, versions."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def describe_machine() -> dict[str, Any]:
    """Processor, memory and versions; nothing that names the machine."""
    import psutil

    return {
        "processor": _processor(),
        "cores": psutil.cpu_count(logical=False) or psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "system": platform.system(),
        "python": platform.python_version(),
    } | {name: _version(name) for name in ("forerun", "torch", "transformers", "scikit-learn")}


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor() or platform.machine()
    fields: dict[str, str] = {}
    for line in info.read_text().splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    numbers = ", ".join(f"{name} {fields[name]}" for name in ("cpu family", "model") if name in fields)
    return f"{fields.get('model name', platform.machine())} ({numbers})" if numbers else platform.machine()


def _version(name: str) -> str | None:
    """None where it is not installed: with scikit-learn, transformers adapts its confidence threshold."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
