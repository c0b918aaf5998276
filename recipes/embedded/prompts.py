"""Prompts cut from held-out modules, each ending where a person would let a model go on."""

import ast
import json
import random
from collections.abc import Iterator
from pathlib import Path

from corpus import Document, split
from transformers import PreTrainedTokenizerFast

PROMPTS = 40
MIN_TOKENS, MAX_TOKENS = 60, 250
PER_MODULE = 2


def natural_ends(text: str) -> Iterator[int]:
    """Lines (counted from 1) after which a function's body is due: the def with its docstring, if it has one."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and len(node.body) > 1:
            first = node.body[0]
            has_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            end = first.end_lineno if has_docstring else first.lineno - 1
            if end is not None:
                yield end


def cut(doc: Document, end: int, tokenizer: PreTrainedTokenizerFast) -> str | None:
    """The longest run of whole lines that ends at `end`, starts after a blank line and fits the token limits."""
    lines = doc.text.splitlines(keepends=True)
    best = None
    for start in range(end - 1, max(0, end - 60), -1):
        if start and lines[start - 1].strip():
            continue
        prompt = "".join(lines[start:end])
        length = len(tokenizer(prompt)["input_ids"])
        if length > MAX_TOKENS:
            break
        if length >= MIN_TOKENS:
            best = prompt
    return best


def prompts(tokenizer: PreTrainedTokenizerFast) -> list[dict[str, str]]:
    chooser = random.Random(0)
    found = []
    for doc in split()[1]:
        ends = sorted(set(natural_ends(doc.text)))
        chooser.shuffle(ends)
        cuts = ((end, cut(doc, end, tokenizer)) for end in ends)
        usable = [{"prompt": text, "source": f"{doc.name}:{end}"} for end, text in cuts if text]
        found += usable[:PER_MODULE]
    return found[:PROMPTS]


def write_prompts(path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(row) + "\n" for row in prompts(tokenizer)), encoding="utf-8")
    temporary.replace(path)
