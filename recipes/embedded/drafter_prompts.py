"""Prompts for the drafters' training data: beginnings from the training modules, cut where a person would stop.

    python recipes/embedded/drafter_prompts.py --out prompts.jsonl --count 6000

The continuations are the target's own (`forerun data regenerate`). Held-out modules are not among them.
"""

import argparse
import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path

from corpus import Document, split
from prompts import natural_ends
from tokenizer import load_tokenizer
from transformers import PreTrainedTokenizerFast

MIN_TOKENS, MAX_TOKENS = 24, 200
PER_MODULE = 40


def cuts(doc: Document, tokenizer: PreTrainedTokenizerFast, chooser: random.Random) -> Iterator[tuple[str, str]]:
    """Runs of whole lines that end after a signature, a docstring or any other line, of a random length; each with the
    text that goes on behind it."""
    lines = doc.text.splitlines(keepends=True)
    try:
        ends = list(natural_ends(doc.text))
    except SyntaxError:
        return
    anywhere = [chooser.randrange(1, len(lines)) for _ in range(len(ends) // 3 + 2)]
    chosen = sorted({*ends, *anywhere})
    chooser.shuffle(chosen)
    for end in chosen[:PER_MODULE]:
        wanted = chooser.randint(MIN_TOKENS, MAX_TOKENS)
        prompt, start = "", end
        while start > 0:
            longer = "".join(lines[start - 1 : end])
            if len(tokenizer(longer)["input_ids"]) > wanted:
                break
            prompt, start = longer, start - 1
        if len(tokenizer(prompt)["input_ids"]) >= MIN_TOKENS:
            yield prompt, "".join(lines[end:])


def every_prompt(tokenizer: PreTrainedTokenizerFast, chooser: random.Random) -> dict[str, tuple[str, str]]:
    """id -> (prompt, what the source has behind it), of all training modules and a fifth of the tests."""
    documents, _ = split()
    found: dict[str, tuple[str, str]] = {}
    for doc in documents:
        if not doc.is_test or chooser.random() < 0.2:
            for prompt, rest in cuts(doc, tokenizer, chooser):
                found[hashlib.sha256(prompt.encode()).hexdigest()[:16]] = prompt, rest
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of the embedded target")
    parser.add_argument("--count", type=int, default=6000)
    options = parser.parse_args()
    tokenizer, chooser = load_tokenizer(options.tokenizer), random.Random(7)
    found = every_prompt(tokenizer, chooser)
    ids = sorted(found)
    chooser.shuffle(ids)
    rows = [{"id": i, "prompt": found[i][0]} for i in ids[: options.count]]
    temporary = options.out.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    temporary.replace(options.out)
    print(f"{len(rows)} of {len(found)} prompts in {options.out}")


if __name__ == "__main__":
    main()
