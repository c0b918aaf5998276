"""The training text: the running interpreter's standard library, minus what must stay unseen."""

import hashlib
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Never trained on, nor their tests: prompts and the held-out loss come from here. Chosen varied: algorithms, text,
# dates, processes, object plumbing, files; each with ordinary functions, docstrings and classes.
HELD_OUT = (
    "bisect",
    "calendar",
    "cmd",
    "colorsys",
    "configparser",
    "csv",
    "difflib",
    "fnmatch",
    "fractions",
    "getopt",
    "glob",
    "graphlib",
    "heapq",
    "pprint",
    "queue",
    "sched",
    "shlex",
    "statistics",
    "string",
    "textwrap",
    "timeit",
    "wave",
)

# Tables, generated files and other languages' fixtures: many bytes that teach no Python.
SKIPPED_FOLDERS = {
    "__pycache__",
    "site-packages",
    "dist-packages",
    "encodings",
    "pydoc_data",
    "__phello__",
    "data",
    "cjkencodings",
}
SKIPPED_FILES = {"html/entities.py", "lib2to3/pgen2/grammar.py", "stringprep.py", "this.py"}
SKIPPED_PREFIXES = ("_sysconfigdata", "config-", "bad", "badsyntax_")
MAX_TEST_BYTES = 60_000  # longer test files repeat one pattern for thousands of lines


@dataclass(frozen=True)
class Document:
    name: str  # path below the standard library, with forward slashes
    text: str
    is_test: bool


def stdlib_root() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def is_held_out(relative: Path) -> bool:
    """True for a held-out module and for whatever carries its name (its tests, their helpers, a package of it)."""
    stems = {part.removesuffix(".py").removeprefix("test_") for part in relative.parts}
    return not stems.isdisjoint(HELD_OUT)


def _is_test(relative: Path) -> bool:
    return any(part in {"test", "tests", "idle_test"} for part in relative.parts)


def _is_skipped(relative: Path) -> bool:
    return (
        not SKIPPED_FOLDERS.isdisjoint(relative.parts)
        or relative.as_posix() in SKIPPED_FILES
        or any(part.startswith(SKIPPED_PREFIXES) for part in relative.parts)
    )


def _read(path: Path) -> str | None:
    try:
        return path.read_bytes().decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError:
        return None


def documents() -> Iterator[Document]:
    """Every usable file, held-out ones included, in a fixed order."""
    root = stdlib_root()
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if _is_skipped(relative):
            continue
        text = _read(path)
        if text is None or len(text) < 200:
            continue
        if _is_test(relative) and len(text) > MAX_TEST_BYTES:
            continue
        yield Document(relative.as_posix(), text, _is_test(relative))


def split() -> tuple[list[Document], list[Document]]:
    """(training documents in a fixed shuffled order, held-out modules without their tests)."""
    everything = list(documents())
    train = [doc for doc in everything if not is_held_out(Path(doc.name))]
    # Whole packages that share a held-out name (multiprocessing/queues is not one) stay out of both halves.
    held_out = [doc for doc in everything if doc.name.removesuffix(".py") in HELD_OUT]
    random.Random(0).shuffle(train)
    return train, held_out


def fingerprint(docs: list[Document]) -> str:
    """Names the exact text, so that a work folder made from another Python is not resumed by mistake."""
    digest = hashlib.sha256()
    for doc in docs:
        digest.update(doc.name.encode())
        digest.update(doc.text.encode())
    return digest.hexdigest()[:16]
