"""Prompts to train a chat model's drafter on: tasks around the functions of the standard library, and general ones.

    python recipes/qwen/prompts.py --out prompts.jsonl --count 6000

Only prompts are made here; the answers are the target's own (`forerun data regenerate`). The text comes from the
running Python's standard library (PSF licence) and from the templates below. No evaluation prompt is among them.
"""

import argparse
import ast
import hashlib
import json
import random
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from general import general_prompts
from tasks import task_prompts

SKIPPED = {
    "site-packages",
    "dist-packages",
    "__pycache__",
    "encodings",
    "pydoc_data",
    "lib2to3",
    "test",
    "tests",
    "idle_test",
}
LINES = range(4, 45)
"""Of a function that makes a prompt: shorter ones say nothing, longer ones leave no room for an answer."""
GENERAL_SHARE, TASK_SHARE = 0.4, 0.15
PER_FILE = 12


@dataclass(frozen=True)
class Function:
    """A function of the library, with its source."""

    module: str
    name: str
    source: str
    bare: str
    """Source without the docstring; the same if it has none."""
    head: str
    """Signature and docstring, where a person would let a model go on."""
    docstring: str | None


def functions() -> Iterator[Function]:
    """Of every module, in a fixed order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if not SKIPPED.isdisjoint(relative.parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text)
        except (UnicodeDecodeError, SyntaxError):
            continue
        module = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
        yield from _of_module(module, text, tree)


def _of_module(module: str, text: str, tree: ast.Module) -> Iterator[Function]:
    lines = text.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.end_lineno is None:
            continue
        own = lines[node.lineno - 1 : node.end_lineno]
        if len(own) not in LINES or len(node.body) < 2:
            continue
        first = node.body[0]
        has_docstring = ast.get_docstring(node) is not None
        split = (first.end_lineno or first.lineno) - node.lineno + 1 if has_docstring else first.lineno - node.lineno
        if split < 1:
            continue
        signature = own[: first.lineno - node.lineno]
        bare = [*signature, *own[split:]] if has_docstring else own
        yield Function(module, node.name, _clean(own), _clean(bare), _clean(own[:split]), ast.get_docstring(node))


def _clean(lines: list[str]) -> str:
    return textwrap.dedent("\n".join(lines)).strip("\n")


def fenced(code: str) -> str:
    return f"```python\n{code}\n```"


WITH_CODE = {
    "explain": [
        "Explain step by step what this function does:\n{source}",
        "What does the following Python code do? Be concise.\n{bare}",
        "Explain this code to a beginner, with a small example of its use.\n{bare}",
        "Summarise this function from the module `{module}` in three sentences.\n{source}",
    ],
    "docstring": [
        "Write a docstring for this function:\n{bare}",
        "Add a Google-style docstring to this function and return the whole function.\n{bare}",
    ],
    "test": [
        "Write pytest unit tests for this function:\n{source}",
        "Write a few test cases, edge cases included, for `{name}`:\n{bare}",
    ],
    "refactor": [
        "Refactor this function to be easier to read, without changing what it does:\n{bare}",
        "Rewrite this function with type hints:\n{bare}",
        "How could this function be made faster or simpler? Show the improved code.\n{bare}",
    ],
    "review": [
        "Review this code. Are there bugs or edge cases it does not handle?\n{bare}",
        "Which exceptions can this function raise, and when?\n{source}",
    ],
    "translate": ["Translate this Python function to JavaScript:\n{bare}", "Rewrite this function in Go:\n{bare}"],
}  # fmt: skip

COMPLETE = [
    "Complete the following Python function:\n{head}",
    "Implement this function.\n{head}",
    "Finish the code below and explain nothing else:\n{head}",
    "Write the body of this function so that it does what its docstring says.\n{head}",
]
FROM_WORDS = [
    "Write a Python function `{name}` that does the following: {words}",
    "I need a Python function for this: {words} Please include an example.",
    "{words}\nWrite Python code for this, with comments.",
]


def code_prompts(chooser: random.Random) -> Iterator[dict[str, str]]:
    """One prompt per function, of a kind drawn for it."""
    per_file: dict[str, int] = {}
    found = list(functions())
    chooser.shuffle(found)
    for function in found:
        per_file[function.module] = per_file.get(function.module, 0) + 1
        if per_file[function.module] <= PER_FILE:
            yield _prompt_about(function, chooser)


def _prompt_about(function: Function, chooser: random.Random) -> dict[str, str]:
    fields = {
        "module": function.module, "name": function.name, "source": fenced(function.source),
        "bare": fenced(function.bare), "head": fenced(function.head),
        "words": " ".join((function.docstring or "").split("\n\n")[0].split()),
    }  # fmt: skip
    kinds = [*WITH_CODE, "explain", "test"]
    if function.docstring:
        kinds += ["complete"] * 8 + ["words"] * 3
    kind = chooser.choice(kinds)
    templates = {"complete": COMPLETE, "words": FROM_WORDS}.get(kind) or WITH_CODE[kind]
    return {"kind": kind, "text": chooser.choice(templates).format(**fields)}


def prompts(count: int, seed: int) -> list[dict[str, object]]:
    """That many prompts, code and general ones mixed, each with an id made of its text."""
    chooser = random.Random(seed)
    general = list(general_prompts(chooser, int(count * GENERAL_SHARE)))
    tasks = list(task_prompts(chooser, int(count * TASK_SHARE)))
    code = list(code_prompts(chooser))[: count - len(general) - len(tasks)]
    mixed = [*general, *tasks, *code]
    chooser.shuffle(mixed)
    records = {}
    for prompt in mixed:
        number = hashlib.sha256(prompt["text"].encode()).hexdigest()[:16]
        message = {"role": "user", "content": prompt["text"]}
        records[number] = {"id": number, "kind": prompt["kind"], "messages": [message]}
    return list(records.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    records = prompts(options.count, options.seed)
    temporary = options.out.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    temporary.replace(options.out)
    print(f"{len(records)} prompts in {options.out}")


if __name__ == "__main__":
    main()
