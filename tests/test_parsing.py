"""What somebody else wrote as JSON or YAML: the readers' only error is ValueError, and whoever reads answers it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from forerun.bench.calibrating.rounds_file import RoundsFile
from forerun.bench.rows import RowFile
from forerun.errors import OptionError, TrainingFailed
from forerun.parsing import json_of, yaml_of
from forerun.serve.options import ServeOptions, sampling_defaults
from forerun.training.checkpoints import NUMBERS, Checkpoints
from forerun.training.data.dataset import MANIFEST, read_manifest
from forerun.training.data.regenerate import AnswerFile
from forerun.training.data.writer import check_place
from forerun.training.features.shards import Shard
from forerun.training.folder import MARKER, RunFolder

NESTED = '{"forerun_data": ' + "[" * 100_000


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "Expecting property name"),
        (NESTED, "nested too deep"),
        ("9" * 5000, "digits"),
        (b"\xff", "can't decode"),
        ('{"a": 1} x', "Extra data"),
    ],
    ids=["cut", "nested", "digits", "bytes", "more"],
)
def test_json_that_cannot_be_read_is_a_value_error(text: str | bytes, said: str) -> None:
    """Also where Python's own reader raises RecursionError."""
    with pytest.raises(ValueError, match=said):
        json_of(text)


def test_json_that_can_be_read_is_what_python_reads() -> None:
    """And its decoding errors keep their kind, which says where."""
    assert json_of('{"a": [1, null]}') == json_of(b'{"a": [1, null]}') == {"a": [1, None]}
    with pytest.raises(json.JSONDecodeError, match="column 2"):
        json_of("{")
    assert yaml_of("a: [1, null]") == {"a": [1, None]}


@pytest.mark.parametrize(
    ("text", "said"),
    [("a: [", "expected the node"), ("[" * 800, "nested too deep"), ("1" * 5000, "digits"), ("2000-13-45", "month")],
    ids=["cut", "nested", "digits", "date"],
)
def test_yaml_that_cannot_be_read_is_a_value_error(text: str, said: str) -> None:
    """PyYAML raises kinds of its own, Python's RecursionError, and ValueError."""
    with pytest.raises(ValueError, match=said):
        yaml_of(text)


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "data": (MANIFEST, read_manifest),
    "data out": (MANIFEST, lambda folder: check_place(folder, overwrite=True)),
    "run": (MARKER, lambda folder: RunFolder(folder).check()),
    "checkpoint": (f"step-00000001/{NUMBERS}", lambda folder: Checkpoints(folder, keep=1).newest()),
    "answers": ("out.jsonl", lambda folder: AnswerFile(folder / "out.jsonl", "model", {})),
    "bench rows": ("rows.jsonl", lambda folder: RowFile(folder / "rows.jsonl", "key", {})),
    "recorded rounds": ("rounds.jsonl", lambda folder: RoundsFile(folder / "rounds.jsonl", "key")),
    "generation config": (
        "generation_config.json",
        lambda folder: sampling_defaults(ServeOptions(generation_config=str(folder)), {}),
    ),
}


@pytest.mark.parametrize("name", READERS)
def test_a_file_that_is_nested_too_deep_is_refused_by_name(name: str, tmp_path: Path) -> None:
    """As any other file that is none of ours, not with a traceback."""
    file, read = READERS[name]
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(NESTED + "\n")
    with pytest.raises((OptionError, TrainingFailed), match=str(tmp_path)):
        read(tmp_path)


def test_a_line_of_an_index_that_is_nested_too_deep_is_damaged(tmp_path: Path) -> None:
    """Its sample is computed anew."""
    shard = Shard(tmp_path, "one")
    shard.index.write_text(NESTED + "\n")
    assert shard.news() == ([], 1)
