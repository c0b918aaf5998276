"""The shapes of records, where they are read from, and the names they get."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from forerun.errors import OptionError
from forerun.training.data.records import Chat, Plain, Record, read_record, read_records
from forerun.training.data.report import Dropped
from forerun.training.data.sources import Raw, Sources


def read(content: dict[str, Any], **more: Any) -> Record:
    return read_record(Raw("f line 1", content), "DATA", **more)


def lines(*records: Any) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def found(*names: object, option: str = "DATA") -> list[Any]:
    """Contents of all records; of those that cannot be read the reason."""
    sources = Sources([str(name) for name in names], option)
    read = [one.content if isinstance(one, Raw) else str(one[1]) for one in sources]
    assert sources.count() == len(read)
    return read


# ------------------------------------------------------------------------------------------------------------- shapes

HI, HELLO = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello."}
PARTS = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo."}]

CHATS = [
    ({"messages": [HI, HELLO]}, [HI, HELLO]),
    ({"messages": [HI, {"role": "assistant", "content": PARTS}]}, [HI, {"role": "assistant", "content": "Hel\nlo."}]),
    ({"conversation": [HI, HELLO]}, [HI, HELLO]),
    ({"conversations": [HI, HELLO]}, [HI, HELLO]),
    ({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "Hello."}]}, [HI, HELLO]),
    (
        {"conversations": [{"from": "human", "value": "hi"}], "system": "Be kind."},
        [{"role": "system", "content": "Be kind."}, HI],
    ),
    (
        {"conversations": [{"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'}]},
        [{"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]}],
    ),
    ({"turns": ["hi", "ho"]}, [HI, {"role": "user", "content": "ho"}]),
    ({"prompt": [HI], "completion": [HELLO]}, [HI, HELLO]),
    ({"instruction": "hi", "output": "Hello."}, [HI, HELLO]),
    ({"instruction": "h", "input": "i", "output": "Hello."}, [{"role": "user", "content": "h\n\ni"}, HELLO]),
    ({"instruction": "hi", "input": "", "response": "Hello.", "text": "hi Hello."}, [HI, HELLO]),
    ({"question": "hi", "answer": "Hello."}, [HI, HELLO]),
    ({"prompt": "hi", "response": "Hello."}, [HI, HELLO]),
    ({"prompt": "hi", "messages": [HI, HELLO]}, [HI, HELLO]),
]  # fmt: skip


@pytest.mark.parametrize(("content", "messages"), CHATS)
def test_chats(content: dict[str, Any], messages: list[Any]) -> None:
    """Every known shape of a conversation becomes the same messages."""
    body = read(content).body
    assert isinstance(body, Chat)
    assert list(body.messages) == messages


def test_plain_text() -> None:
    """A text, and a prompt with or without its completion; as chat on request."""
    assert read({"text": "a"}).body == Plain("", "a")
    assert read({"prompt": "hi", "completion": "Hello."}).body == Plain("hi", "Hello.")
    assert read({"prompt": "hi"}).body == Plain("hi", None)
    assert read({"prompt": "hi", "completion": "Hello."}, as_chat=True).body == Chat([HI, HELLO])
    assert read({"prompt": "hi"}, as_chat=True).body == Chat([HI])


def test_tools_reach_the_template() -> None:
    """Tools and calls as objects, from objects and from JSON text; fields that a table filled with nothing are gone."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    content = {"messages": [HI, {"role": "assistant", "content": None, "tool_calls": [call], "name": None}]}
    for tools in ([{"name": "f"}], '[{"name": "f"}]'):
        body = read({**content, "tools": tools}).body
        assert isinstance(body, Chat)
        assert body.tools == [{"name": "f"}]
        assert body.messages[1] == {
            "role": "assistant", "tool_calls": [{**call, "function": {"name": "f", "arguments": {"a": 1}}}],
        }  # fmt: skip
    kept = {"role": "assistant", "content": "x", "reasoning_content": "y"}
    body = read({"messages": [HI, kept]}).body
    assert isinstance(body, Chat)
    assert body.messages[1] == kept


@pytest.mark.parametrize(
    ("content", "keys"),
    [
        ({"promt": "x", "score": 1}, "promt, score"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages"),
        ({"messages": [{"content": "hi"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"conversations": [{"from": "alien", "value": "x"}]}, "conversations"),
        ({"turns": [1]}, "turns"),
        ({"text": ["a"]}, "text"),
        ({}, "none"),
        ({"text": None}, "text"),
    ],
)
def test_an_unknown_shape_is_refused_with_its_number_and_keys(content: dict[str, Any], keys: str) -> None:
    """The command ends: data of a shape that nobody foresaw is not counted away."""
    with pytest.raises(OptionError, match=rf"^DATA: f line 1: .*\(its keys: {keys}\)"):
        read(content)


def test_content_that_is_not_text_is_left_out() -> None:
    """Pictures, and tool calls whose arguments are no JSON."""
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}
    assert_dropped([picture])
    for arguments in ("{", "[" * 100_000, "9" * 5000):
        assert_dropped([HI, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}])


def assert_dropped(messages: list[Any]) -> None:
    with pytest.raises(Dropped):
        read({"messages": messages})


def test_emitted_ids_must_be_ids() -> None:
    """What `regenerate` wrote; token_ids of other makers, without the hash of their prompts, are not used."""
    content = {"messages": [HI, HELLO], "token_ids": [[1, 2]]}
    assert read(content).emitted == []
    [one] = read({**content, "prompt_hashes": ["ab"]}).emitted
    assert one is not None
    assert (one.token_ids, one.prompt_hash) == ([1, 2], "ab")
    for wrong in ([[1, "2"]], [[1, -2]], [[1], [2]], 5):
        with pytest.raises(OptionError, match="f line 1: token_ids"):
            read({**content, "prompt_hashes": ["ab"], "token_ids": wrong})


# -------------------------------------------------------------------------------------------------------------- names


def named(*contents: dict[str, Any]) -> list[str]:
    """Ids of records, or why they are left out."""
    raws = (Raw(f"line {i}", content) for i, content in enumerate(contents))
    return [str(one[1]) if isinstance(one, tuple) else one.id for one in read_records(raws, "DATA")]


def test_ids_are_kept_or_made_from_the_content() -> None:
    """A number is an id too; without one the same content has the same id in every run."""
    first, second, third = named({"id": "a", "text": "x"}, {"id": 7, "text": "y"}, {"text": "z"})
    assert (first, second) == ("a", "7")
    assert named({"text": "z", "source": "elsewhere"}) == [third]
    assert len(third) == 16


def test_duplicates_and_shared_ids() -> None:
    """The same content once; another content under a known id gets one of its own."""
    names = named({"id": 0, "text": "x"}, {"id": 0, "text": "x"}, {"id": 9, "text": "x"}, {"id": 0, "text": "y"})
    assert names[:3] == ["0", "duplicate", "duplicate"]
    assert names[3].startswith("0~")
    assert len(names[3]) == 18


# -------------------------------------------------------------------------------------------------------------- files


def test_lines_arrays_and_tables_hold_the_same_records(tmp_path: Path) -> None:
    """JSONL (with a byte order mark and blank lines), a JSON array, JSONL called .json, Parquet."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    records = [{"id": "a", "messages": [HI, HELLO]}, {"id": "b", "messages": [HI]}]
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf\n" + lines(*records).replace("\n", "\r\n\n").encode())
    (tmp_path / "b.json").write_text(json.dumps(records, indent=1))
    (tmp_path / "c.json").write_text(lines(*records).strip())
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "d.parquet", row_group_size=1)
    for name in ("a.jsonl", "b.json", "c.json", "d.parquet"):
        assert found(tmp_path / name) == records, name


def test_line_separators_within_strings_are_no_line_ends(tmp_path: Path) -> None:
    """Text may hold U+2028, which Python's splitlines takes for an end."""
    record = {"text": "a\u2028b\x0c\x85"}
    (tmp_path / "a.jsonl").write_text(json.dumps(record, ensure_ascii=False), encoding="utf-8")
    assert found(tmp_path / "a.jsonl") == [record]


def test_a_folder_is_all_files_in_it(tmp_path: Path) -> None:
    """Documents and records, in the order of their paths; hidden files are not looked at, others are counted."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.py").write_text("import a\n")
    (tmp_path / "b.md").write_text("# b")
    (tmp_path / "c.jsonl").write_text(lines({"text": "c"}))
    (tmp_path / "d.png").write_bytes(b"\x89PNG")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "e.txt").write_text("no")
    expected = [{"text": "# b"}, {"text": "c"}, "not a kind of file that is read", {"text": "import a\n"}]
    assert found(tmp_path) == expected
    assert found(tmp_path / "src", tmp_path / "b.md") == [{"text": "import a\n"}, {"text": "# b"}]


def test_a_file_that_is_named_is_a_document_whatever_its_ending(tmp_path: Path) -> None:
    """One document a file."""
    (tmp_path / "Makefile").write_text("all:\n\n\ttrue\n")
    assert found(tmp_path / "Makefile") == [{"text": "all:\n\n\ttrue\n"}]


def test_invalid_utf8_is_left_out_record_by_record(tmp_path: Path) -> None:
    """A line, or a document."""
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n{"text": "c"}\n')
    (tmp_path / "b.txt").write_bytes(b"\xff")
    assert found(tmp_path) == [{"text": "a"}, "invalid UTF-8", {"text": "c"}, "invalid UTF-8"]


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', "a.jsonl line 2 is not JSON"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "b', "a.jsonl line 2 .* ends in the middle"),
        ("a.jsonl", b"[1]\n", "a.jsonl line 1 is of type list"),
        ("a.json", b'["a"]', "a.json record 1 is of type str"),
        ("a.json", b'[{"a": ', "a.json is not JSON"),
        ("a.json", b"[" * 100_000, "a.json is not JSON"),
        ("a.json", b"[" + b"9" * 5000 + b"]", "a.json is not JSON"),
        ("a.jsonl", b'{"text": "a"}\n{"text": ' + b"[" * 100_000 + b"\n", "a.jsonl line 2 is not JSON"),
        ("a.jsonl", b'{"text": "a"}\n{"text": ' + b"9" * 5000 + b"}", "a.jsonl line 2 is not JSON that can be read"),
        ("a.parquet", b"PAR1", "a.parquet is not a Parquet file"),
    ],
)
def test_damaged_files_are_refused_with_the_place(tmp_path: Path, name: str, data: bytes, says: str) -> None:
    """What is no JSON at all is an error, not a record left out."""
    (tmp_path / name).write_bytes(data)
    with pytest.raises(OptionError, match=f"^PROMPTS: .*{says}"):
        list(Sources([str(tmp_path / name)], "PROMPTS"))


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    """With how a name of the hub is written."""
    with pytest.raises(OptionError, match=r"DATA: .*no\.jsonl does not exist .*hf:"):
        list(Sources([str(tmp_path / "no.jsonl")], "DATA"))


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """JSONL or an array; it can be looked at twice."""
    for text in (lines({"text": "a"}, {"text": "b"}), '[{"text": "a"}, {"text": "b"}]'):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        sources = Sources(["-"], "DATA")
        for _ in range(2):
            assert [one.content["text"] for one in sources if isinstance(one, Raw)] == ["a", "b"]


# ----------------------------------------------------------------------------------------------------- hub datasets


def test_datasets_that_were_saved_here(tmp_path: Path) -> None:
    """One dataset or one with splits, under hf: or as a path; a split can be named."""
    datasets = pytest.importorskip("datasets")
    one = datasets.Dataset.from_list([{"text": "a"}, {"text": "b"}])
    one.save_to_disk(str(tmp_path / "one"))
    splits = {"train": one, "test": datasets.Dataset.from_list([{"text": "t"}])}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "two"))
    both = [{"text": "a"}, {"text": "b"}]
    assert found(f"hf:{tmp_path / 'one'}") == found(tmp_path / "one") == found(tmp_path / "two") == both
    assert found(f"hf:{tmp_path / 'two'}:test") == [{"text": "t"}]
    with pytest.raises(OptionError, match="the splits are train, test"):
        found(f"hf:{tmp_path / 'two'}:validation")
    with pytest.raises(OptionError, match="has no splits"):
        found(f"hf:{tmp_path / 'one'}:train")


def test_a_folder_that_datasets_can_load(tmp_path: Path) -> None:
    """`load_dataset` of a local folder stands for that of a name."""
    pytest.importorskip("datasets")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_text(lines({"text": "a"}))
    assert found(f"hf:{tmp_path / 'set'}") == [{"text": "a"}]


def test_without_the_datasets_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """What to install."""
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(OptionError, match=r"DATA: hf:some/set needs .*forerun\[train\]"):
        list(Sources(["hf:some/set"], "DATA"))


@pytest.mark.parametrize("package", ["datasets", "pyarrow"])
def test_a_library_that_is_here_and_broken_is_not_said_to_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    """What went wrong while importing it is told: installing it would change nothing."""
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    source = "hf:some/set" if package == "datasets" else str(tmp_path / "a.parquet")
    for code in ("raise ImportError('no shared object')", "import a_dependency_that_is_missing"):
        (tmp_path / f"{package}.py").write_text(code)
        with pytest.raises(OptionError, match=rf"^DATA: .* {package}: .*(no shared|a_dependency)") as caught:
            list(Sources([source], "DATA"))
        assert "pip install" not in str(caught.value)
