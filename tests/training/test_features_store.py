"""A store gives back what was put in, to anyone, after anything; what it cannot give is computed anew."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

import pytest
import torch

from forerun.errors import OptionError
from forerun.target.load import load_target
from forerun.target.table import history_model
from forerun.training.features import capture, log_normalizer, open_source
from forerun.training.features.layout import GB
from forerun.training.features.shards import Item, Shard
from samples import text, texts

V = 7
TAPS = (1, 3)
LENGTHS = (3, 18, 1, 41, 16, 5)
ROOMY = 1e-3  # GB


def fields(batch):
    return [batch.tokens, batch.loss_mask, batch.features, batch.last, batch.log_normalizer]


def same(left, right) -> bool:
    """Bit for bit, where both have it."""
    assert list(left.lengths) == list(right.lengths)
    pairs = zip(fields(left), fields(right), strict=True)
    return all(torch.equal(a, b) for a, b in pairs if a is not None and b is not None)


def rounded(target, samples, taps=TAPS):
    """Straight from the target, in the precision of the store."""
    batch = capture(target, samples, taps)
    features, last = (x.bfloat16().to(x.dtype) for x in (batch.features, batch.last))
    return type(batch)(batch.tokens, batch.lengths, batch.loss_mask, features, last)


def opened(folder, target=None, taps=TAPS, **options):
    return open_source(target or history_model(V), taps, store=folder, gb=options.pop("gb", ROOMY), **options)


def size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def files(folder: Path, suffix: str) -> list[Path]:
    return sorted(folder.glob(f"*{suffix}"))


@pytest.fixture
def samples():
    return texts(LENGTHS, V)


# ---------------------------------------------------------------------------------------------------------- round trip


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
@pytest.mark.parametrize("normalizer", [False, True])
@pytest.mark.parametrize("taps", [(1,), (1, 3), (3,)])
def test_a_batch_is_the_same_computed_and_read(tmp_path, samples, dtype, normalizer, taps):
    """The first epoch computes, the next one reads the same bits in another order, and another process as well."""
    options = {"dtype": dtype, "normalizer": normalizer, "taps": taps}
    source = opened(tmp_path, **options)
    first = source.batch(samples)
    assert (first.log_normalizer is not None) == normalizer
    passes = len(source.target.passes)
    assert same(source.batch(samples), first)
    order = [4, 0, 3]
    mixed = opened(tmp_path, **options).batch([samples[i] for i in order])
    for at, i in enumerate(order):
        rows = slice(first.starts[i], first.starts[i] + first.lengths[i])
        mine = slice(mixed.starts[at], mixed.starts[at] + mixed.lengths[at])
        assert torch.equal(mixed.features[mine], first.features[rows])
        assert torch.equal(mixed.last[mine], first.last[rows])
    assert len(source.target.passes) == passes
    assert source.captured == len(samples)


def test_found_and_missing_samples_share_a_batch_in_order(tmp_path, samples):
    """The missing ones are computed in one go, and only they."""
    source = opened(tmp_path)
    source.batch([samples[1], samples[4]])
    del source.target.passes[:]
    assert same(source.batch(samples), rounded(history_model(V), samples))
    assert source.target.passes == [3 + 1 + 41 + 5]


def test_in_bfloat16_a_batch_is_the_captured_one_rounded(tmp_path, samples):
    """And in the target's own dtype, so that drafters need not know of a store."""
    source = opened(tmp_path)
    batch = source.batch(samples)
    assert batch.features.dtype == batch.last.dtype == source.target.dtype
    assert same(batch, rounded(source.target, samples))


def test_without_a_store_a_batch_is_the_captured_one(samples):
    """Online, the default: nothing is rounded, everything is computed in every epoch."""
    source = open_source(history_model(V), TAPS, normalizer=True)
    assert same(source.batch(samples), capture(history_model(V), samples, TAPS, with_normalizer=True))
    source.batch(samples)
    assert source.captured == 2 * len(samples)
    assert "computed in every epoch" in source.describe()


def test_a_sample_is_its_id_and_its_tokens(tmp_path, samples):
    """The same id with other tokens is another sample; the loss mask changes no feature."""
    source = opened(tmp_path)
    source.batch(samples)
    other = text("s1", [6] * 18)
    assert same(source.batch([other]), rounded(history_model(V), [other]))
    assert source.captured == len(samples) + 1
    mask_of_ones = type(other)("s0", samples[0].token_ids, ~samples[0].loss_mask)
    assert source.batch([mask_of_ones]).loss_mask.tolist() == mask_of_ones.loss_mask.tolist()
    assert source.captured == len(samples) + 1


def test_a_sample_may_come_twice_in_a_batch(tmp_path, samples):
    """As a trainer that draws with replacement has it; it is stored once."""
    source = opened(tmp_path)
    twice = [samples[1], samples[1]]
    assert same(source.batch(twice), rounded(history_model(V), twice))
    assert len(source.store) == 1
    assert files(tmp_path, ".bin")[0].stat().st_size == stored_bytes(1, 18)
    assert same(source.batch(twice), rounded(history_model(V), twice))
    assert source.captured == 2


def test_the_teachers_law_sums_to_one_with_the_stored_normaliser(tmp_path, tiny_qwen3_dir):
    """It belongs to the rounded state that the law is rebuilt from, not to the one before rounding."""
    target = load_target(tiny_qwen3_dir)
    source = opened(tmp_path, target, (1,), normalizer=True)
    some = texts((30, 12), target.vocab_size)
    source.batch(some)
    batch = source.batch(some)
    probs = (target.logits(target.final_norm(batch.last)) - batch.log_normalizer[:, None]).exp()
    torch.testing.assert_close(probs.sum(-1), torch.ones(42), rtol=0, atol=1e-5)
    unrounded = capture(target, some, (1,), with_normalizer=True).log_normalizer
    assert (batch.log_normalizer - unrounded).abs().max() > 1e-4


def test_a_store_without_normalisers_has_them_computed(tmp_path, samples):
    """Asked of a store that was made without: from the stored states, at a head per token."""
    opened(tmp_path).batch(samples)
    batch = opened(tmp_path, normalizer=True).batch(samples)
    assert torch.equal(batch.log_normalizer, log_normalizer(history_model(V), batch.last))


# ------------------------------------------------------------------------------------------------- damage: test_da_4_*


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0x10
    path.write_bytes(content)


def rewrite(folder: Path, change) -> None:
    """Replaces the index's first entry, as a list [key, offset, tokens, checksum]."""
    (index,) = files(folder, ".idx")
    lines = index.read_text().splitlines()
    entries = json.loads(lines[0])
    change(entries[0])
    index.write_text("\n".join([json.dumps(entries), *lines[1:]]) + "\n")


def poison(folder: Path) -> None:
    """A NaN under a checksum that is right."""
    (data,) = files(folder, ".bin")
    content = bytearray(data.read_bytes())
    content[:2] = b"\xc0\x7f"
    data.write_bytes(content)
    length = LENGTHS[0] * 2 * V * 2
    rewrite(folder, lambda entry: entry.__setitem__(3, zlib.crc32(content[:length])))


DAMAGES = {
    "wrong checksum": lambda folder: flip(files(folder, ".bin")[0], 7),
    "truncated": lambda folder: os.truncate(files(folder, ".bin")[0], 40),
    "not finite": poison,
    "missing shard": lambda folder: files(folder, ".bin")[0].unlink(),
    "unreadable index line": lambda folder: flip(files(folder, ".idx")[0], 0),
    "wrong length": lambda folder: rewrite(folder, lambda entry: entry.__setitem__(2, entry[2] + 1)),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_da_4_a_damaged_sample_is_counted_and_computed_anew(tmp_path, samples, caplog, kind):
    """DA-4: however one was damaged, the batch is right, the kind is counted and said once, the sound ones are served,
    and the next run finds everything sound again.

    https://github.com/vllm-project/speculators/issues/994
    """
    opened(tmp_path).batch(samples)
    DAMAGES[kind](tmp_path)
    source = opened(tmp_path)
    right = rounded(history_model(V), samples)
    assert same(source.batch(samples), right)
    assert source.store.counts.damaged[kind] >= 1
    assert source.store.counts.damaged.keys() == {kind}
    assert source.captured >= 1
    assert "damaged" in source.describe()
    assert sum(kind in record.message for record in caplog.records) == 1
    captured = source.captured
    assert same(source.batch(samples), right)
    assert source.captured == captured
    again = opened(tmp_path)
    assert same(again.batch(samples), right)
    if kind != "unreadable index line":  # that line stays in the file; its samples have another by now
        assert not again.store.counts.damaged
    assert again.captured == 0


def test_da_4_damage_while_a_run_reads(tmp_path, samples):
    """DA-4: a shard that is cut or removed under an open store costs no more than computing.

    https://github.com/vllm-project/speculators/issues/994
    """
    source = opened(tmp_path)
    right = source.batch(samples)
    os.truncate(files(tmp_path, ".bin")[0], 100)
    assert same(source.batch(samples), right)
    for path in files(tmp_path, ".bin"):
        path.unlink()
    assert same(source.batch(samples), right)
    shutil.rmtree(tmp_path)
    assert same(source.batch(samples), right)
    assert same(source.batch(samples), right)


@pytest.mark.parametrize("damage", ["byte", "bytes of zero"])
def test_da_4_no_single_flip_anywhere_is_served(tmp_path, samples, damage):
    """DA-4: at any place of data or index, the batch stays right (CRC-32 misses one in 4e9).

    https://github.com/vllm-project/speculators/issues/994
    """
    whole = tmp_path / "whole"
    opened(whole).batch(samples[:3])
    right = rounded(history_model(V), samples[:3])
    rng = random.Random(3)
    for path in (*files(whole, ".bin"), *files(whole, ".idx")):
        content = path.read_bytes()
        for at in rng.sample(range(len(content)), 25):
            changed = bytearray(content)
            if damage == "byte":
                changed[at] ^= 1 << rng.randrange(8)
            else:
                changed[at : at + 40] = bytes(len(changed[at : at + 40]))
            path.write_bytes(changed)
            assert same(open_source(history_model(V), TAPS, store=whole, gb=1e-9).batch(samples[:3]), right), (path, at)
        path.write_bytes(content)


# ------------------------------------------------------------------------------------------------------- interruptions


def test_a_writer_may_die_at_any_byte(tmp_path, samples):
    """Whatever of an append reached the files, the samples of it are computed anew, those before are served, and the
    store goes on."""
    whole = tmp_path / "whole"
    source = opened(whole)
    source.batch(samples[:2])
    (data,), (index,) = files(whole, ".bin"), files(whole, ".idx")
    before = data.stat().st_size, index.stat().st_size
    source.batch(samples[2:])
    after = data.stat().st_size, index.stat().st_size
    right = rounded(history_model(V), samples)
    cuts = [(at, before[1]) for at in range(before[0], after[0], 499)]
    cuts += [(after[0], at) for at in range(before[1], after[1], 37)]
    for n, cut in enumerate(cuts):
        copy = tmp_path / f"copy{n}"
        shutil.copytree(whole, copy)
        for path, length in zip((data, index), cut, strict=True):
            os.truncate(copy / path.name, length)
        resumed = opened(copy)
        assert same(resumed.batch(samples), right), cut
        assert (resumed.captured, resumed.store.counts.damaged.total()) == (len(samples) - 2, 0)
        again = opened(copy)
        assert same(again.batch(samples), right)
        assert again.captured == 0


def test_data_that_was_never_listed_is_removed(tmp_path, samples):
    """A writer died before its first line: the file counts against the bound until the next append removes it."""
    source = opened(tmp_path)
    (tmp_path / "00000000000000000001-1.bin").write_bytes(b"x" * 1000)
    (tmp_path / "00000000000000000002-1.idx").write_bytes(b"")
    source.batch(samples)
    assert len(files(tmp_path, ".bin")) == len(files(tmp_path, ".idx")) == 1


WRITER = """
import sys
from samples import texts
from forerun.target.table import history_model
from forerun.training.features import open_source

source = open_source(history_model({V}), {TAPS}, store=sys.argv[1], gb={ROOMY})
while True:
    for n in range(40):
        source.batch(texts((30, 7, 12), {V}, seed=n, prefix=f"n{{n}}-"))
        print(n, flush=True)
"""


def test_two_processes_share_a_folder_and_one_is_killed(tmp_path):
    """Both write and read at once, both get the right features, each finds what the other stored; SIGKILL in the
    middle leaves a store that serves."""
    path = [entry for entry in sys.path if entry.endswith("tests")]
    code = f"import sys; sys.path[:0] = {path!r}\n" + WRITER.format(V=V, TAPS=TAPS, ROOMY=ROOMY)
    other = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        target = history_model(V)
        batches = [texts((30, 7, 12), V, seed=n, prefix=f"n{n}-") for n in range(12)]
        right = [rounded(target, batch) for batch in batches]
        assert other.stdout is not None
        assert other.stdout.readline() == "0\n"
        source = opened(tmp_path)
        for n in reversed(range(12)):
            assert same(source.batch(batches[n]), right[n])
        assert source.store.counts.read > 0
    finally:
        os.kill(other.pid, signal.SIGKILL)
        other.wait()
    resumed = opened(tmp_path)
    assert all(same(resumed.batch(batch), expected) for batch, expected in zip(batches, right, strict=True))
    assert resumed.captured == 0
    assert not resumed.store.counts.damaged


def test_what_another_process_stores_is_found_without_reopening(tmp_path, samples):
    """Two open sources over one folder, in turns."""
    first, second = opened(tmp_path), opened(tmp_path)
    first.batch(samples[:3])
    second.batch(samples)
    assert second.captured == 3
    first.batch(samples)
    assert first.captured == 3


def test_what_two_processes_computed_at_once_is_stored_once(tmp_path):
    """The second finds it there when its turn to write comes."""
    items = [Item("k", 2, torch.zeros(2 * 2 * V * 2, dtype=torch.uint8))]
    first, second = opened(tmp_path).store, opened(tmp_path).store
    first.append(items)
    second.append(items)
    assert len(files(tmp_path, ".bin")) == 1
    assert "k" in second


def test_da_4_what_replaces_a_damaged_sample_is_what_the_next_run_finds(tmp_path, samples):
    """DA-4: also where the damaged one lies in a later shard, of another process.

    https://github.com/vllm-project/speculators/issues/994
    """
    first, second = opened(tmp_path), opened(tmp_path)
    first.batch(samples[:2])
    second.batch(samples[2:4])
    flip(files(tmp_path, ".bin")[1], 5)
    first.batch(samples[:4])
    assert first.store.counts.damaged.total() == 1
    again = opened(tmp_path)
    again.batch(samples[:4])
    assert (again.captured, again.store.counts.damaged.total()) == (0, 0)


# -------------------------------------------------------------------------------------------------------------- bounds


def stored_bytes(count: int, length: int) -> int:
    return count * length * 2 * V * 2


def test_the_folder_never_exceeds_its_bound_and_keeps_what_it_has(tmp_path):
    """Epochs over twice the bound: every batch right, the folder bounded, and near half of the reads are served
    (plain least-recently-used would serve 15 % of them)."""
    target, many = history_model(V), texts((20,) * 60, V)
    right = {sample.id: rounded(target, [sample]) for sample in many}
    limit = stored_bytes(30, 20) + 6000
    source = opened(tmp_path, target, gb=limit / GB)
    rng = random.Random(5)
    for epoch in range(4):
        order = rng.sample(many, len(many))
        if epoch == 1:
            source.captured = source.store.counts.read = 0
        for at in range(0, 60, 4):
            batch = source.batch(order[at : at + 4])
            for start, sample in zip(batch.starts, order[at : at + 4], strict=True):
                assert torch.equal(batch.features[start : start + 20], right[sample.id].features)
            assert size(tmp_path) <= limit
    assert source.store.counts.read >= 0.4 * 180
    assert source.store.counts.read + source.captured == 180
    assert source.store.counts.declined > 0


def test_what_no_run_uses_any_more_is_evicted_the_oldest_first(tmp_path):
    """A full store of another data set makes room; what the run reads itself, and what others read, stays."""
    target = history_model(V)
    old, used, new = (texts((20,) * 20, V, seed=s, prefix=f"{s}-") for s in range(3))
    limit = 29_000  # 45 samples
    before = opened(tmp_path, target, gb=limit / GB)
    for part in (old, used):
        for at in range(0, 20, 4):
            before.batch(part[at : at + 4])
    assert size(tmp_path) > 0.8 * limit
    source, neighbour = (opened(tmp_path, target, gb=limit / GB) for _ in range(2))
    neighbour.batch(used)
    for at in range(0, 20, 4):
        source.batch(new[at : at + 4])
        assert size(tmp_path) <= limit
    assert source.store.counts.evicted_shards > 0
    assert source.store.counts.declined == 0
    source.captured = neighbour.captured = 0
    source.batch(new)
    neighbour.batch(used)
    assert source.captured == neighbour.captured == 0
    right = rounded(target, old)
    assert same(neighbour.batch(old), right)  # some evicted under its feet, nothing damaged
    assert neighbour.captured > 0
    assert not neighbour.store.counts.damaged


def test_a_smaller_bound_on_a_larger_store_stores_nothing_more(tmp_path, samples):
    """Reading goes on; what is in use is not thrown away for it."""
    opened(tmp_path).batch(samples)
    full = size(tmp_path)
    source = opened(tmp_path, gb=full / 2 / GB)
    source.batch(samples)
    more = texts((9,), V, seed=9, prefix="x")
    assert same(source.batch(more), rounded(history_model(V), more))
    assert size(tmp_path) <= full
    assert source.store.counts.declined == 1


def test_a_full_disk_costs_only_the_store(tmp_path, samples, monkeypatch, caplog):
    """What could not be written is taken back, said once, and the run computes on."""
    source = opened(tmp_path)
    source.batch(samples[:2])
    before = size(tmp_path)

    def full(file, item):
        file.write(b"half of it")
        file.flush()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("forerun.training.features.shards._append", full)
    right = rounded(history_model(V), samples)
    assert same(source.batch(samples), right)
    assert same(source.batch(samples), right)
    assert size(tmp_path) == before
    assert sum("nothing more is stored" in record.message for record in caplog.records) == 1
    monkeypatch.undo()
    assert same(opened(tmp_path).batch(samples), right)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_write_permission_is_read(tmp_path, samples):
    """A shared store of another user."""
    right = opened(tmp_path).batch(samples[:2])
    tmp_path.chmod(0o500)
    try:
        assert same(opened(tmp_path).batch(samples[:2]), right)
    finally:
        tmp_path.chmod(0o700)


# ------------------------------------------------------------------------------------------------------------ identity


def test_ts_2_the_manifest_says_what_the_features_are(tmp_path, tiny_qwen3_dir):
    """TS-2, TS-3: layer ids, their base, the norm state, dtypes and the target's fingerprint are in the folder.

    https://github.com/vllm-project/speculators/issues/705 https://github.com/lightseekorg/TorchSpec/issues/87
    https://github.com/lightseekorg/TorchSpec/issues/89
    """
    opened(tmp_path, load_target(tiny_qwen3_dir), (1, 2))
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["layer_ids"] == [1, 2]
    assert manifest["numbering_base"] == "h"
    assert manifest["post_norm"] is False
    assert manifest["dtype"] == "bfloat16"
    assert set(manifest["target_fingerprint"]) == {"config", "weights", "tokenizer", "chat_template", "dtype"}


@pytest.mark.parametrize("taps", [(1, 2, 3), (1, 2), (3,)])
def test_ts_2_other_taps_are_refused_before_anything_is_read(tmp_path, samples, taps):
    """TS-2: another number of layers, other layers, the last one in or out; also where another target is allowed.

    https://github.com/vllm-project/speculators/issues/705 https://github.com/lightseekorg/TorchSpec/issues/87
    """
    opened(tmp_path).batch(samples)
    for allowed in (False, True):
        with pytest.raises(OptionError, match=r"^--feature-store: .* holds other features \(layer_ids \(1, 3\) there"):
            opened(tmp_path, taps=taps, allow_target_mismatch=allowed)


def test_ts_2_another_target_is_refused_by_what_differs_unless_allowed(tmp_path, tiny_qwen3_dir, caplog):
    """TS-2: one changed weight. Allowed, the store is read as it is and nothing is added to it.

    https://github.com/vllm-project/speculators/issues/705
    """
    target, tuned = load_target(tiny_qwen3_dir), load_target(tiny_qwen3_dir)
    tuned.model.model.layers[0].mlp.down_proj.weight.data *= 1.5
    some = texts((20, 11), target.vocab_size)
    right = opened(tmp_path, target).batch(some)
    with pytest.raises(OptionError, match=r"this target differs in weights; .*--allow-target-mismatch"):
        opened(tmp_path, tuned)
    source = opened(tmp_path, tuned, allow_target_mismatch=True)
    assert same(source.batch(some), right)
    before = size(tmp_path)
    source.batch(texts((8,), target.vocab_size, seed=4, prefix="x"))
    assert size(tmp_path) == before
    assert source.store.counts.declined == 1
    assert "nothing is added" in caplog.text


def test_ts_2_another_dtype_only_warns(tmp_path, tiny_qwen3_dir, caplog):
    """TS-2: the target in bfloat16 reads what it computed in float32; another storage dtype keeps the folder's own.

    https://github.com/vllm-project/speculators/issues/705
    """
    target = load_target(tiny_qwen3_dir)
    some = texts((20, 11), target.vocab_size)
    right = opened(tmp_path, target).batch(some)
    assert not caplog.records
    half = opened(tmp_path, load_target(tiny_qwen3_dir, dtype="bfloat16"))
    batch = half.batch(some)
    assert (half.captured, batch.features.dtype) == (0, torch.bfloat16)
    assert torch.equal(batch.features.float(), right.features)
    assert "computed in float32; this target runs in bfloat16" in caplog.text
    assert same(opened(tmp_path, target, dtype="fp8").batch(some), right)
    assert "stores in bfloat16, not in fp8" in caplog.text


def test_ts_3_a_manifest_without_its_numbering_base_is_refused(tmp_path):
    """TS-3: the base is a mandatory field; another one is not guessed at.

    https://github.com/vllm-project/vllm/pull/40727
    """
    opened(tmp_path)
    path = tmp_path / "manifest.json"
    manifest = json.loads(path.read_text())
    for changed in ({**manifest, "numbering_base": "t"}, {k: v for k, v in manifest.items() if k != "numbering_base"}):
        path.write_text(json.dumps(changed))
        with pytest.raises(OptionError, match=r"^--feature-store: .*numbering_base"):
            opened(tmp_path)


def test_a_shard_from_another_store_is_never_served(tmp_path, samples):
    """Files moved between folders of different taps: keys are of the folder's own manifest."""
    here, there = tmp_path / "here", tmp_path / "there"
    opened(there, taps=(2, 3)).batch(samples)
    opened(here)
    for suffix in (".bin", ".idx"):
        shutil.copy(files(there, suffix)[0], here)
    assert same(opened(here).batch(samples), rounded(history_model(V), samples))


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    """Nothing is written into it, not even a lock."""
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(OptionError, match=r"^--feature-store: .* is not empty and no feature store \(thesis.tex\)"):
        opened(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gb": None}, "--store-gb: a feature store needs a bound in gigabytes"),
        ({"gb": -1.0}, "--store-gb: a feature store needs a bound"),
        ({"gb": float("nan")}, "--store-gb: a feature store needs a bound"),
        ({"gb": 1e9}, r"--store-gb: 1e\+09 GB, but .* more to give"),
        ({"dtype": "int4"}, "--store-dtype: must be bfloat16 or fp8, got 'int4'"),
        ({"taps": (3, 1)}, "taps: must ascend"),
    ],
)
def test_options_that_cannot_be_used_are_named(tmp_path, options, message):
    """One line each."""
    with pytest.raises(OptionError, match=f"^{message}"):
        opened(tmp_path / "new", **options)


def test_a_bound_without_a_store_and_a_file_in_its_place_are_refused(tmp_path):
    """Neither is ignored."""
    with pytest.raises(OptionError, match=r"^--store-gb: bounds a feature store; name its folder"):
        open_source(history_model(V), TAPS, gb=1)
    (tmp_path / "file").write_text("x")
    with pytest.raises(OptionError, match=r"^--feature-store: .*file"):
        opened(tmp_path / "file")


# ----------------------------------------------------------------------------------------------------------- the files


def test_an_append_is_all_or_nothing(tmp_path):
    """An interruption of any kind in the middle of it takes back what was written."""
    shard = Shard.fresh(tmp_path)
    shard.append([Item("a", 1, torch.arange(100, dtype=torch.uint8))])
    before = shard.size
    with pytest.raises(AttributeError):
        shard.append([Item("b", 1, torch.arange(9, dtype=torch.uint8)), Item("c", 1, None)])  # type: ignore[arg-type]
    assert shard.size == before
    shard.append([Item("d", 1, torch.arange(50, 90, dtype=torch.uint8))])
    entries, damaged = Shard(tmp_path, shard.name).news()
    assert ([entry.key for entry in entries], damaged) == (["a", "d"], 0)
    assert shard.read(entries[1], 40).tolist() == list(range(50, 90))
    assert all(entry.offset % 64 == 0 for entry in entries)


def test_reading_is_noted_for_eviction(tmp_path, samples):
    """A shard that is read counts as used from then on."""
    source = opened(tmp_path)
    source.batch(samples)
    (index,) = files(tmp_path, ".idx")
    os.utime(index, (1, 1))
    now = time.time_ns()
    source.batch(samples[:1])
    assert index.stat().st_mtime_ns >= now
