"""A prepared dataset on disk: what was written is what is read, whole or not at all, and what is damaged is found."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import data_chats as chats
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.errors import OptionError
from forerun.target.fingerprint import tokenizer_hash
from forerun.training.data import Dataset, Sample, open_split
from forerun.training.data.dataset import read_manifest
from forerun.training.data.writer import NothingLeft, check_place, is_held_out, new_folder, write_dataset


def sample(name: str, ids: list[int], learned: list[int]) -> Sample:
    return Sample(name, np.array(ids, np.int32), np.array(learned, np.bool_))


SAMPLES = [
    sample("a", [5, 6, 7], [0, 1, 1]),
    sample("ä\n", [2**31 - 1], [0]),
    sample("c", [5, 5, 0, 1], [1, 1, 0, 1]),
]


def describe(**more: Any) -> dict[str, Any]:
    return {"target": "tiny", "tokenizer": {"hash": "x"}, **more}


def write(folder: Path, samples: list[Sample], held_out: float = 0.0, **more: Any) -> dict[str, Any]:
    with new_folder(folder) as part:
        return write_dataset(part, ((one, one.id) for one in samples), lambda: describe(**more), held_out)


def same(a: Sample, b: Sample) -> bool:
    return a.id == b.id and np.array_equal(a.token_ids, b.token_ids) and np.array_equal(a.loss_mask, b.loss_mask)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "data", SAMPLES)
    return tmp_path / "data"


def test_what_was_written_is_read(folder: Path) -> None:
    """Ids, token ids and masks of every sample, forwards and backwards, with the types promised."""
    data = Dataset(folder)
    assert len(data) == 3
    assert all(map(same, data, SAMPLES))
    assert same(data[-1], SAMPLES[-1])
    assert (data[0].token_ids.dtype, data[0].loss_mask.dtype) == (np.int32, np.bool_)
    assert data.longest == 4
    assert data.lengths.tolist() == [3, 1, 4]
    assert data.ids == data.groups == ["a", "ä\n", "c"]
    assert data.manifest["counts"] == {"samples": 3, "tokens": 8, "learned": 5, "longest": 4}
    for index in (3, -4):
        with pytest.raises(IndexError):
            data[index]
    data.verify()


def test_samples_can_be_changed_without_changing_the_files(folder: Path) -> None:
    """They are copies: a trainer may write into them."""
    data = Dataset(folder)
    data[0].token_ids[0] = 0
    assert same(data[0], SAMPLES[0])


def test_a_dataset_can_be_pickled(folder: Path) -> None:
    """As loaders do for their workers: the copy reads the same files, and little is copied."""
    packed = pickle.dumps(Dataset(folder))
    assert len(packed) < 500
    assert all(map(same, pickle.loads(packed), SAMPLES))


def test_token_counts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Learned tokens only, over any number of chunks; an id that the target lacks is refused."""
    for chunk in (1 << 22, 3):
        monkeypatch.setattr("forerun.training.data.dataset.CHUNK", chunk)
        assert Dataset(folder).token_counts(9).tolist() == [0, 1, 0, 0, 0, 2, 1, 1, 0]
    with pytest.raises(OptionError, match=r"--data: .* has token 7; the target has 7"):
        Dataset(folder).token_counts(7)


@given(st.lists(st.lists(st.tuples(st.integers(0, 2**31 - 1), st.booleans()), min_size=1), min_size=1, max_size=8))
def test_any_samples(tmp_path_factory: pytest.TempPathFactory, content: list[list[tuple[int, bool]]]) -> None:
    """Whatever the lengths."""
    samples = [sample(str(i), [t for t, _ in one], [int(m) for _, m in one]) for i, one in enumerate(content)]
    folder = tmp_path_factory.mktemp("any") / "data"
    write(folder, samples)
    assert all(map(same, Dataset(folder), samples))


# ----------------------------------------------------------------------------------------------------------- held out


def test_held_out_data_is_apart_and_stays_apart(tmp_path: Path) -> None:
    """Each sample in one part, by its name alone: more data moves none of them. The share is about what was asked."""
    samples = [sample(f"id {i}", [i], [1]) for i in range(400)]
    write(tmp_path / "data", samples, 0.25)
    train, held = open_split(tmp_path / "data")
    assert held is not None
    ids = {one.id for one in train}, {one.id for one in held}
    assert ids[0] | ids[1] == {one.id for one in samples}
    assert not ids[0] & ids[1]
    assert 60 <= len(held) <= 140  # 5 standard deviations around 100
    write(tmp_path / "half", samples[::2], 0.25)
    half_train, half_held = open_split(tmp_path / "half")
    assert half_held is not None
    assert {one.id for one in half_held} <= ids[1]
    assert {one.id for one in half_train} <= ids[0]
    assert train.manifest["split"] == "train"


def test_a_larger_share_holds_out_what_a_smaller_one_did() -> None:
    """Raising the share takes samples from the training part only."""
    names = [str(i) for i in range(200)]
    shares = [{n for n in names if is_held_out(n, share)} for share in (0.0, 0.05, 0.2, 1.0)]
    assert shares[0] == set()
    assert shares[0] < shares[1] < shares[2] < shares[3] == set(names)


def test_samples_of_one_group_are_held_out_together(tmp_path: Path) -> None:
    """Answers to one prompt, or turns of one chat, never lie on both sides."""
    samples = [sample(f"{i}#{k}", [i], [1]) for i in range(60) for k in range(3)]
    with new_folder(tmp_path / "data") as part:
        write_dataset(part, ((one, one.id.split("#")[0]) for one in samples), describe, 0.3)
    for data in open_split(tmp_path / "data"):
        assert data is not None
        assert len(data) == 3 * len(set(data.groups))
        assert data.groups == [one.id.split("#")[0] for one in data]


def test_without_held_out_data(folder: Path) -> None:
    """There is one part."""
    train, held = open_split(folder)
    assert (len(train), held) == (3, None)


def test_a_share_that_leaves_a_part_empty_is_refused(tmp_path: Path) -> None:
    """Nothing is written then, nor where there is nothing at all to write."""
    with pytest.raises(OptionError, match="--held-out: 1e-09 of 3 samples puts none into held_out"):
        write(tmp_path / "data", SAMPLES, 1e-9)
    with pytest.raises(NothingLeft):
        write(tmp_path / "data", [])
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_a_split_is_not_taken_for_a_dataset(tmp_path: Path) -> None:
    """It says which folders are."""
    write(tmp_path / "data", [sample(str(i), [i], [1]) for i in range(40)], 0.5)
    with pytest.raises(OptionError, match="is split; name one of train, held_out"):
        Dataset(tmp_path / "data")


# -------------------------------------------------------------------------------------------------------------- whole


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    """An error in the middle of writing leaves the old dataset, and nothing beside it."""
    place = tmp_path / "data"

    def failing() -> Any:
        yield SAMPLES[0], "a"
        assert not place.exists() or len(Dataset(place)) == 3
        raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt), new_folder(place, overwrite=True) as part:
            write_dataset(part, failing(), describe)
        assert [p.name for p in tmp_path.iterdir()] == (["data"] if place.exists() else [])
        if not place.exists():
            write(place, SAMPLES)
    assert all(map(same, Dataset(place), SAMPLES))


def test_a_dataset_is_replaced_only_on_request(folder: Path) -> None:
    """And other folders never."""
    with pytest.raises(OptionError, match=r"--out: .*--overwrite"):
        write(folder, SAMPLES)
    with new_folder(folder, overwrite=True) as part:
        write_dataset(part, [(SAMPLES[0], "a")], describe)
    assert len(Dataset(folder)) == 1
    assert [p.name for p in folder.parent.iterdir()] == ["data"]
    other = folder.parent / "photos"
    other.mkdir()
    (other / "manifest.json").write_text("{}")
    for overwrite in (False, True):
        with pytest.raises(OptionError, match="has other files in it"):
            check_place(other, overwrite)


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    """A file, a folder in one that is not there, and one in a file; an empty folder can."""
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "no" / "data", tmp_path / "file" / "data"):
        with pytest.raises(OptionError, match="--out: "):
            check_place(place, overwrite=True)
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty", SAMPLES)
    assert len(Dataset(tmp_path / "empty")) == 3


def test_a_folder_that_cannot_be_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working folder and those around it, which a shell would go on standing in; a mount point. Told at once."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for place in (Path("."), Path(".."), tmp_path / "here"):
        with pytest.raises(OptionError, match=r"--out: .* is the working folder or holds it"):
            write(place, SAMPLES)
    assert os.path.samefile(".", tmp_path / "here")
    write(Path("new"), SAMPLES)
    assert len(Dataset(tmp_path / "here" / "new")) == 3
    monkeypatch.setattr(os.path, "ismount", lambda path: True)
    with pytest.raises(OptionError, match=r"--out: .* is a mount point"):
        check_place(tmp_path / "volume", overwrite=False)


def test_a_link_stays_and_is_written_through(tmp_path: Path) -> None:
    """To a folder on another disk, as it often is: the data belong there."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    write(tmp_path / "link", SAMPLES)
    assert (tmp_path / "link").is_symlink()
    assert len(Dataset(tmp_path / "disk")) == 3
    assert sorted(os.listdir(tmp_path)) == ["disk", "link"]


def test_a_full_disk_is_said(tmp_path: Path) -> None:
    """One line that names the option, and nothing left behind."""
    with pytest.raises(OptionError, match=r"--out: cannot write .*No space left"), new_folder(tmp_path / "data"):
        raise OSError(28, "No space left on device")
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize("name", ["tokens.i32", "loss_mask.u8", "offsets.i64", "ids.jsonl"])
def test_a_cut_or_missing_file_is_found_when_the_folder_is_opened(folder: Path, name: str) -> None:
    """By its size, without reading it."""
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[:-1])
    with pytest.raises(OptionError, match=f"--data: .*{name} has {len(data) - 1} bytes, {len(data)} were written"):
        Dataset(folder)
    (folder / name).unlink()
    with pytest.raises(OptionError, match=f"--data: .*{name} is missing"):
        Dataset(folder)


def test_a_changed_byte_is_found_by_verify(folder: Path) -> None:
    """Sizes do not show it, hashes do; offsets that make no sense are found at once."""
    path = folder / "tokens.i32"
    path.write_bytes(b"\x01" + path.read_bytes()[1:])
    with pytest.raises(OptionError, match=r"tokens\.i32 was changed or damaged"):
        Dataset(folder).verify()
    np.array([0, 3, 3, 8], "<i8").tofile(folder / "offsets.i64")
    with pytest.raises(OptionError, match="does not fit the tokens"):
        Dataset(folder)


def test_folders_that_are_no_dataset(folder: Path, tmp_path: Path) -> None:
    """Missing, of another kind, of another version: each says what to do."""
    with pytest.raises(OptionError, match=r"--data: .*forerun data prepare"):
        Dataset(tmp_path / "nowhere")
    manifest = json.loads((folder / "manifest.json").read_text())
    for content, says in (("{}", "not the manifest"), ("[", "not the manifest"), ("[]", "not the manifest")):
        (folder / "manifest.json").write_text(content)
        with pytest.raises(OptionError, match=says):
            read_manifest(folder)
    (folder / "manifest.json").write_text(json.dumps(manifest | {"forerun_data": 9}))
    with pytest.raises(OptionError, match="has format 9, this version of forerun reads 1"):
        Dataset(folder)


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    """The data's target and both hashes are named; the same tokenizer with another template passes."""
    own = chats.tokenizer(chats.CHATML)
    write(tmp_path / "data", SAMPLES, tokenizer={"hash": tokenizer_hash(own)})
    data = Dataset(tmp_path / "data")
    data.check_target(chats.tokenizer(chats.LLAMA))
    with pytest.raises(OptionError, match=r"--data: .*was prepared for tiny, whose tokenizer"):
        data.check_target(chats.tokenizer(chats.CHATML, [("a", "b")]))
