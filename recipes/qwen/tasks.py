"""Small programming tasks with signature, docstring and examples, made of parts that compute their own answers."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any


@dataclass(frozen=True)
class Part:
    """A step of a task: its words, a name for it, and what it does."""

    words: str
    name: str
    do: Callable[[Any], Any]


KEEP = [
    Part("the even numbers", "even", lambda xs: [x for x in xs if x % 2 == 0]),
    Part("the odd numbers", "odd", lambda xs: [x for x in xs if x % 2]),
    Part("the positive numbers", "positive", lambda xs: [x for x in xs if x > 0]),
    Part("the numbers at even positions", "spaced", lambda xs: xs[::2]),
    Part("the numbers that occur exactly once", "unique", lambda xs: [x for x in xs if xs.count(x) == 1]),
    Part("the numbers divisible by three", "triple", lambda xs: [x for x in xs if x % 3 == 0]),
    Part("the numbers that are larger than the one before them", "rising",
         lambda xs: [b for a, b in pairwise(xs) if b > a]),
    Part("the distinct numbers, in order of first occurrence", "distinct", lambda xs: list(dict.fromkeys(xs))),
]  # fmt: skip
CHANGE = [
    Part("the squares of {}", "squares", lambda xs: [x * x for x in xs]),
    Part("the absolute values of {}", "absolute", lambda xs: [abs(x) for x in xs]),
    Part("{} in reverse order", "reversed", lambda xs: xs[::-1]),
    Part("{} in ascending order", "sorted", lambda xs: sorted(xs)),
    Part("the running sums of {}", "running", lambda xs: [sum(xs[: i + 1]) for i in range(len(xs))]),
    Part("{}, each doubled", "doubled", lambda xs: [2 * x for x in xs]),
    Part("the differences between neighbours among {}", "differences",
         lambda xs: [b - a for a, b in pairwise(xs)]),
]  # fmt: skip
SUM_UP = [
    Part("the sum of {}", "sum", sum),
    Part("the number of {}", "count", len),
    Part("the largest of {}, or None if there is none", "largest", lambda xs: max(xs, default=None)),
    Part("the product of {} (1 for none)", "product", lambda xs: _product(xs)),
    Part("whether {} are in ascending order", "ascending", lambda xs: xs == sorted(xs)),
]
WORDS = [
    Part("the words of the text in alphabetical order", "sorted_words", lambda s: sorted(s.split())),
    Part("how often each letter occurs", "letters", lambda s: {c: s.count(c) for c in s if c.isalpha()}),
    Part("the text with every word reversed", "reversed_words", lambda s: " ".join(w[::-1] for w in s.split())),
    Part("the longest word, the first one if there are several", "longest", lambda s: max(s.split(), key=len)),
    Part("the text with vowels replaced by '*'", "no_vowels", lambda s: "".join("*" if c in "aeiou" else c for c in s)),
    Part("the first letters of all words, in capitals", "initials",
         lambda s: "".join(w[0].upper() for w in s.split())),
    Part("how many words start with a vowel", "vowel_words", lambda s: sum(w[0] in "aeiou" for w in s.split())),
    Part("the text without repeated neighbouring letters", "squeezed",
         lambda s: "".join(c for i, c in enumerate(s) if not i or s[i - 1] != c)),
    Part("the words that occur more than once", "repeated",
         lambda s: sorted({w for w in s.split() if s.split().count(w) > 1})),
]  # fmt: skip
VOCABULARY = (
    "apple", "river", "stone", "under", "over", "little", "green", "engine", "open", "letter", "seven", "moon",
    "orange", "quiet", "up", "eagle", "better", "old",
)  # fmt: skip
FRAMES = [
    "Implement this function:\n{code}",
    "Write the missing body. The examples must hold.\n{code}",
    "Complete the code so that all doctests pass:\n{code}",
    "Solve this programming task.\n{code}",
    "Here is a function stub. Please finish it and return the complete function.\n{code}",
    "Write a Python function that returns {words}. Add type hints and an example.",
]


def _product(xs: list[int]) -> int:
    out = 1
    for x in xs:
        out *= x
    return out


def _numbers(chooser: random.Random) -> tuple[str, str, str, Callable[[Any], Any], list[Any]]:
    keep, change, last = chooser.choice(KEEP), chooser.choice(CHANGE), chooser.choice(SUM_UP)
    words, name, steps = keep.words, keep.name, [keep.do]
    if chooser.random() < 0.7:
        words, name, steps = change.words.format(words), f"{name}_{change.name}", [*steps, change.do]
    if chooser.random() < 0.7:
        words, name, steps = last.words.format(words), f"{last.name}_of_{name}", [*steps, last.do]

    def run(xs: list[int]) -> Any:
        out: Any = xs
        for step in steps:
            out = step(out)
        return out

    examples = [[chooser.randint(-9, 20) for _ in range(chooser.randint(3, 7))] for _ in range(3)]
    return f"{name}(numbers: list[int])", words, "numbers", run, [*examples[:2], []]


def _text(chooser: random.Random) -> tuple[str, str, str, Callable[[Any], Any], list[Any]]:
    part = chooser.choice(WORDS)
    examples = [" ".join(chooser.choices(VOCABULARY, k=chooser.randint(2, 6))) for _ in range(2)]
    return f"{part.name}(text: str)", part.words, "text", part.do, examples


def task_prompts(chooser: random.Random, count: int) -> Iterator[dict[str, str]]:
    """That many tasks, no text twice."""
    seen: set[str] = set()
    while len(seen) < count:
        signature, words, _, run, examples = chooser.choice([_numbers, _numbers, _text])(chooser)
        name = signature.partition("(")[0]
        shown = "".join(f"\n    >>> {name}({e!r})\n    {run(e)!r}" for e in examples)
        code = f'```python\ndef {signature}:\n    """Return {words}.\n{shown}\n    """\n```'
        text = chooser.choice(FRAMES).format(code=code, words=words)
        if text not in seen:
            seen.add(text)
            yield {"kind": "task", "text": text}
