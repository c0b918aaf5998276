"""A profile of a real engine: which steps are run, and that nothing is left behind. The clock counts its readings."""

from __future__ import annotations

import itertools

import pytest

from drafters.kinds import drafting
from drafters.learning import tiny_target
from forerun import Engine, Sampling
from forerun.bench.profiling.drafting import DraftCalls
from forerun.bench.profiling.grid import Call
from forerun.bench.profiling.profiler import ProfileOptions, Profiler, longest_draft
from forerun.bench.profiling.report import drafter_table, draw_profile, remarks, target_table
from forerun.budget.profile import Profile
from forerun.drafters.config import parse_config
from forerun.drafters.ngram import Ngram
from forerun.drafters.small import Small
from forerun.drafters.vanilla import Vanilla
from forerun.engine import EngineOptions
from forerun.engine.load import load_drafters
from forerun.engine.profile_key import engine_key
from forerun.engine.propose import LoadedDrafter
from forerun.errors import OptionError

TEXT = [10, 20, 30, 40, 50, 20, 30, 40, 7]
KINDS = ["ngram", "small", "eagle3", "dspark"]


def ticks():
    """A clock on which everything takes one second."""
    counter = itertools.count()
    return lambda: float(next(counter))


def engine_with(*names, **options):
    target = tiny_target()
    made = {
        "ngram": lambda: Ngram(prompt_lookup_max=2, prompt_lookup_min=1),
        "small": lambda: Small(tiny_target(layers=2), target.vocab_size),
    }
    drafters = [made[name]() if name in made else drafting(name, target) for name in names]
    chosen = EngineOptions.of(
        {"max_num_seqs": 4, "max_num_batched_tokens": 128, "num_speculative_tokens": 3, **options}
    )
    return Engine(target, load_drafters(drafters, target, chosen), chosen)


def watch(monkeypatch, engine):
    """(requests, rows) of every pass of the target."""
    seen, real = [], engine.target.forward

    def forward(batch, taps=()):
        seen.append([len(segment.tokens) for segment in batch.segments])
        return real(batch, taps)

    monkeypatch.setattr(engine.target, "forward", forward)
    return seen


def test_every_kind_of_drafter_is_measured_and_forgets_it(monkeypatch):
    """All books balance afterwards, and the engine decodes what it decoded before."""
    engine = engine_with(*KINDS)
    sampling = Sampling(temperature=0, max_tokens=12, ignore_eos=True)
    before = engine.generate([TEXT], sampling)
    profiler = Profiler(engine, TEXT, ProfileOptions(seconds=1e9, rows=20), ticks())
    told = []
    findings = profiler.run(lambda steps, note="": told.append(steps))
    assert sum(told) <= profiler.total
    engine.audit()
    assert engine.core.pool.used == 0
    assert engine.core.loaded[1].drafter._tables.used == 0
    profile = findings.profile
    assert profile.key == engine_key(engine.target)
    assert set(profile.drafts) == set(KINDS)
    assert all(max(cost.lengths) == 3 for cost in profile.drafts.values())
    assert Profile.loads(profile.dumps()) == profile
    after = engine.generate([TEXT], sampling)
    assert [c.token_ids for c in after] == [c.token_ids for c in before]


def test_the_steps_are_those_of_decoding(monkeypatch):
    """Each row count up to the limit in a pass over requests behind a computed context; plain steps of every size."""
    engine = engine_with()
    seen = watch(monkeypatch, engine)
    Profiler(engine, TEXT, ProfileOptions(seconds=1e9, rows=20), ticks()).run()
    shapes = {(len(rows), sum(rows)) for rows in seen}
    assert {(-(-n // 8), n) for n in range(1, 18)} | {(2, 2), (4, 4), (3, 20)} <= shapes
    assert seen[:4] == [[64]] * 4  # four contexts of a quarter of the window


def test_drafters_draft_for_real(monkeypatch):
    """Every call of a drafter that always proposes yields K tokens for each request, also after many walks."""
    engine = engine_with("small", "eagle3", "dspark")
    for entry in engine.core.loaded:
        made, real = [], entry.drafter.propose

        def propose(views, keep, real=real, made=made):
            proposal = real(views, keep)
            made.append([len(draft.tokens) for draft in proposal])
            return proposal

        monkeypatch.setattr(entry.drafter, "propose", propose)
        calls = DraftCalls(engine, entry, TEXT * 30, Sampling(temperature=0), ticks())
        calls.prepare(200)
        for _ in range(120):
            calls(Call(2, 3, 40))
        calls.close()
        assert made == [[1, 1]] + [[3, 3]] * 120  # first their prompts are taken in
        entry.drafter.audit()


@pytest.mark.parametrize("name", ["small", "eagle3"])
def test_following_is_what_it_costs_to_draft_again(monkeypatch, name):
    """A model of its own takes committed tokens in when it is asked again, one that reads features as they come: a
    clock that counts the rows either computes says one a token, that of the draft itself left out. Nothing is kept."""
    engine = engine_with(name)
    [entry] = engine.core.loaded
    rows = [0]
    if name == "small":
        model, real = entry.drafter.model, entry.drafter.model.forward
        monkeypatch.setattr(model, "forward", lambda batch: rows.append(len(batch.token_ids)) or real(batch))
    else:
        chain, fuse = entry.drafter._rows, entry.drafter._rows._fuse
        monkeypatch.setattr(chain, "_fuse", lambda features: rows.append(len(features)) or fuse(features))
    calls = DraftCalls(engine, entry, TEXT * 30, Sampling(temperature=0), lambda: float(sum(rows)))
    calls.prepare(200)
    assert calls.follow(40) == pytest.approx(1.0, abs=0.02)
    calls.close()
    entry.drafter.audit()
    assert all(not held for held in _held(entry.drafter))


def _held(drafter):
    """What a drafter keeps by request."""
    if drafter.name == "small":
        return [drafter._tables._tables]
    return [drafter._rows._paired, drafter._rows._cache.lengths]


def test_known_costs_of_the_target_are_kept(monkeypatch):
    """Only drafters are measured then: no pass of the target but for features."""
    engine = engine_with("ngram")
    first = Profiler(engine, TEXT, ProfileOptions(seconds=1e9, rows=4), ticks()).run()
    seen = watch(monkeypatch, engine)
    again = Profiler(engine, TEXT, ProfileOptions(seconds=1e9, rows=4), ticks(), first.profile.verify)
    assert again.run().profile.verify is first.profile.verify
    assert seen == []


def test_storage_without_room_is_refused_by_name():
    """Two blocks hold no drafting request."""
    engine = engine_with("small")
    per_block = engine.target.block_bytes + engine.core.loaded[0].drafter.block_bytes
    tight = engine_with("small", kv_cache_memory_bytes=2 * per_block)
    with pytest.raises(OptionError, match="kv_cache_memory_bytes"):
        Profiler(tight, TEXT, ProfileOptions(seconds=1e9, rows=4), ticks()).run()


@pytest.mark.parametrize(
    ("drafter", "config", "longest"),
    [
        (Vanilla(), {}, 0),
        (Ngram(), {}, Ngram.default_draft),
        (Ngram(), {"num_speculative_tokens": 0}, 0),
        (Ngram(), {"num_speculative_tokens_per_batch_size": [[2, 4, 2], [5, 8, 9]]}, 9),
        (Ngram(), {"num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [[1, 4, 5]]}, 3),
    ],
)
def test_the_longest_draft_is_the_one_that_is_ever_made(drafter, config, longest):
    """At any batch size, within `num_speculative_tokens` and what the drafter can make: 0 of plain decoding."""
    assert longest_draft(LoadedDrafter(drafter, parse_config({"method": drafter.name, **config}))) == longest


@pytest.mark.parametrize("options", [{"seconds": 0}, {"seconds": float("nan")}, {"rows": 0}, {"requests": 0}])
def test_what_cannot_be_measured_is_refused(options):
    """The option is named."""
    with pytest.raises(OptionError, match=next(iter(options))):
        ProfileOptions(**options)


def test_a_profile_is_shown(tmp_path):
    """Tables, remarks, and pictures with their data."""
    profile = Profiler(engine_with("ngram"), TEXT, ProfileOptions(seconds=1e9, rows=8), ticks()).run().profile
    assert target_table(profile).row_count == 8
    assert drafter_table(profile).row_count == 3
    assert any("ngram" in line for line in remarks(profile))
    written = draw_profile(profile, tmp_path, "forerun profile")
    assert [path.name for path in written] == ["target.png", "drafters.png"]
    assert (tmp_path / "target.csv").read_text().splitlines()[0] == "rows,seconds"
