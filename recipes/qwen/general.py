"""General prompts from templates: explanations, writing, arithmetic in words, extraction, role play, reasoning."""

import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ARITHMETIC_SHARE = 5
"""Of arithmetic beside the shares of the other kinds, which stand in the file."""


@cache
def _templates() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "templates.yaml").read_text(encoding="utf-8"))
    return content


def _words(name: str) -> list[str]:
    return [word.strip() for word in _templates()[name].split(";")]


def _fields(chooser: random.Random) -> dict[str, object]:
    """Values for everything that a template may name."""
    topic, other = chooser.sample(_words("topics"), 2)
    names, places, things = (chooser.sample(_words(w), n) for w, n in (("names", 3), ("places", 2), ("things", 2)))
    a, b, c, d = (chooser.randint(2, 39) for _ in range(4))
    start, step, bend = chooser.randint(1, 9), chooser.randint(2, 9), chooser.randint(0, 2)
    return {
        "topic": topic, "other": other, "person": chooser.choice(_words("people")), "a": a, "b": b, "c": c, "d": d,
        "role": chooser.choice(_words("roles")), "language": chooser.choice(_words("languages")), "big": a * b + c,
        "name": names[0], "name2": names[1], "name3": names[2], "place": places[0], "place2": places[1],
        "things": things[0], "things2": things[1], "day": chooser.randint(1, 31),
        "seq": ", ".join(str(start + step * i + bend * i * (i - 1) // 2) for i in range(5)),
    }  # fmt: skip


def _general(kind: str, chooser: random.Random) -> str:
    if kind == "arithmetic":
        template = chooser.choice(_templates()["arithmetic"]) + chooser.choice(_templates()["arithmetic_endings"])
    else:
        template = chooser.choice(_templates()["kinds"][kind]["templates"])
    return str(template.format(**_fields(chooser)))


def general_prompts(chooser: random.Random, count: int) -> Iterator[dict[str, str]]:
    """That many prompts, no text twice."""
    shares = {kind: entry["share"] for kind, entry in _templates()["kinds"].items()}
    kinds = [kind for kind, share in {**shares, "arithmetic": ARITHMETIC_SHARE}.items() for _ in range(share)]
    seen: set[str] = set()
    while len(seen) < count:
        kind = chooser.choice(kinds)
        text = _general(kind, chooser)
        if text not in seen:
            seen.add(text)
            yield {"kind": kind, "text": text}
