"""Records from what a user names: JSONL, a JSON array, Parquet, text documents, folders of these, `datasets`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from forerun.errors import OptionError, not_imported
from forerun.parsing import json_of
from forerun.training.data.report import Dropped

LINES = (".jsonl", ".ndjson")
TEXTS = (
    ".txt", ".md", ".rst", ".tex", ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cs", ".go", ".java", ".jl",
    ".js", ".jsx", ".ts", ".tsx", ".kt", ".lua", ".php", ".pl", ".r", ".rb", ".rs", ".scala", ".sh", ".sql", ".swift",
)  # fmt: skip
"""Endings that make a file in a folder a document. A file that is named itself is one whatever its ending."""
BLANK = b"\xef\xbb\xbf \t\r\n"
"""Bytes of a blank line; the first three are the byte order mark that some editors begin a file with."""
SAVED = ("dataset_dict.json", "dataset_info.json", "state.json")
"""What a folder has that `datasets` wrote."""


@dataclass(frozen=True, slots=True)
class Raw:
    """One record as it was found."""

    where: str
    """For messages: `chats.jsonl line 3`."""
    content: Mapping[str, Any]


@dataclass(frozen=True)
class Sources:
    """All records of all names, in order; each iteration reads them anew.

    Args:
        names: paths, `-` for standard input, `hf:NAME[:SPLIT]`.
        option: what the names were given for, for messages.

    Raises:
        OptionError: while iterating: a name that is not there, a line that is not JSON, a record that is no object.
    """

    names: Sequence[str]
    option: str

    def __iter__(self) -> Iterator[Raw | tuple[str, Dropped]]:
        """Records; in the place of one that cannot be read, where it was and why."""
        for name in self.names:
            if name.startswith("hf:"):
                yield from self._hub(name)
            elif name == "-":
                yield from self._text_of_records("standard input", self._stdin)
            else:
                yield from self._path(Path(name))

    def count(self) -> int:
        """How many records there are, without parsing lines."""
        return sum(self._count(name) for name in self.names)

    def _count(self, name: str) -> int:
        if name.startswith("hf:"):
            return len(_dataset(name.removeprefix("hf:"), self.option))
        if name == "-":
            return sum(1 for _ in self._text_of_records("standard input", self._stdin))
        path = self._existing(Path(name))
        if _is_saved(path):
            return len(_dataset(str(path), self.option))
        return sum(self._count_file(one) for one in (_files(path) if path.is_dir() else [path]))

    def _count_file(self, path: Path) -> int:
        if path.suffix in LINES:
            with open(path, "rb") as file:
                return sum(1 for line in file if line.strip(BLANK))
        if path.suffix == ".parquet":
            return int(self._parquet_file(path).metadata.num_rows)
        return sum(1 for _ in self._json(path)) if path.suffix == ".json" else 1

    @cached_property
    def _stdin(self) -> bytes:
        return sys.stdin.buffer.read()

    # ---------------------------------------------------------------------------------------------------------- files

    def _existing(self, path: Path) -> Path:
        if not path.exists():
            raise OptionError(self.option, f"{path} does not exist (a dataset of the hub is written hf:{path})")
        return path

    def _path(self, path: Path) -> Iterator[Raw | tuple[str, Dropped]]:
        if _is_saved(self._existing(path)):
            yield from self._hub(f"hf:{path}")
        elif path.is_dir():
            for one in _files(path):
                known = one.suffix in (*LINES, ".json", ".parquet", *TEXTS)
                yield from self._file(one) if known else [(str(one), Dropped("not a kind of file that is read"))]
        else:
            yield from self._file(path)

    def _file(self, path: Path) -> Iterator[Raw | tuple[str, Dropped]]:
        kinds: dict[str, Callable[[Path], Iterator[Raw | tuple[str, Dropped]]]] = {
            **dict.fromkeys(LINES, self._lines),
            ".json": self._json,
            ".parquet": self._parquet,
        }
        try:
            yield from kinds.get(path.suffix, self._document)(path)
        except OSError as error:
            raise OptionError(self.option, f"cannot read {path}: {error.strerror or error}") from error

    def _lines(self, path: Path) -> Iterator[Raw | tuple[str, Dropped]]:
        with open(path, "rb") as file:
            yield from self._parsed_lines(str(path), file)

    def _json(self, path: Path) -> Iterator[Raw | tuple[str, Dropped]]:
        yield from self._text_of_records(str(path), path.read_bytes())

    def _text_of_records(self, name: str, data: bytes) -> Iterator[Raw | tuple[str, Dropped]]:
        """A JSON array if that is what it begins with, else one record a line."""
        if data.lstrip(BLANK)[:1] != b"[":
            yield from self._parsed_lines(name, iter(data.splitlines(keepends=True)))
            return
        try:
            found = json_of(data)
        except UnicodeDecodeError as error:
            raise OptionError(self.option, f"{name} is not valid UTF-8 (at byte {error.start})") from error
        except ValueError as error:
            raise OptionError(self.option, f"{name} is not JSON: {error}") from error
        for number, one in enumerate(found, start=1):
            yield self._object(f"{name} record {number}", one)

    def _parsed_lines(self, name: str, lines: Iterator[bytes]) -> Iterator[Raw | tuple[str, Dropped]]:
        for number, line in enumerate(lines, start=1):
            where = f"{name} line {number}"
            if not line.strip(BLANK):
                continue
            try:
                found = json_of(line.decode("utf-8-sig"))
            except UnicodeDecodeError:
                yield where, Dropped("invalid UTF-8")
                continue
            except json.JSONDecodeError as error:
                cut = "" if line.endswith(b"\n") else "; it ends in the middle: finish what writes the file"
                raise OptionError(self.option, f"{where} is not JSON: {error.msg}{cut}") from error
            except ValueError as error:  # it is, but nested too deep, or with endless numbers
                raise OptionError(self.option, f"{where} is not JSON that can be read: {error}") from error
            yield self._object(where, found)

    def _object(self, where: str, found: Any) -> Raw:
        if not isinstance(found, Mapping):
            raise OptionError(self.option, f"{where} is of type {type(found).__name__}; a record is a JSON object")
        return Raw(where, found)

    def _document(self, path: Path) -> Iterator[Raw | tuple[str, Dropped]]:
        try:
            yield Raw(str(path), {"text": path.read_bytes().decode("utf-8-sig")})
        except UnicodeDecodeError:
            yield str(path), Dropped("invalid UTF-8")

    # ---------------------------------------------------------------------------------------------- tables and datasets

    def _parquet(self, path: Path) -> Iterator[Raw]:
        file, number = self._parquet_file(path), 0
        for batch in file.iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                number += 1
                yield Raw(f"{path} row {number}", row)

    def _parquet_file(self, path: Path) -> Any:
        try:
            from pyarrow import ArrowException
            from pyarrow.parquet import ParquetFile
        except ImportError as error:
            raise OptionError(self.option, f"{path} {not_imported(error, 'train', 'pyarrow')}") from error
        try:
            return ParquetFile(path)
        except ArrowException as error:
            raise OptionError(self.option, f"{path} is not a Parquet file: {error}") from error

    def _hub(self, name: str) -> Iterator[Raw]:
        for number, row in enumerate(_dataset(name.removeprefix("hf:"), self.option), start=1):
            yield Raw(f"{name} row {number}", row)


def _files(folder: Path) -> list[Path]:
    """All files below a folder but hidden ones, in the order of their paths."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return sorted(p for p in found if not any(part.startswith(".") for part in p.relative_to(folder).parts))


def _is_saved(path: Path) -> bool:
    return path.is_dir() and any((path / name).is_file() for name in SAVED)


def _dataset(name: str, option: str) -> Any:
    """A split of a dataset: one that `datasets` saved at a path, else what it loads under the name.

    Without a split: the only one, or `train`.
    """
    try:
        import datasets
    except ImportError as error:
        raise OptionError(option, f"hf:{name} {not_imported(error, 'train', 'datasets')}") from error
    path, _, split = (name, "", "") if Path(name).exists() else name.rpartition(":") if ":" in name else (name, "", "")
    try:
        found: Any = datasets.load_from_disk(path) if _is_saved(Path(path)) else datasets.load_dataset(path)
    except Exception as error:  # of several libraries: the hub's, the network's, the reader's of each format
        raise OptionError(option, f"hf:{name} cannot be loaded ({type(error).__name__}: {error})") from error
    if not isinstance(found, Mapping):
        if split:
            raise OptionError(option, f"hf:{name}: {path} has no splits; leave {split!r} away")
        return found
    chosen = split or (next(iter(found)) if len(found) == 1 else "train")
    if chosen not in found:
        raise OptionError(option, f"hf:{name}: the splits are {', '.join(found)}; choose one: hf:{path}:SPLIT")
    return found[chosen]
