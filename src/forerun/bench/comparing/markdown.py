"""A comparison as a page of Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from forerun.bench.comparing.report import LEFT
from forerun.bench.comparing.sections import Findings, Section, sections

TITLE = "Drafters beside plain decoding"


def markdown(findings: Findings, command: str) -> str:
    """The whole report; `command` made it."""
    parts = [f"# {TITLE}"]
    for section in sections(findings):
        parts += [f"## {section.title}", *_body(section)]
    parts.append(f"Made by `{command}`, {findings.result.made_with['created']}.")
    return "\n\n".join(parts) + "\n"


def _body(section: Section) -> Iterator[str]:
    if section.lines:
        yield "\n".join(_bullet(line) for line in section.lines)
    if section.head:
        yield "\n".join([_line(section.head), _line([_rule(name) for name in section.head]), *map(_line, section.rows)])


def _bullet(line: str) -> str:
    """One of a list; what is indented belongs to the one before."""
    return f"  - {plain(line.strip())}" if line.startswith(" ") else f"- {plain(line)}"


def _rule(name: str) -> str:
    return "---" if name in LEFT else "---:"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(plain(cell) for cell in cells) + " |"


def plain(text: str) -> str:
    """What would be markup is not, outside of code."""
    parts = text.split("`")
    return "`".join(re.sub(r"([|*<>])", r"\\\1", part) if i % 2 == 0 else part for i, part in enumerate(parts))


__all__ = ["TITLE", "markdown", "plain"]
