"""Reports on a terminal and in a file: how wide, how numbers look, what the words mean."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 170
"""Columns of a table where there is no terminal to fit."""


def fitted(console: Console, width: int = WIDTH) -> Console:
    """Wide enough for tables where there is no terminal to fit."""
    if not console.is_terminal:
        console.width = width
    return console


def text_of(show: Callable[[Console], None], width: int = WIDTH) -> str:
    """What would be shown, for a file."""
    from rich.console import Console

    out = io.StringIO()
    show(Console(file=out, width=width, highlight=False, soft_wrap=True))
    return out.getvalue()


def explain(console: Console, definitions: Mapping[str, str]) -> None:
    """What the words of a table mean, a line each."""
    for name, meaning in definitions.items():
        console.print(f"{name}: {meaning}", style="dim", markup=False)


def number(value: float | None, digits: int = 2) -> str:
    """A dash where there is nothing to tell."""
    return "-" if value is None else f"{value:.{digits}f}"


def size(count: float) -> str:
    """Bytes in decimal units, as disks have them, three digits."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 999.5 or unit == "TB":  # 999.5 is 1000 in three digits
            break
        count /= 1000
    return f"{count:.3g} {unit}" if count < 999.5 else f"{count:,.0f} {unit}"


__all__ = ["WIDTH", "explain", "fitted", "number", "size", "text_of"]
