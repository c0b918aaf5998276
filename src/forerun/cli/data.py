"""`forerun data`: the commands around training data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from forerun.cli.prepare import prepare
from forerun.cli.regenerate import regenerate

data: dict[str, Callable[..., Any]] = {"prepare": prepare, "regenerate": regenerate}
