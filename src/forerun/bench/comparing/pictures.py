"""Pictures of a comparison as inline SVG: no library draws them, they follow the page's colours, light or dark.

One message each, plain decoding grey, a colour per kind of drafter (as in every other picture) and a dash pattern where
there are two of a kind; axes of ratios begin at 0. What they show stands in the tables too.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from forerun.bench.comparing.choices import Speed, best_of_each
from forerun.bench.comparing.sections import Findings, together
from forerun.bench.plots import COLOURS, PLAIN
from forerun.bench.screen import size

WIDTH = 640
"""Of the drawing, in its own units: it is scaled to the page."""
DASHES = ("none", "6 3", "2 3", "8 3 2 3")
TEXT = 13
BAR, GAP = 20, 6
LEFT, RIGHT, TOP, BOTTOM = 52, 16, 12, 44


def draw(name: str, findings: Findings) -> list[str]:
    """The pictures of a name that `sections` gives: elements of SVG; none where there is nothing to draw."""
    made = {"speed": _speed, "memory": _memory, "acceptance": _acceptance, "confidence": _confidence}[name](findings)
    return [picture for picture in made if picture]


class Style:
    """Colour and dash of every drafter."""

    def __init__(self, findings: Findings):
        kinds = {one.label: one.facts.kind for one in findings.result.contenders}
        seen: dict[str, int] = {}
        self._of: dict[str, tuple[str, str]] = {}
        for label, kind in kinds.items():
            number = seen[kind] = seen.get(kind, -1) + 1
            self._of[label] = COLOURS.get(kind, "currentColor"), DASHES[number % len(DASHES)]

    def colour(self, label: str) -> str:
        return self._of[label][0]

    def line(self, label: str) -> str:
        colour, dash = self._of[label]
        return f'stroke="{colour}" stroke-width="2.5" stroke-dasharray="{dash}" fill="none"'


# ---------------------------------------------------------------------------------------------------------------- speed


def _speed(findings: Findings) -> Iterator[str]:
    """Bars of every drafter's fastest way at each load, with their intervals, and a line at 1."""
    style = Style(findings)
    groups = [(load, best_of_each(findings.speeds, load)) for load in findings.loads]
    most = max([1.0, *(_end(speed) for _, speeds in groups for speed in speeds)])
    left = 12 + 7 * max((len(s.drafter) for _, speeds in groups for s in speeds), default=0)
    left = min(max(left, 80), 220)
    scale = (WIDTH - left - 70) / most
    parts, y = [], 6.0
    for load, speeds in groups:
        y += TEXT + 6
        parts.append(_text(0, y, together(load), weight="600"))
        y += GAP
        for speed in speeds:
            parts += _bar(speed, y, left, scale, style)
            y += BAR + GAP
    one = left + scale
    parts.append(_segment(one, 8, one, y, f'stroke="{PLAIN}" stroke-width="2"'))
    parts.append(_text(one, y + TEXT + 2, "plain decoding", anchor="middle"))
    yield _svg("Speed-up over plain decoding, by load and drafter", y + 2 * TEXT, parts)


def _end(speed: Speed) -> float:
    """Where its whisker ends; one pair has none."""
    return speed.mean if math.isinf(speed.high) else speed.high


def _bar(speed: Speed, y: float, left: float, scale: float, style: Style) -> Iterator[str]:
    label = speed.drafter if len(speed.drafter) < 30 else f"..{speed.drafter[-28:]}"
    middle = y + BAR / 2
    yield _text(left - 8, middle + 4, label, anchor="end")
    yield (
        f'<rect x="{left:.1f}" y="{y:.1f}" width="{speed.mean * scale:.1f}" height="{BAR}" rx="2" '
        f'fill="{style.colour(speed.drafter)}"/>'
    )
    if not math.isinf(speed.high):
        low, high = (left + scale * bound for bound in (speed.low, speed.high))
        ink = 'stroke="currentColor" stroke-width="1.5"'
        yield _segment(low, middle, high, middle, ink)
        yield from (_segment(x, middle - 4, x, middle + 4, ink) for x in (low, high))
    yield _text(left + scale * _end(speed) + 6, middle + 4, f"{speed.mean:.2f}x")


# --------------------------------------------------------------------------------------------------------------- memory


def _memory(findings: Findings) -> Iterator[str]:
    """Speed-up over memory at the smallest load: up and to the left is better."""
    style, load = Style(findings), findings.loads[0]
    speeds = best_of_each(findings.speeds, load)
    most_x, most_y = max(s.memory for s in speeds), max([1.0, *(s.mean for s in speeds)])
    if not most_x:  # nobody takes any
        return
    plot = Plot(260, (0, most_x * 1.25), (0, most_y * 1.15))
    parts = [*plot.axes("memory on top of the target", "speed-up", lambda x: size(x), lambda y: f"{y:.1f}")]
    parts.append(_segment(LEFT, plot.y(1), WIDTH - RIGHT, plot.y(1), f'stroke="{PLAIN}" stroke-width="2"'))
    for speed in speeds:
        x, y = plot.x(speed.memory), plot.y(speed.mean)
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6" fill="{style.colour(speed.drafter)}"/>')
        end = x > WIDTH * 0.7
        parts.append(_text(x + (-10 if end else 10), y + 4, speed.drafter, anchor="end" if end else "start"))
    yield _svg(f"Speed-up and memory, {together(load)}", 260, parts)


# ----------------------------------------------------------------------------------------------------------- acceptance


def _acceptance(findings: Findings) -> Iterator[str]:
    """Conditional acceptance by position, a line for each drafter."""
    style = Style(findings)
    lines: dict[str, list[tuple[float, float]]] = {}
    for contender in findings.result.contenders:
        values = findings.fixed(contender.label).get("acceptance_by_position") or []
        lines[contender.label] = [(float(k), v) for k, v in enumerate(values, start=1) if v is not None]
    most = max((x for points in lines.values() for x, _ in points), default=0.0)
    if not most:
        return
    plot = Plot(280, (0.5, most + 0.5), (0, 1.02))
    ticks = [float(k) for k in range(1, int(most) + 1)]
    title = "accepted, given all before it were"
    parts = [*plot.axes("draft position", title, lambda x: f"{x:.0f}", lambda y: f"{y:.1f}", ticks)]
    for label, points in lines.items():
        parts.append(f'<polyline points="{plot.points(points)}" {style.line(label)}/>')
        parts += [f'<circle cx="{plot.x(x):.1f}" cy="{plot.y(y):.1f}" r="3.5" fill="{style.colour(label)}"/>'
                  for x, y in points]  # fmt: skip
    legend, height = _legend([label for label, points in lines.items() if points], style, 280)
    yield _svg("Acceptance by draft position", height, [*parts, *legend])


# ----------------------------------------------------------------------------------------------------------- confidence


def _confidence(findings: Findings) -> Iterator[str]:
    """A reliability diagram of every drafter that could be judged: predicted against observed survival."""
    style = Style(findings)
    for contender in findings.result.contenders:
        positions: Sequence[Mapping[str, Any]] = findings.result.confidence(contender.label)["positions"]
        if not positions:
            continue
        plot = Plot(280, (0, 1), (0, 1), width=300)
        parts = [*plot.axes("predicted survival", "observed", lambda x: f"{x:.1f}", lambda y: f"{y:.1f}")]
        parts.append(_segment(plot.x(0), plot.y(0), plot.x(1), plot.y(1), f'stroke="{PLAIN}" stroke-width="1.5"'))
        for i, one in enumerate(positions):
            bins = (one.get("calibrated") or one["raw"])["bins"]
            points = [(b["predicted"], b["observed"]) for b in bins]
            faded = f'opacity="{1 - 0.7 * i / len(positions):.2f}"'
            parts.append(f'<polyline points="{plot.points(points)}" {style.line(contender.label)} {faded}/>')
        parts.append(_text(LEFT + 6, TOP + TEXT, contender.label, weight="600"))
        yield _svg(f"Reliability of {contender.label}: first positions darkest", 280, parts, 300)


# ------------------------------------------------------------------------------------------------------------- elements


class Plot:
    """A rectangle with two axes."""

    def __init__(self, height: float, xs: tuple[float, float], ys: tuple[float, float], width: float = WIDTH):
        self._xs, self._ys, self._width, self._height = xs, ys, width, height

    def x(self, value: float) -> float:
        low, high = self._xs
        return LEFT + (value - low) / (high - low) * (self._width - LEFT - RIGHT)

    def y(self, value: float) -> float:
        low, high = self._ys
        return self._height - BOTTOM - (value - low) / (high - low) * (self._height - TOP - BOTTOM)

    def points(self, values: Sequence[tuple[float, float]]) -> str:
        return " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in values)

    def axes(
        self, x_title: str, y_title: str, x_label: Any, y_label: Any, ticks: Sequence[float] | None = None
    ) -> Iterator[str]:
        """Both axes with their titles, ticks and faint lines."""
        bottom, ink = self._height - BOTTOM, 'stroke="currentColor" stroke-opacity="0.2"'
        for value in ticks or _ticks(*self._xs):
            yield _text(self.x(value), bottom + TEXT + 4, x_label(value), anchor="middle")
        for value in _ticks(*self._ys):
            yield _segment(LEFT, self.y(value), self._width - RIGHT, self.y(value), ink)
            yield _text(LEFT - 6, self.y(value) + 4, y_label(value), anchor="end")
        yield _text((LEFT + self._width - RIGHT) / 2, self._height - 6, x_title, anchor="middle")
        middle = (TOP + bottom) / 2
        yield _text(14, middle, y_title, anchor="middle", more=f'transform="rotate(-90 14 {middle:.1f})"')


def _ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from low to high."""
    rough = (high - low) / about
    power = 10 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first = math.ceil(low / step)
    return [round(i * step, 10) for i in range(first, math.floor(high / step) + 1)]


def _legend(labels: Sequence[str], style: Style, y: float) -> tuple[list[str], float]:
    """One entry a line; the height below it."""
    parts = []
    for label in labels:
        parts.append(_segment(LEFT, y + 8, LEFT + 32, y + 8, style.line(label)))
        parts.append(_text(LEFT + 40, y + 12, label))
        y += TEXT + 6
    return parts, y + 4


def _segment(x1: float, y1: float, x2: float, y2: float, ink: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" {ink}/>'


def _text(x: float, y: float, text: str, anchor: str = "start", weight: str = "400", more: str = "") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{TEXT}" font-weight="{weight}" text-anchor="{anchor}" '
        f'fill="currentColor" {more}>{html.escape(text)}</text>'
    )


def _svg(title: str, height: float, parts: Sequence[str], width: float = WIDTH) -> str:
    name = html.escape(title)
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{name}" style="max-width:{width:.0f}px">'
        f"<title>{name}</title>{''.join(parts)}</svg>"
    )


__all__ = ["draw"]
