"""What a server was told, defaults included, and what its drafters' confidences are corrected by, for /server_info."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from forerun.budget.calibration import Calibration
from forerun.serve.service import Service


def effective(service: Service) -> dict[str, Any]:
    """`options` of the server and of the engine by name, and `calibration` in a line for each table."""
    options, engine = service.options, service.engine.engine
    told = asdict(options) | asdict(engine.options)
    told["api_key"] = f"{len(options.api_key)} set" if options.api_key else None  # the keys themselves stay inside
    told["chat_template"] = options.chat_template is not None
    scheduler = engine.core.schedule.scheduler
    return {
        "options": {name: _plain(value) for name, value in sorted(told.items())},
        "policy": scheduler.options.policy,
        "calibration": [line for name, one in sorted(scheduler.calibrations.items()) for line in _lines(name, one)],
    }


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
