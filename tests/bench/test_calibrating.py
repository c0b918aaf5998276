"""Confidences recorded, scaled and judged: by whole rounds, on prompts that were held out, through interruptions."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from bench.clocks import engine, target
from forerun.bench.calibrating import report
from forerun.bench.calibrating.assessment import Rounds, assess, split
from forerun.bench.calibrating.place import calibration_file
from forerun.bench.calibrating.recorder import Recorder, Recording, logit
from forerun.bench.calibrating.rounds_file import PromptRounds, RoundsFile
from forerun.bench.provenance import provenance
from forerun.budget.calibration import CalibrationKey
from forerun.budget.scaling import fit_temperatures, sigmoid
from forerun.budget.stored import CALIBRATION, CALIBRATION_OF_COPIES, write_calibration
from forerun.drafters.config import SpeculativeConfig
from forerun.drafters.fake import Oracle
from forerun.drafters.small import Small
from forerun.drafters.vanilla import Vanilla
from forerun.engine import Engine, EngineOptions
from forerun.engine.load import load_drafters
from forerun.engine.propose import LoadedDrafter
from forerun.errors import OptionError
from forerun.sampling import Sampling
from forerun.target.table import history_model, position_model

KEY = CalibrationKey("rejection", "probabilistic", "one")
PROMPTS = [[1, 2, 3], [4, 4, 1], [0, 6, 2], [5, 1], [3, 3, 3, 2]]
RECORDING = Recording(PROMPTS, Sampling(temperature=1.0, max_tokens=14, ignore_eos=True), (0.0,), batch=2)


def overconfident(prompts, rounds, k=3, seed=0):
    """Rounds whose true logits are half of what is said."""
    rng = np.random.default_rng(seed)
    out = []
    for prompt in range(prompts):
        said = rng.normal(2.0, 1.5, size=(rounds, k))
        alive = np.cumprod(rng.random((rounds, k)) < sigmoid(said / 2), axis=1)
        out.append(PromptRounds("small", 1.0, prompt, said.round(6).tolist(), alive.sum(axis=1).tolist(), 1))
    return out


def wrong_now_and_then(k=3, **options):
    """An engine whose small drafter is another model: some drafts survive, most do not."""
    big = target()
    chosen = EngineOptions.of({"num_speculative_tokens": k, **options})
    return Engine(big, load_drafters([Small(position_model(7, seed=8), 7)], big, chosen), chosen)


# ------------------------------------------------------------------------------------------------------------- the fit


def test_scaling_mends_overconfidence_on_prompts_it_has_not_seen():
    """True temperature 2 at each position: found, and the held-out error falls to the floor of so many rounds."""
    made = assess(KEY, overconfident(40, 250), "prompts")
    assert made.table.temperatures == pytest.approx((2.0, 2.0, 2.0), rel=0.3)
    assert made.table.num_samples == made.held_out_rounds == 5000
    assert made.left_out == 40
    for position in made.positions:
        assert position.before.ece > 0.05
        assert position.after.ece < position.after.floor + 0.02
        high = position.after.ece_interval.high
        assert position.after.ece < high < 0.05
        assert position.before.ece_interval.low < position.before.ece < position.before.ece_interval.high
        assert position.after.brier < position.before.brier
        assert position.after.auroc > 0.6
    assert made.holds
    assert made.table.ece_after == tuple(position.after.ece for position in made.positions)


def test_other_engines_get_temperatures_alone_and_what_those_are_worth():
    """SGLang's file: `temperatures`, `dataset`, `num_samples` and the errors, all lists as long as K. It knows no
    shifts, so neither the fit with them nor its error may stand there."""
    biased = [replace(one, accepted=[0 if min(z) < 1 else n for z, n in zip(one.logits, one.accepted, strict=True)])
              for one in overconfident(40, 250)]  # fmt: skip
    made = assess(KEY, biased, "held out")
    exported = made.sglang()
    alone = fit_temperatures(*(getattr(Rounds.of(split(biased, 0.5, 0)[0]), name) for name in ("logits", "labels")))
    assert exported["temperatures"] == list(alone) != list(made.table.temperatures)
    assert (exported["dataset"], exported["num_samples"]) == ("held out", 5000)
    assert exported["ece_before"] == list(made.table.ece_before)
    assert exported["ece_after"] == [position.by_temperatures.ece for position in made.positions]
    assert exported["ece_after"][0] > made.table.ece_after[0] + 0.02
    assert json.loads(json.dumps(exported)) == exported


def test_a_fit_that_does_harm_is_known_as_such():
    """Prompts to judge on that are the contrary of those to fit on: the error grows, and the table does not hold."""
    recorded = overconfident(20, 100)
    fitting, judging = split(recorded, 0.5, seed=0)
    numbers = {one.prompt for one in judging}
    sure = [replace(one, accepted=[3 if min(z) > 0 else 0 for z in one.logits]) for one in recorded]
    never = [replace(one, accepted=[0] * len(one.accepted)) for one in recorded]
    mixed = [sure[one.prompt] if one.prompt in numbers else never[one.prompt] for one in recorded]
    assert not assess(KEY, mixed, "prompts").holds
    assert len(fitting) == 10


def test_prompts_are_on_one_side_only():
    """Rounds of a prompt are dependent: the split is by prompt, and the same for the same seed."""
    recorded = overconfident(20, 5)
    fitting, judging = split(recorded, 0.25, seed=3)
    assert (len(fitting), len(judging)) == (15, 5)
    assert not {one.prompt for one in fitting} & {one.prompt for one in judging}
    assert split(list(reversed(recorded)), 0.25, seed=3) == (fitting, judging)
    assert split(recorded, 0.25, seed=4) != (fitting, judging)


def test_prompts_without_a_whole_round_count_for_neither_side():
    """They would make a side look fuller than it is."""
    empty = [PromptRounds("small", 1.0, 90 + i, [], [], 3) for i in range(10)]
    fitting, judging = split([*overconfident(4, 5), *empty], 0.5, seed=0)
    assert (len(fitting), len(judging)) == (2, 2)


@pytest.mark.parametrize(("prompts", "rounds"), [(0, 0), (1, 1000), (2, 1000), (40, 2)])
def test_too_little_is_refused(prompts, rounds):
    """One prompt a side, or fewer than a hundred rounds: the message says what there was and what to do."""
    with pytest.raises(OptionError, match=r"--prompts: .* give more prompts, or more --max-tokens"):
        assess(KEY, overconfident(prompts, rounds), "prompts")


def test_labels_are_survivals():
    """accepted 0, 2, 3 of K = 3."""
    rounds = Rounds.of([PromptRounds("small", 0.0, 5, [[0.0] * 3] * 3, [0, 2, 3])])
    assert rounds.labels.tolist() == [[0, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert rounds.prompts == [5, 5, 5]


# ----------------------------------------------------------------------------------------------------------- recording


def test_plain_decoding_has_nothing_to_record():
    """`vanilla` among the drafters is passed over: it says nothing and nothing of it is verified."""
    big = target()
    chosen = EngineOptions.of({"num_speculative_tokens": 3})
    drafters = [Vanilla(), Small(position_model(7, seed=8), 7)]
    recorder = Recorder(Engine(big, load_drafters(drafters, big, chosen), chosen), RECORDING, RoundsFile(None, "key"))
    assert [one.entry.name for one in recorder.conditions()] == ["small"]
    assert recorder.total == len(PROMPTS)


def test_whole_rounds_are_recorded_as_the_engine_judged_them():
    """K logits each; what is accepted and left out sums to the engine's own counters."""
    made = wrong_now_and_then()
    recorder = Recorder(made, RECORDING, RoundsFile(None, "key"))
    [conditions] = recorder.conditions()
    assert (conditions.k, conditions.key) == (3, CalibrationKey("rejection", "probabilistic", "greedy"))
    told = []
    done = recorder.record(conditions, told.append)
    assert sum(told) == recorder.total == len(PROMPTS)
    assert [one.prompt for one in done] == [0, 1, 2, 3, 4]
    again = made.generate(PROMPTS, [RECORDING.of(0.0, i) for i in range(len(PROMPTS))])
    for one, completion in zip(done, again, strict=True):
        stats = completion.stats
        assert len(one.accepted) + one.left_out == stats.drafting_rounds
        assert len(one.accepted) == stats.verified_by_position[2]
        assert sum(n == 3 for n in one.accepted) == stats.accepted_by_position[2]
        assert all(len(row) == 3 and all(map(math.isfinite, row)) for row in one.logits)
    assert made.core.on_round is None
    assert 0 < sum(sum(one.accepted) for one in done) < 3 * sum(len(one.accepted) for one in done)


def test_a_round_cut_by_the_end_of_a_request_is_left_out():
    """It has no labels behind the cut. 7 tokens: 1 from the prompt, 4 of a whole round, 2 of a round with one draft."""
    made = engine(k=3)
    short = Recording(PROMPTS[:1], Sampling(temperature=1.0, max_tokens=7, ignore_eos=True), (0.0,))
    recorder = Recorder(made, short, RoundsFile(None, "key"))
    [done] = recorder.record(recorder.conditions()[0], lambda n: None)
    assert (done.accepted, done.left_out) == ([3], 1)


def test_enough_rounds_are_enough():
    """Prompts begun together are finished, the others are not begun."""
    made = wrong_now_and_then()
    few = Recording(PROMPTS, RECORDING.sampling, (0.0,), batch=2, rounds=1)
    told = []
    recorder = Recorder(made, few, RoundsFile(None, "key"))
    done = recorder.record(recorder.conditions()[0], told.append)
    assert [one.prompt for one in done] == [0, 1]
    assert sum(told) == len(PROMPTS)


def test_a_drafter_without_confidences_is_refused():
    """There is nothing to calibrate, and it is said so."""
    big = target()
    oracle = Oracle({tuple(prompt): [0] * 50 for prompt in PROMPTS})
    made = Engine(big, [LoadedDrafter(oracle, SpeculativeConfig(method="oracle"))])
    recorder = Recorder(made, RECORDING, RoundsFile(None, "key"))
    with pytest.raises(OptionError, match="gives no confidences"):
        recorder.record(recorder.conditions()[0], lambda n: None)
    assert made.core.on_round is None


@pytest.mark.parametrize(("confidence", "expected"), [(0.5, 0.0), (0.0, -16.635532), (1.0, 16.635532)])
def test_saturated_confidences_have_finite_logits(confidence, expected):
    """A sigmoid in half precision gives exactly 0 and 1."""
    assert logit(confidence) == pytest.approx(expected, abs=1e-5)


# ------------------------------------------------------------------------------------------------------------ the file


def test_an_interrupted_recording_goes_on_where_it_was(tmp_path, monkeypatch):
    """Interrupted in the second group of two prompts: only those that are missing are decoded, with the same result."""
    path = tmp_path / "rounds.jsonl"
    whole = _recorded(wrong_now_and_then(), None)
    made, begun = wrong_now_and_then(), []
    real = made.submit

    def submit(prompts, *args, **options):
        begun.append(len(prompts))
        if len(begun) > 1:
            raise KeyboardInterrupt
        return real(prompts, *args, **options)

    monkeypatch.setattr(made, "submit", submit)
    with pytest.raises(KeyboardInterrupt):
        _recorded(made, path)
    path.write_bytes(path.read_bytes()[:-9])  # the last line was being written
    again = wrong_now_and_then()
    assert "1 finished prompts are kept" in RoundsFile(path, "key").note
    assert _recorded(again, path) == whole
    assert len(path.read_text().splitlines()) == 1 + len(PROMPTS)
    monkeypatch.setattr(again, "submit", lambda *args, **options: pytest.fail("everything was done"))
    assert _recorded(again, path) == whole


def _recorded(made, path):
    recorder = Recorder(made, RECORDING, RoundsFile(path, "key"))
    return recorder.record(recorder.conditions()[0], lambda n: None)


def test_rounds_of_something_else_are_kept_aside(tmp_path):
    """Another key: nothing of it is used, nothing is lost."""
    path = tmp_path / "rounds.jsonl"
    RoundsFile(path, "one").add(PromptRounds("small", 0.0, 0, [[1.0]], [1]))
    before = path.read_text()
    other = RoundsFile(path, "two")
    assert other.get("small", 0.0, 0) is None
    assert "rounds of another model" in other.note
    assert (tmp_path / "rounds.jsonl.old").read_text() == before


@pytest.mark.parametrize("text", ["milk\neggs\n", "[1]\n", '{"key": "one", "made_with": {}}\n'])
def test_what_is_no_file_of_rounds_is_refused_and_left_alone(tmp_path, text):
    """Among them the rows of `forerun bench`, which have a key as well."""
    path = tmp_path / "notes.txt"
    path.write_text(text)
    with pytest.raises(OptionError, match="--rows"):
        RoundsFile(path, "one")
    assert path.read_text() == text


# -------------------------------------------------------------------------------------------------------------- places


def test_a_drafter_of_ours_keeps_its_calibration_with_it(tmp_path):
    """What `forerun train` wrote; any other model, and n-grams, have theirs beside the profiles."""
    ours, foreign, cache = tmp_path / "ours", tmp_path / "foreign", tmp_path / "cache"
    for folder, config in ((ours, {"forerun_format": 1}), (foreign, {"model_type": "qwen3"})):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
    big = history_model(7, seed=3)

    def place(folder=cache, **config):
        return calibration_file(big, LoadedDrafter(Oracle({}), SpeculativeConfig(**config)), folder)

    assert place(model=str(ours)) == ours / CALIBRATION
    assert place(model=str(foreign)).parent == cache
    assert place(method="ngram").parent == cache
    assert place(method="ngram") != place(model=str(foreign))
    assert place(None, method="ngram") is None
    assert place(None, model=str(ours)) == ours / CALIBRATION
    copying = {"prompt_lookup_max": 4}  # other confidences, hence another calibration
    assert place(model=str(ours), method="small", **copying) == ours / CALIBRATION_OF_COPIES
    assert place(model=str(foreign), method="small", **copying) != place(model=str(foreign))
    assert place(method="ngram", **copying) == place(method="ngram")


def test_decoding_reads_what_was_written(tmp_path):
    """The table of the conditions, found by the engine in the drafter's own folder."""
    from forerun.engine.tuning import scheduling_of

    (tmp_path / "config.json").write_text(json.dumps({"forerun_format": 1}))
    big = target()
    entry = LoadedDrafter(Small(target(), 7), SpeculativeConfig(method="small", model=str(tmp_path)))
    made = assess(KEY, overconfident(8, 60), "prompts")
    assert scheduling_of(big, [entry], EngineOptions(), look_up=False).calibrated_for is None
    write_calibration(calibration_file(big, entry, None), [made.table])
    assert scheduling_of(big, [entry], EngineOptions(), look_up=False).calibrated_for == "probabilistic"


# ------------------------------------------------------------------------------------------------------------- reports


def test_the_page_needs_nothing_beside_it(tmp_path):
    """One file: pictures inside, no link to anywhere; every position with its numbers; the data as CSV."""
    made = [assess(KEY, overconfident(8, 60), "a <b> & c", seed=seed) for seed in (0, 1)]
    made_with = provenance(engine())
    written = report.draw_calibrations(made[:1], tmp_path, "forerun calibrate --prompts 'a <b>'", made_with)
    assert [path.name for path in written] == ["reliability-small-one-rejection-probabilistic.png", report.NAME]
    page = written[-1].read_text()
    assert page.count("data:image/png;base64,") == 1
    assert '="http' not in page
    assert "<b>" not in page
    assert report.setting(made_with) in page
    assert page.count("<tr>") == 1 + 3
    assert len(written[0].with_suffix(".csv").read_text().splitlines()) == 1 + len(report.bins(made[0]))


def test_json_has_no_nan():
    """Empty bins have no means; an AUROC that does not exist is null."""
    made = assess(KEY, overconfident(8, 60), "prompts")
    document = json.loads(json.dumps(made.as_dict(), allow_nan=False))
    assert [position["position"] for position in document["positions"]] == [1, 2, 3]
    assert document["table"]["key"]["temperature"] == "one"
    assert report.table(made).row_count == 3
