"""A comparison of drafters: what it measures, what it concludes, and that it says so when a text is not the same."""

from __future__ import annotations

import itertools
import json
import math
import re
from contextlib import contextmanager
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from bench.clocks import PASS, ROW, VOCAB, target
from bench.load.clocks import MOST, PassClock, three_engines
from bench.rounding import Rounding, near_ties
from bench.simulate.worlds import profile
from drafters.kinds import drafting
from drafters.learning import tiny_target
from forerun.bench.comparing import study as module
from forerun.bench.comparing.choices import Speed, choose, worth_their_memory
from forerun.bench.comparing.confidence import Questions, confidence
from forerun.bench.comparing.equality import EXAMINED
from forerun.bench.comparing.facts import Facts, facts_of, origin
from forerun.bench.comparing.markdown import markdown, plain
from forerun.bench.comparing.page import marked, page
from forerun.bench.comparing.report import show
from forerun.bench.comparing.sections import Findings, sameness
from forerun.bench.comparing.study import Contender, Study
from forerun.bench.comparing.trend import LEAST_ROUNDS, counts_of, shown_of, trend
from forerun.bench.load.arrivals import Load
from forerun.bench.load.trial import Traffic, Way
from forerun.bench.recommending.acceptance import Shown
from forerun.bench.screen import size, text_of
from forerun.budget.costs import DraftCost
from forerun.drafters.base import LoadContext
from forerun.drafters.config import SpeculativeConfig
from forerun.drafters.ngram import Ngram
from forerun.drafters.small import Small
from forerun.drafters.vanilla import Vanilla
from forerun.engine import Engine, EngineOptions
from forerun.engine.load import load_drafters
from forerun.engine.propose import LoadedDrafter
from forerun.errors import OptionError
from forerun.sampling import Sampling
from forerun.target.load import load_target
from forerun.target.table import TableTarget, history_model

FREE = DraftCost.measured({1: {1: 0.0}, 8: {1: 0.0}})
COSTS = profile({n: PASS + ROW * n for n in (1, 2, 64)}, {"small": FREE, "ngram": FREE})
PROMPTS = [[1, 2, 3], [4, 4, 1], [0, 6, 2]]
TRAFFIC = Traffic(PROMPTS, max_tokens=(6, 12), requests=4, pairs=3, ignore_eos=True)
QUESTIONS = Questions(PROMPTS, Sampling(temperature=0, max_tokens=12, ignore_eos=True, seed=0), 2, None)
LOADS = [Load(concurrency=1), Load(concurrency=2)]
LABELS = {"small": "small", "ngram": "ngram <b>|x|</b>"}


def contender(name, engines, ways=None, **changed):
    """A drafter with engines that are there already."""
    made = ways or engines.ways([name])[1:]

    @contextmanager
    def enter():
        yield made

    passes, parameters = (MOST, 1000) if name == "small" else (0, 0)
    facts = Facts(name, MOST, passes, 0, parameters, 4 * parameters, 64 if passes else 0)
    identity = {"name": name, **changed}
    return Contender(LABELS[name], f"--drafter {name}", facts, identity, [way.label for way in made], enter)


def study(path=None, names=("small", "ngram"), loads=LOADS, traffic=TRAFFIC, **changed):
    rings = {name: three_engines(COSTS, [name]) for name in names}
    plain_engine = three_engines(COSTS, ["small"]).plain
    clock = PassClock([plain_engine, *(engine for ring in rings.values() for engine in ring.all)])
    contenders = [contender(name, ring, **changed) for name, ring in rings.items()]
    return Study(plain_engine, contenders, loads, traffic, QUESTIONS, clock, path)


@pytest.fixture(scope="module")
def findings():
    """Of a perfect drafter and of n-grams on random texts."""
    result = study().run()
    result.absent = {"dspark": "not asked for; train one: `forerun train dspark --out runs/dspark`"}
    return Findings.of(result)


# ---------------------------------------------------------------------------------------------------------------- rows


def test_every_drafter_has_a_row_a_load_and_one_about_its_confidence(findings):
    """Plain decoding is beside each; rates are those of the metrics list; a perfect drafter keeps all."""
    result = findings.result
    found = [(row["drafter"], row["what"], row.get("concurrency")) for row in result.rows]
    assert found == [
        (label, *rest) for label in LABELS.values() for rest in (("speed", 1), ("speed", 2), ("confidence", None))
    ]
    for row in result.speeds():
        assert list(row["ways"]) == ["plain", f"fixed:{MOST}", "delayed"]
        assert all(len(costs) == TRAFFIC.pairs for costs in row["seconds_per_token"].values())
    rates = findings.fixed("small")
    assert rates["acceptance_by_position"] == rates["prefix_survival"] == [1.0] * MOST
    assert rates["draft_acceptance_rate"] == 1.0
    json.dumps(findings.as_dict(), allow_nan=False)


def test_a_speed_up_is_that_of_its_neighbours(findings):
    """Plain seconds per token over the way's, pair by pair, as `forerun bench load` has them."""
    [row] = [row for row in findings.result.speeds("small") if row["concurrency"] == 1]
    speed = next(s for s in findings.speeds if (s.drafter, s.way, s.load) == ("small", f"fixed:{MOST}", "1"))
    costs = row["seconds_per_token"]
    assert speed.pairs == [a / b for a, b in zip(costs["plain"], costs[f"fixed:{MOST}"], strict=True)]
    assert speed.median > 1.5
    assert 1 < speed.low <= speed.mean <= speed.high
    assert speed.round_cost == pytest.approx(speed.tokens_per_step / speed.mean)


def test_acceptance_is_kept_by_prompt(findings):
    """Greedy decoding of the same prompt again is no new evidence: three prompts, whatever the number of turns."""
    for row in findings.result.speeds():
        shown = shown_of(row["acceptance"])
        way = row["ways"][f"fixed:{MOST}"]
        assert shown.prompts == len(PROMPTS)
        assert shown.accepted.sum() == way["accepted"]
        assert shown.steps.sum() == way["target_steps"]
        assert shown_of(counts_of(shown)).survival().tolist() == shown.survival().tolist()


def test_an_interrupted_comparison_goes_on(monkeypatch, tmp_path):
    """Interrupted in the third of four loads: the finished rows stay, and the result is that of a whole run."""
    path, real, begun = tmp_path / "rows.jsonl", module.measure, []

    def measure(ways, drafter, load, *rest):
        begun.append((drafter, str(load)))
        if len(begun) == 3:
            raise KeyboardInterrupt
        return real(ways, drafter, load, *rest)

    whole = study(tmp_path / "other.jsonl")
    total = whole.total
    with monkeypatch.context() as patched:
        patched.setattr(module, "measure", measure)
        with pytest.raises(KeyboardInterrupt):
            study(path).run()
        again = study(path)
        assert "3 finished rows are kept" in again.note
        told, left = [], total - 2 * 3 * (TRAFFIC.pairs + 1) - len(PROMPTS)
        assert again.total == left
        result = again.run(lambda steps=1, note="": told.append(steps))
        assert sum(told) == left
    assert begun[2:] == [(LABELS["ngram"], "1"), (LABELS["ngram"], "1"), (LABELS["ngram"], "2")]
    kept = [row["drafter"] for row in result.rows]
    assert kept == [row["drafter"] for row in whole.run().rows]
    finished = study(path)
    assert finished.total == 0
    assert finished.run().rows == result.rows


def test_another_drafter_under_the_same_name_is_measured_anew(tmp_path):
    """Weights, options and costs belong to a row; drafters and loads can be added to a file."""
    path = tmp_path / "rows.jsonl"
    study(path, ["ngram"], LOADS[:1]).run()
    assert study(path, ["ngram"], LOADS[:1]).total == 0
    runs = 3 * (TRAFFIC.pairs + 1)
    assert study(path, ["ngram"], LOADS).total == runs
    assert study(path, ["small", "ngram"], LOADS[:1]).total == runs + len(PROMPTS)
    assert study(path, ["ngram"], LOADS[:1], weights="others").total == runs + len(PROMPTS)


def test_a_file_that_is_none_of_rows_is_refused_by_the_option_it_came_by(tmp_path):
    """The rows lie in the folder of --out."""
    path = tmp_path / "rows.jsonl"
    path.write_text("milk\n")
    with pytest.raises(OptionError, match=r"^--out: .*not a file of rows"):
        study(path)


# ------------------------------------------------------------------------------------------------------------ sameness


def test_equal_ids_are_counted_and_said_first(findings):
    """4 requests, 3 turns, 2 loads, 2 ways, 2 drafters."""
    assert findings.result.lossless is True
    [line] = sameness(findings.result)
    assert line.startswith("LOSSLESS here: every one of 96 outputs")


def test_a_drafter_over_another_model_is_not_lossless():
    """Its engine decodes another text than plain decoding: said at the top, with every place that was looked at."""
    ring = three_engines(COSTS, ["small"])
    other = history_model(VOCAB, seed=99, window=256)
    options = EngineOptions(num_speculative_tokens=MOST)
    wrong = Engine(other, load_drafters([Small(target(), VOCAB)], other, options), options)
    ways = [Way(f"fixed:{MOST}", wrong, {"method": "small", "max_draft": MOST}, MOST)]
    clock = PassClock([ring.plain, wrong])
    one = contender("small", ring, ways)
    result = Study(ring.plain, [one], LOADS[:1], TRAFFIC, QUESTIONS, clock).run()
    assert result.lossless is False
    first, *rest = sameness(result)
    assert first.startswith("NOT LOSSLESS: 12 of 12 outputs")
    assert rest
    assert all(line.startswith("DIFFERS: small, fixed:4, one request at a time: prompt") for line in rest)
    ruling = result.speeds()[0]["equality"][f"fixed:{MOST}"]
    assert ruling["different"] == ruling["outputs"] == 12
    assert len(ruling["differences"]) <= EXAMINED
    top = text_of(lambda console: show(Findings.of(result), console)).splitlines()[1]
    assert top.startswith("NOT LOSSLESS")


_near_ties = near_ties(VOCAB)


def _rounding_study(kind, drafts=_near_ties):
    options = EngineOptions(num_speculative_tokens=MOST)
    targets = [kind(_near_ties, VOCAB) for _ in range(2)]
    bare = Engine(targets[0], [], options)
    twin = Small(TableTarget(drafts, VOCAB), VOCAB)
    drafted = Engine(targets[1], load_drafters([twin], targets[1], options), options)
    ways = [Way(f"fixed:{MOST}", drafted, {"method": "small", "max_draft": MOST}, MOST)]
    one = contender("small", None, ways)
    traffic = Traffic(PROMPTS, max_tokens=(16, 24), requests=4, pairs=2, ignore_eos=True)
    return Study(bare, [one], LOADS[:1], traffic, QUESTIONS, PassClock([bare, drafted])).run()


def test_in_low_precision_a_margin_below_the_noise_explains_a_difference():
    """Near ties flip in verify blocks; the margin and the measured noise are kept, the claim says `up to rounding`."""
    result = _rounding_study(Rounding)
    ruling = result.speeds()[0]["equality"][f"fixed:{MOST}"]
    assert ruling["different"] > 0
    assert ruling["unexplained"] == 0
    assert all(one["margin"] < one["noise"] for one in ruling["differences"])
    first, *rest = sameness(result)
    assert first.startswith("LOSSLESS up to rounding:")
    assert rest[0].startswith("rounding: ")


def test_in_float32_the_same_margin_explains_nothing():
    """There no difference is accepted, and each is listed with its margin."""

    class Exactly(Rounding):
        dtype = torch.float32

    result = _rounding_study(Exactly)
    assert result.lossless is False
    lines = list(sameness(result))
    assert lines[0].startswith("NOT LOSSLESS")
    assert any("margin 0.0625, none is accepted in this dtype" in line for line in lines[1:])


def test_sampled_texts_are_not_compared():
    """Verification by rejection keeps the law and not the ids."""
    traffic = Traffic(PROMPTS, max_tokens=(6, 8), requests=2, pairs=2, temperature=0.8, ignore_eos=True)
    result = study(names=["ngram"], loads=LOADS[:1], traffic=traffic).run()
    assert result.lossless is None
    assert "forerun verify" in next(sameness(result))


# --------------------------------------------------------------------------------------------------------------- trend


def seen(rates, rounds=400, prompts=10, spread=0.0):
    """Counts of prompts with these conditional rates, every second one above and below by `spread`."""
    reached, accepted = np.zeros((prompts, len(rates))), np.zeros((prompts, len(rates)))
    for row in range(prompts):
        alive = float(rounds)
        for k, rate in enumerate(rates):
            moved = rate + spread * (1 if row % 2 else -1) * (1 if k % 2 else -1)
            reached[row, k], accepted[row, k] = alive, alive * moved
            alive *= moved
    return Shown(reached, accepted, np.full(prompts, float(rounds)), np.full(prompts, float(rounds)))


@pytest.mark.parametrize(
    ("rates", "word"), [([0.9, 0.8, 0.7, 0.6], "falls"), ([0.6, 0.7, 0.8], "rises"), ([0.7] * 4, "level")]
)
def test_decay_is_the_slope_of_acceptance_by_position(rates, word):
    """A line through the rates; the step between them is found whatever the weights."""
    found = trend(seen(rates))
    assert found.word == word
    assert found.slope == pytest.approx(rates[1] - rates[0], abs=1e-9)
    assert found.positions == len(rates)


def test_a_slope_within_its_spread_is_no_decay():
    """Prompts that disagree: the interval holds 0."""
    found = trend(seen([0.7, 0.69, 0.7], spread=0.1))
    assert found.word == "level"
    assert found.interval.low < 0 < found.interval.high
    assert "no decay beyond the spread" in str(found)


def test_rates_of_few_rounds_do_not_count():
    """A third position reached a handful of times is left out; a single prompt, or position, shows no trend."""
    found = trend(seen([0.5, 0.1, 0.9], rounds=LEAST_ROUNDS / 4, prompts=10))
    assert found.positions == 2
    assert trend(seen([0.9, 0.5], prompts=1)).word == "unknown"
    assert trend(seen([0.9], prompts=5)).word == "unknown"
    assert "too few" in str(trend(seen([0.9], prompts=5)))


# -------------------------------------------------------------------------------------------------------------- choices


def speed(drafter, mean, spread=0.01, load="1", memory=0.0, way="fixed:4"):
    pairs = [mean * (1 + spread * step) for step in (-1, 0, 1, 0)]
    return Speed(drafter, way, load, pairs, 3.0, memory, 10.0, 10.0 * mean)


def test_the_best_is_the_fastest_and_what_the_spread_does_not_tell_apart_ties():
    """An interval that reaches the lower end of the best one's is a tie; what is not faster than plain is none."""
    speeds = [speed("a", 2.0, 0.05), speed("b", 1.95, 0.05), speed("c", 1.3), speed("d", 1.001, 0.05)]
    found = choose(speeds, "1")
    assert found.best.drafter == "a"
    assert [one.drafter for one in found.ties] == ["b"]
    sure = choose([speed("a", 2.0, 0.001), speed("b", 1.95, 0.001)], "1")
    assert (sure.best.drafter, list(sure.ties)) == ("a", [])


def test_where_nothing_is_faster_beyond_the_spread_plain_decoding_is_best():
    """Also where a mean lies above 1; what comes nearest is told."""
    found = choose([speed("a", 1.02, 0.1), speed("b", 0.8)], "1")
    assert found.best is None
    assert found.nearest.drafter == "a"
    assert choose([speed("a", 1.5, load="4")], "1").nearest is None


def test_a_drafter_is_worth_its_memory_unless_a_cheaper_one_is_as_fast():
    """Cheapest first; one that is slower than a cheaper one, or ties with it, is not; nor is one slower than plain."""
    speeds = [
        speed("free", 1.3, memory=0),
        speed("tied", 1.31, 0.2, memory=10),
        speed("fast", 2.0, memory=20),
        speed("slower", 1.8, memory=30),
        speed("useless", 0.9, memory=1),
        speed("fast", 1.7, memory=20, way="delayed"),
    ]
    assert [one.drafter for one in worth_their_memory(speeds, "1")] == ["free", "fast"]


def test_a_single_pair_concludes_nothing():
    """Without a spread nothing is faster than plain decoding, and JSON has no infinity."""
    one = Speed("a", "fixed:4", "1", [3.0], 3.0, 0, 10.0, 30.0)
    assert choose([one], "1").best is None
    assert one.as_dict()["interval_95"] is None


# ---------------------------------------------------------------------------------------------------------------- facts


def loaded(drafter, **options):
    return LoadedDrafter(drafter, SpeculativeConfig(method=drafter.name, **options))


def test_passes_are_those_of_the_kind():
    """None for a lookup, K for what goes token by token, one for a block, and the tiny steps that chain it."""
    over = tiny_target()
    ngram = facts_of(loaded(Ngram(), num_speculative_tokens=5))
    assert (ngram.draft_tokens, ngram.draft_passes, ngram.head_steps, ngram.parameters) == (5, 0, 0, 0)
    vanilla = facts_of(loaded(Vanilla()))
    assert (vanilla.draft_tokens, vanilla.draft_passes) == (0, 0)
    for name, expected in (("eagle", (3, 0)), ("eagle3", (3, 0)), ("dflash", (1, 0)), ("dspark", (1, 3))):
        found = facts_of(loaded(drafting(name, over), num_speculative_tokens=3))
        assert (found.draft_passes, found.head_steps) == expected, name
        assert found.parameters > 0
    small = facts_of(loaded(Small(target(), VOCAB), num_speculative_tokens=3))
    assert (small.draft_passes, small.head_steps) == (3, 0)


def test_memory_is_that_of_its_own_weights_and_rows(tiny_qwen3_dir, tiny_small_dir):
    """A small model counts whole; a learned drafter without embedding and head of the target; rows by the token."""
    over = load_target(tiny_qwen3_dir)
    drafter = Small.load({"model": str(tiny_small_dir)}, LoadContext(over))
    found = facts_of(loaded(drafter))
    numbers = sum(p.numel() for p in drafter.model.model.parameters())
    assert (found.parameters, found.weight_bytes) == (numbers, 4 * numbers)
    assert found.kv_bytes_per_token == 2 * 2 * 16 * 4  # layers, keys and values, one head of 16, float32
    assert found.memory(3, 10.0) == found.weight_bytes + 30 * found.kv_bytes_per_token
    learned = drafting("eagle", over)
    own = facts_of(loaded(learned))
    assert own.parameters == sum(p.numel() for p in learned.network.parameters())
    assert own.parameters < numbers


def test_packed_weights_count_once(tmp_path):
    """In bfloat16 linear layers may be packed away from torch's parameters: the numbers stay, a tied head's are not
    counted again although its copy takes memory."""
    from tiny import qwen3, save_tokenizer

    model = qwen3(1)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    numbers = sum(p.numel() for p in model.parameters())
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    drafter = Small(load_target(tmp_path, dtype="bfloat16"), 264)
    found = facts_of(loaded(drafter))
    assert found.parameters == numbers
    assert found.weight_bytes in (2 * numbers, 2 * (numbers + 264 * 32))


def test_rows_belong_to_very_weights(tmp_path, tiny_qwen3_dir):
    """Other weights in the same folder are another drafter."""
    over = tiny_target()
    hashes = []
    for seed in (0.3, 0.4):
        drafter = drafting("eagle", over, scale=seed)
        drafter.save(tmp_path)
        drafter.folder = tmp_path
        hashes.append(origin(loaded(drafter))["weights"])
    assert len(set(hashes)) == 2
    small = origin(loaded(Small(load_target(tiny_qwen3_dir), 264)))
    assert small["model"]["fingerprint"]["weights"]
    assert origin(loaded(Ngram()))["weights"] is None


# ----------------------------------------------------------------------------------------------------------- confidence


def test_confidences_are_judged_position_by_position():
    """A model that drafts itself is sure and right: survival 1, no error beyond the floor's, as many prompts told."""
    options = EngineOptions(num_speculative_tokens=3)
    over = target()
    engine = Engine(over, load_drafters([Small(target(), VOCAB)], over, options), options)
    prompts = [[i % VOCAB, i // VOCAB, 3] for i in range(14)]
    told = []
    asked = Questions(prompts, Sampling(temperature=0, max_tokens=40, ignore_eos=True, seed=0), 4, None)
    found = confidence(engine, asked, told.append)
    assert sum(told) == len(prompts)
    assert found["note"] is None
    assert found["rounds"] >= 100
    assert [one["position"] for one in found["positions"]] == [1, 2, 3]
    assert all(one["survival"] == 1.0 and one["raw"]["auroc"] is None for one in found["positions"])
    assert "calibrated" not in found["positions"][0]
    few = confidence(engine, Questions(prompts[:2], asked.sampling, 4, None), told.append)
    assert "too few to tell" in few["note"]
    json.dumps(found, allow_nan=False)


# ---------------------------------------------------------------------------------------------------------------- pages


def test_the_report_says_where_each_is_the_best_choice_and_why(findings):
    """A line for every load with tokens and costs of a round, for memory, for each drafter, for what is absent."""
    text = text_of(lambda console: show(findings, console))
    assert re.search(r"one request at a time: small, (fixed:4|delayed), \d\.\d\dx .*tokens a step for \d", text)
    assert "by memory, one request at a time: " in text
    assert re.search(r"^small: the best choice at 1 and 2", text, re.MULTILINE)
    assert "dspark: not asked for; train one: `forerun train dspark" in text
    assert "3 prompts, 6-12 tokens, end-of-sequence ignored" in text


def test_markdown_shows_names_as_they_are(findings):
    """Every table has as many cells a row as columns, bars and tags in a name are no markup, the command is there."""
    text = markdown(findings, "forerun compare --out DIR")
    tables = [line for line in text.splitlines() if line.startswith("|")]
    widths = [len(re.findall(r"(?<!\\)\|", line)) for line in tables]
    assert len(set(widths)) > 1
    for before, after in itertools.pairwise(tables):
        if re.fullmatch(r"[|\s:-]+", after):
            assert len(re.findall(r"(?<!\\)\|", before)) == len(re.findall(r"(?<!\\)\|", after))
    assert r"ngram \<b\>\|x\|\</b\>" in text
    assert "`forerun compare --out DIR`" in text
    assert plain("a `x|y` *b*") == r"a `x|y` \*b\*"


class Tags(HTMLParser):
    """Opened and closed tags, and everything that would be fetched."""

    VOID = ("meta",)

    def __init__(self):
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag, attrs):
        self.seen.add(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        self.fetched += [value for name, value in attrs if name in ("src", "href", "xlink:href", "action")]

    def handle_startendtag(self, tag, attrs):
        self.seen.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_needs_nothing_beside_it(findings):
    """Well-formed, no script, nothing fetched, names escaped, light and dark, rows as cards on a phone."""
    text = page(findings, "forerun compare --out DIR")
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    assert tags.fetched == []
    assert not {"script", "link", "img", "iframe", "b"} & tags.seen
    assert "url(" not in text
    assert "@import" not in text
    assert "prefers-color-scheme:dark" in text
    assert 'data-name="drafter"' in text
    assert '<meta name="viewport"' in text
    assert marked("a `b<c` d<e") == "a <code>b&lt;c</code> d&lt;e"


def test_pictures_are_drawings_with_a_name_each(findings):
    """SVG that parses, with a text alternative and no number that is none."""
    pictures = re.findall(r"<svg.*?</svg>", page(findings, "x"), re.DOTALL)
    assert len(pictures) >= 3
    for picture in pictures:
        root = ElementTree.fromstring(picture)
        assert root.get("aria-label")
        assert "nan" not in picture
        assert "inf" not in picture.replace("info", "")
    bars = [rect for rect in ElementTree.fromstring(pictures[0]).iter() if rect.tag.endswith("rect")]
    assert len(bars) == len(LABELS) * len(LOADS)


def test_the_verdict_in_json_is_that_on_the_page(findings):
    """Best and absent, rules beside them."""
    made = findings.as_dict()
    assert made["lossless"] is True
    assert [one["best"]["drafter"] for one in made["best"]] == ["small", "small"]
    assert made["absent"]["dspark"].startswith("not asked for")
    assert {one["drafter"] for one in made["drafters"]} == set(LABELS.values())
    assert made["drafters"][0]["trend"]["word"] in ("level", "unknown")
    assert not any(math.isnan(v) for one in made["drafters"] for s in one["speeds"] for v in s["interval_95"])


def test_sizes_read_as_people_write_them():
    """Three digits, decimal units, also where rounding reaches the next unit; no exponent, however many there are."""
    from forerun.cli.train_screen import value_text
    from forerun.training.plan import Line

    shown = {
        0: "0 B", 999: "999 B", 1000: "1 kB", 24_100_000: "24.1 MB", 999_900: "1 MB", 1.5e9: "1.5 GB",
        350.6e9: "351 GB", 2.5e12: "2.5 TB", 1.2e16: "12,000 TB",
    }  # fmt: skip
    assert [size(n) for n in shown] == list(shown.values())
    assert value_text(Line("checkpoints", 999_900, "bytes", "")) == "1 MB"
