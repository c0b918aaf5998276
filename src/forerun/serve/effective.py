"""What a server was told, defaults included, and what its drafters' confidences are corrected by, for /server_info."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any
from urllib.parse import urlsplit

from forerun.budget.calibration import Calibration
from forerun.serve.server import Server
from forerun.target.base import BLOCK_SIZE

ALWAYS = {
    "block_size": BLOCK_SIZE,
    "enable_auto_tool_choice": True,
    "enable_chunked_prefill": True,
    "enforce_eager": True,
    "quantization": None,
}
"""Flags of `forerun serve` that can only ask for what is so."""


def effective(server: Server) -> dict[str, Any]:
    """`options` of the server and of the engine by name, and `calibration` in a line for each table."""
    options, engine = server.service.options, server.service.engine.engine
    host, port = server.address or (None, None)
    told = ALWAYS | asdict(options) | asdict(engine.options) | {"host": host, "port": port}
    told["api_key"] = f"{len(options.api_key)} set" if options.api_key else None  # the keys themselves stay inside
    told["otlp_traces_endpoint"] = _without_login(options.otlp_traces_endpoint)
    told["chat_template"] = options.chat_template is not None
    scheduler = engine.core.schedule.scheduler
    return {
        "options": {name: _plain(value) for name, value in sorted(told.items())},
        "policy": scheduler.options.policy,
        "calibration": [line for name, one in sorted(scheduler.calibrations.items()) for line in _lines(name, one)],
    }


def _without_login(url: str | None) -> str | None:
    """An address may carry a name and a password, or a token behind `?` or `#`: scheme, host and path are told, or only
    that there is one where it cannot be parted so."""
    if url is None:
        return None
    try:
        parts = urlsplit(url)
        _ = parts.port  # ValueError: what stands there is part of a password
    except ValueError:
        return "set"
    told = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    return "set" if "@" in told else told


def _lines(drafter: str, calibration: Calibration) -> list[dict[str, Any]]:
    """Under which conditions a table holds, what it was fitted on, and its errors by position before and after."""
    tables = [table for key in calibration.keys if (table := calibration.table(key)) is not None]
    return [
        {
            "drafter": drafter,
            **asdict(table.key),
            "rounds": table.num_samples,
            "dataset": table.dataset,
            "ece_before": list(table.ece_before),
            "ece_after": list(table.ece_after),
        }
        for table in tables
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (tuple, list)):
        return list(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


__all__ = ["effective"]
