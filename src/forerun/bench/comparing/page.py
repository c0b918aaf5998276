"""A comparison as one file of HTML that needs nothing beside it: no script, no font, no picture from elsewhere."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence

from forerun.bench.comparing.markdown import TITLE
from forerun.bench.comparing.pictures import draw
from forerun.bench.comparing.report import LEFT
from forerun.bench.comparing.sections import Findings, Section, sections

STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1a1c1f;--dim:#5a6068;--line:#d9dde2;--bad:#b3261e;--good:#1b6e3c}
@media (prefers-color-scheme:dark){:root{--paper:#14171a;--ink:#e6e8eb;--dim:#9aa3ad;--line:#343a41;--bad:#ff8a80;
--good:#7ddb9f}}
body{font:16px/1.55 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:62rem;margin:2rem auto;
padding:0 1rem}
h1{line-height:1.2}h2{margin-top:2.5rem;border-bottom:1px solid var(--line);padding-bottom:.25rem}
ul{padding-left:1.2rem}li.inner{list-style:none;color:var(--dim)}.bad{color:var(--bad);font-weight:600}
.good{color:var(--good);font-weight:600}code{overflow-wrap:anywhere}footer{color:var(--dim);margin:3rem 0}
figure{margin:1.5rem 0;display:flex;flex-wrap:wrap;gap:1rem}svg{width:100%;height:auto;font-family:inherit}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{padding:.3rem .6rem;text-align:right;border-bottom:1px solid var(--line);vertical-align:bottom}
td{white-space:nowrap}th.word,td.word{text-align:left}thead th{color:var(--dim);font-weight:600}
@media (max-width:40rem){table,tbody,tr,td{display:block}thead{display:none}tr{border:1px solid var(--line);
border-radius:.4rem;margin:.75rem 0;padding:.4rem .6rem}td,td.word{white-space:normal;border:0;padding:.1rem 0;
text-align:right;display:flex;justify-content:space-between;gap:1rem}td::before{content:attr(data-name);color:var(--dim)}
td:empty{display:none}}
""".strip()


def page(findings: Findings, command: str) -> str:
    """The whole report; `command` made it."""
    return "\n".join([*_head(), *_body(findings), *_foot(findings, command)]) + "\n"


def _head() -> Iterator[str]:
    yield '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{TITLE}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{TITLE}</h1>"


def _body(findings: Findings) -> Iterator[str]:
    for section in sections(findings):
        yield f"<section>\n<h2>{html.escape(section.title)}</h2>"
        if section.lines:
            yield "<ul>"
            yield from (_item(line) for line in section.lines)
            yield "</ul>"
        for name in section.pictures:
            yield f"<figure>{''.join(draw(name, findings))}</figure>"
        if section.head:
            yield from _table(section)
        yield "</section>"


def _item(line: str) -> str:
    """What is indented belongs to the line before."""
    if line.startswith(" "):
        return f'<li class="inner">{marked(line.strip())}</li>'
    kind = "bad" if line.startswith(("NOT LOSSLESS", "DIFFERS")) else "good" if line.startswith("LOSSLESS") else ""
    return f'<li class="{kind}">{marked(line)}</li>' if kind else f"<li>{marked(line)}</li>"


def marked(text: str) -> str:
    """Text with `code` as such, everything else literal."""
    parts = text.split("`")
    return "".join(f"<code>{html.escape(p)}</code>" if i % 2 else html.escape(p) for i, p in enumerate(parts))


def _table(section: Section) -> Iterator[str]:
    """Rows become cards where the screen is narrow: every cell then says what it is."""
    yield '<div class="wide"><table><thead><tr>'
    yield "".join(f"<th{_word(name)}>{html.escape(name)}</th>" for name in section.head)
    yield "</tr></thead><tbody>"
    yield from (f"<tr>{_cells(section.head, row)}</tr>" for row in section.rows)
    yield "</tbody></table></div>"


def _cells(head: Sequence[str], row: Sequence[str]) -> str:
    pairs = zip(head, row, strict=True)
    return "".join(f'<td{_word(name)} data-name="{html.escape(name)}">{html.escape(cell)}</td>' for name, cell in pairs)


def _word(name: str) -> str:
    return ' class="word"' if name in LEFT else ""


def _foot(findings: Findings, command: str) -> Iterator[str]:
    made = html.escape(findings.result.made_with["created"])
    yield f"<footer>Made by <code>{html.escape(command)}</code>, {made}.</footer>\n</body>\n</html>"


__all__ = ["marked", "page"]
