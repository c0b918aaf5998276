"""What operators watch: series under their names, books that balance, the lines that recipes parse, the alarm."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest
import torch

from budget.world import BFLOAT16, profile, serial
from engine.conftest import bytes_for
from engine.scheduled import Named, cycle, timed, wrong
from forerun.drafters.config import SpeculativeConfig
from forerun.drafters.fake import Broken, Script
from forerun.drafters.small import Small
from forerun.engine import DecodingStats, Engine, EngineOptions
from forerun.engine.propose import LoadedDrafter
from forerun.engine.step_times import PHASES
from forerun.errors import OptionError
from forerun.serve.account import metrics_of
from forerun.serve.cards import Promise, promises
from forerun.serve.loglines import Levels, StatsLog, drafting_line, own_line
from forerun.serve.metrics import ALARM, EXPECTED, OWN, RECENT, SHARED, DriftAlarm, Metrics, difference
from forerun.training.card import _decoding
from forerun.verify import Draft
from serve.kit import VOCAB, Site, ascii_model, engine, guesses, noisy_engine, script_model

COMPLETIONS = "/v1/completions"
ROOT = Path(__file__).parent.parent.parent
TEXT = "one block after the other"


@pytest.fixture(scope="module")
def watched():
    with Site(noisy_engine, metrics_compat="vllm", timings=True, enable_per_request_metrics=True) as site:
        for i in range(4):
            site.complete(prompt="abab" * (i + 1), max_tokens=20 + i, temperature=0, stop="~")
        site.complete(prompt="plain", max_tokens=5, speculative=False, seed=1)
        site.post(COMPLETIONS, {"prompt": "streamed", "max_tokens": 7, "stream": True, "seed": 1})
        yield site


def _kinds(page: str) -> set[str]:
    """Names of the series on a page; the client library adds the time each counter was made."""
    found = re.findall(r"^# TYPE (\S+) ", page, re.MULTILINE)
    return {name for name in found if not name.endswith("_created")}


def test_the_lists_of_series_are_the_page(watched):
    """Every series has its name on one of two lists, and the page has these and no others: the shared ones under both
    prefixes, our own under ours, vLLM's four under vLLM's; those about a drafter's card where it has one."""
    four = {f"vllm:spec_decode_num_{name}_total" for name in ("drafts", "draft_tokens", "accepted_tokens")}
    four.add("vllm:spec_decode_num_accepted_tokens_per_pos_total")
    of_card = {f"forerun:{name}" for name in (EXPECTED, RECENT, ALARM)}
    both = {prefix + name for prefix in ("forerun:", "vllm:") for name in SHARED}
    assert _kinds(watched.get("/metrics").body.decode()) == both | {f"forerun:{name}" for name in OWN} - of_card | four
    assert _kinds(Metrics("m", False, {"dspark": Promise(3.0)}).text().decode()) >= of_card


@pytest.mark.parametrize("name", [*SHARED, *OWN])
def test_every_series_is_documented(name):
    """By its whole name, so that it can be searched for."""
    assert f"`{name}`" in (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")


def test_the_labels_are_those_that_dashboards_select_by(watched):
    """model_name and engine on every line, and finished_reason, position, reason and phase where they belong."""
    page = watched.get("/metrics").body.decode()
    lines = [line for line in page.splitlines() if not line.startswith("#")]
    assert all('engine="0"' in line and 'model_name="table"' in line for line in lines)
    for prefix in ("forerun:", "vllm:"):
        assert f'{prefix}request_success_total{{engine="0",finished_reason="length",model_name="table"}}' in page
    for phase in PHASES:
        assert f'forerun:step_seconds_count{{engine="0",model_name="table",phase="{phase}"}}' in page


# ------------------------------------------------------------------------------------------------- every series moves


def _sums(page: str) -> dict[str, float]:
    """Name -> sum over its lines; of a histogram its count."""
    found: dict[str, float] = {}
    for line in page.splitlines():
        if not line.startswith("#"):
            series, _, value = line.rpartition(" ")
            name = series.partition("{")[0].removeprefix("forerun:").removesuffix("_count")
            found[name] = found.get(name, 0.0) + float(value)
    return found


class _Watch:
    """The largest value of each series on any page that was read, and the labels of its lines."""

    def __init__(self) -> None:
        self.seen: dict[str, float] = {}
        self.labels: dict[str, set[str]] = {}

    def read(self, page: bytes) -> None:
        for name, labels in re.findall(r"^forerun:(\w+)\{(.*)\} ", page.decode(), re.MULTILINE):
            self.labels.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
        for name, value in _sums(page.decode()).items():
            self.seen[name] = max(value, self.seen.get(name, 0.0))

    def run(self, site: Site, calls: list) -> list:
        """Requests at once, the page being read all the while."""

        async def both() -> list:
            running = asyncio.gather(*(call.run() for call in calls))
            while not running.done():
                self.read((await site.call("GET", "/metrics").run()).body)
                await asyncio.sleep(0.001)
            return await running

        replies = site.run(both())
        self.read(site.get("/metrics").body)
        return replies


def _with_card(folder: Path, promised: float) -> str:
    """A folder whose card promises an accepted length, as `forerun train` writes it."""
    row = {"temperature": 0.0, "prompts": 20, "mean_accepted_length": promised, "tokens_per_step": 2.0}
    (folder / "README.md").write_text(f"# card\n\n{_decoding(row)}", encoding="utf-8")
    return str(folder)


def _troubled(card: str) -> Engine:
    """Three drafters: one raises, one reports laws that are none, one has a card it does not live up to. Memory is too
    little for all requests at once."""
    target = ascii_model()
    raising = Broken(lambda view: None, raises=True)
    raising.name = "raising"
    drafters = [raising, Broken(lambda view: torch.full((view.k, VOCAB), 1 / VOCAB)), Small(ascii_model(), VOCAB)]
    configs = [
        {"method": "raising"},
        {"method": "nan"},
        {"method": "small", "model": card, "num_speculative_tokens": 2},
    ]
    loaded = [LoadedDrafter(one, SpeculativeConfig(**config)) for one, config in zip(drafters, configs, strict=True)]
    memory = bytes_for(14, target, *drafters)
    options = EngineOptions(max_num_seqs=3, max_num_batched_tokens=64, kv_cache_memory_bytes=memory)
    return Engine(target, loaded, options)


def _scheduled() -> Engine:
    """A drafter that is never right, under costs that are known."""
    costs = profile(BFLOAT16, {"script": serial(0.1, 0.1)})
    return timed(cycle(), [Named("script", wrong)], costs)


@pytest.fixture(scope="module")
def moved(tmp_path_factory) -> _Watch:
    watch = _Watch()
    card = _with_card(tmp_path_factory.mktemp("card"), 30.0)
    # How many rounds these few requests draft for the card's drafter alone depends on when they come.
    with pytest.MonkeyPatch.context() as patch, Site(lambda: _troubled(card), max_queue=2) as site:
        patch.setattr(DriftAlarm, "ROUNDS", 20)
        fields = {"max_tokens": 130, "temperature": 0, "ignore_eos": True}
        bodies = [{"prompt": "x" * length, **fields} for length in range(40, 47)]
        replies = watch.run(site, [site.call("POST", COMPLETIONS, body) for body in bodies])
        assert [reply.status for reply in replies].count(429) == 2
        again = {"prompt": "x" * 40, "max_tokens": 60, "temperature": 0, "stop": list("etaoinshrdlu")}
        watch.run(site, [site.call("POST", COMPLETIONS, again)])
        site.settle()
    with Site(_scheduled) as site:
        watch.run(site, [site.call("POST", COMPLETIONS, {"prompt": "a", "max_tokens": 300, "temperature": 0})])
    return watch


@pytest.mark.parametrize("name", [*SHARED, *OWN])
def test_every_series_moves(moved, name):
    """In real runs with what each is about: preemption, refusal, faults, a card, costs, a prefix that was seen."""
    assert moved.seen[name] > 0


def test_vllms_series_are_not_there_unless_asked(site):
    """--metrics-compat is off by default; the content type is Prometheus'."""
    reply = site.get("/metrics")
    assert b"vllm:" not in reply.body
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")


def test_vllms_four_counters_are_what_bench_serve_reads(watched):
    """Lines that begin with vllm:spec_decode and end in _total, with vLLM's definitions; ours under our names."""
    page = watched.get("/metrics").body.decode()
    found = {line.split("{")[0] for line in page.splitlines() if re.match(r"vllm:spec_decode\S*_total[{ ]", line)}
    names = ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
    assert found == {f"vllm:spec_decode_num_{name}_total" for name in names}
    tokens = watched.metric("vllm:spec_decode_num_draft_tokens_total")
    assert tokens == watched.metric("forerun:spec_decode_verified_tokens_total") > 0
    per_position = watched.metric("vllm:spec_decode_num_accepted_tokens_per_pos_total")
    assert per_position == watched.metric("vllm:spec_decode_num_accepted_tokens_total")


def test_the_dashboard_asks_for_series_that_exist():
    """Every series of docs/grafana.json is one that there is."""
    document = json.loads((ROOT / "docs" / "grafana.json").read_text(encoding="utf-8"))
    asked = " ".join(target["expr"] for panel in document["panels"] for target in panel["targets"])
    for name in set(re.findall(r"forerun:\w+", asked)):
        assert re.sub(r"_(bucket|sum|count)$", "", name).removeprefix("forerun:") in (*SHARED, *OWN), name
    assert len(document["panels"]) == 15


ASKED = re.compile(r"(?:by \(([\w, ]+)\) \((?:rate\()?)?forerun:(\w+)\{([^}]*)\}")
"""Labels that are kept, series, selectors."""


def test_the_dashboard_asks_for_labels_that_exist(moved):
    """Those it selects and groups by are on the lines of that series, and a legend shows what is grouped by."""
    document = json.loads((ROOT / "docs" / "grafana.json").read_text(encoding="utf-8"))
    for target in (target for panel in document["panels"] for target in panel["targets"]):
        parts = ASKED.findall(target["expr"])
        assert len(parts) == target["expr"].count("forerun:")
        for kept, name, selected in parts:
            labels = {*kept.replace(",", " ").split(), *re.findall(r"(\w+)=", selected)}
            assert labels <= moved.labels[name], (labels, name)
            assert "model_name" in labels
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= labels


def test_the_dashboard_can_be_read():
    """Every panel has a title of its own, a unit and a place of its own, asks the source that is chosen at the top, and
    does not mix numbers with rates."""
    document = json.loads((ROOT / "docs" / "grafana.json").read_text(encoding="utf-8"))
    variables = {one["name"] for one in document["templating"]["list"]}
    panels, taken = document["panels"], set()
    assert len({panel["title"] for panel in panels}) == len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        x, y, width, height = (panel["gridPos"][side] for side in "xywh")
        place = {(column, row) for column in range(x, x + width) for row in range(y, y + height)}
        assert not place & taken, panel["title"]
        assert x + width <= 24, panel["title"]
        taken |= place
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        targets, unit = panel["targets"], panel["fieldConfig"]["defaults"]["unit"]
        assert len({target["refId"] for target in targets}) == len(targets)
        rates = {re.match(r"sum( by \(\w+\) )?\(rate\([^/]*$", target["expr"]) is not None for target in targets}
        assert len(rates) == 1, f"{panel['title']}: numbers and rates on one axis"
        assert unit != "short" or rates == {False}, f"{panel['title']}: a rate without its unit"
        used = re.findall(r"\$(\w+)", " ".join(target["expr"] for target in targets))
        assert set(used) <= variables | {"__rate_interval"}


class _TooMany(Script):
    """Drafts two more tokens than it was asked for."""

    def propose(self, views, keep_drafting):
        return [Draft([*b"abcdefgh"][: view.k + 2]) for view in views]


INVALID = {
    "nan cut": (lambda: Broken(lambda view: torch.full((view.k, VOCAB), 1 / VOCAB), first_bad=1), {}, 3 * 3),
    "vocab cut": (lambda: Script(lambda view: [97, 999, 97, 97]), {}, 3 * 3),
    "limit cut": (lambda: _TooMany(lambda view: []), {}, None),
    "grammar masked": (
        lambda: Small(ascii_model(7), VOCAB),
        {"guided_regex": "[ab]{12}", "verify_mode": "rejection"},
        None,
    ),
    "grammar rejected": (lambda: Script(lambda view: [*b"zzzz"]), {"guided_regex": "[ab]{12}"}, None),
}


@pytest.mark.parametrize("what", INVALID)
def test_invalid_drafts_are_told_by_reason_and_action(what):
    """In positions: cut behind a law that is none (a drafter is asked three times), an id the target lacks, or K;
    masked before they are drawn; refused because the form of the answer does not allow them. No other reason is named,
    and the text is that of plain decoding where its ids are promised."""
    make, fields, positions = INVALID[what]
    asked = {"prompt": "ab", "max_tokens": 12, "temperature": 0.7, "seed": 1, "verify_mode": "coupled", **fields}
    with Site(lambda: engine(make())) as site:
        drafted, plain = site.complete(**asked), site.complete(**asked, speculative=False)
        assert drafted["choices"] == plain["choices"] or asked["verify_mode"] == "rejection"
        reason, action = what.split()
        counted = site.metric("forerun:spec_decode_invalid_drafts_total", reason=reason, action=action)
        assert counted == site.metric("forerun:spec_decode_invalid_drafts_total") > 0
        assert positions in (None, counted)


def test_the_books_balance(watched):
    """Over all requests: 1 + emitted - discarded is the number of completion tokens."""
    emitted = watched.metric("forerun:spec_decode_emitted_tokens_total")
    discarded = watched.metric("forerun:spec_decode_discarded_tokens_total")
    finished = watched.metric("forerun:request_success_total")
    assert finished == 6
    assert finished + emitted - discarded == watched.metric("forerun:generation_tokens_total")
    assert watched.metric("forerun:request_generation_tokens_sum") == watched.metric("forerun:generation_tokens_total")
    assert watched.metric("forerun:prompt_tokens_total") == 4 + 8 + 12 + 16 + 5 + 8
    assert watched.metric("forerun:time_to_first_token_seconds_count") == 6


def test_the_metrics_object_sums_to_the_counters():
    """vLLM's object in the answers adds up to vLLM's four counters, to the last digit; AIPerf finds it by its keys."""
    options = {"metrics_compat": "vllm", "per_request_spec_decode_metrics": "detailed"}
    with Site(noisy_engine, **options) as site:
        found = [
            site.complete(prompt="abab" * (i + 1), max_tokens=20, temperature=0.5, seed=i, stop="~")["metrics"]
            for i in range(6)
        ]
        parts = [one["speculative_decoding"] for one in found]
        for name, key in (("drafts", "num_spec_steps"), ("draft_tokens", "num_draft_tokens")):
            assert sum(part[key] for part in parts) == site.metric(f"vllm:spec_decode_num_{name}_total")
        accepted = sum(part["num_accepted_draft_tokens"] for part in parts)
        assert accepted == site.metric("vllm:spec_decode_num_accepted_tokens_total")
        for part in parts:
            assert sum(part["acceptance_histogram"]) == part["num_spec_steps"] == len(part["per_step_accepted"])
            assert sum(j * n for j, n in enumerate(part["acceptance_histogram"])) == part["num_accepted_draft_tokens"]
            assert sum(part["per_step_drafted"]) == part["num_draft_tokens"]
            assert len(part["acceptance_histogram"]) == part["num_spec_tokens"] + 1


def test_the_worked_example_of_the_metrics_object():
    """K = 3, 20 steps, histogram [10, 6, 3, 1]: mean length 1.75, rate 0.25."""
    from forerun.engine.request import Completion
    from forerun.serve.account import Account, Sample

    account = Account(Metrics("m", False), 0.0, [1])
    done = Completion(0, 0, [1], "", [], "stop", None, 0, [], None, DecodingStats(), "x", 0.0)
    steps = [(3, accepted) for accepted, count in enumerate([10, 6, 3, 1]) for _ in range(count)]
    account.samples[0, 0] = Sample(completion=done, steps=steps)
    found = metrics_of(account, "summary", False, 3)["speculative_decoding"]
    assert found["acceptance_histogram"] == [10, 6, 3, 1]
    assert (found["mean_acceptance_length"], found["draft_acceptance_rate"]) == (1.75, 0.25)
    assert (found["num_accepted_draft_tokens"], found["num_draft_tokens"], found["num_spec_steps"]) == (15, 60, 20)
    assert found["acceptance_histogram_by_draft_length"] == {"3": [10, 6, 3, 1]}
    assert "per_step_accepted" not in found


def test_without_a_drafter_there_is_no_metrics_object():
    """`metrics` is about drafting unless times are asked for."""
    with Site(engine) as site:
        assert "metrics" not in site.complete(prompt="a", max_tokens=2)
    with Site(noisy_engine, per_request_spec_decode_metrics="none") as site:
        assert "metrics" not in site.complete(prompt="a", max_tokens=2)
    with Site(engine, enable_per_request_metrics=True) as site:
        assert set(site.complete(prompt="a", max_tokens=2)["metrics"]) == {
            "time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second",
        }  # fmt: skip


def test_timings_are_llama_cpps(watched):
    """At the root, and at the last event of a stream; on every event if the request asks."""
    found = watched.complete(prompt="abab" * 4, max_tokens=20, temperature=0)["timings"]
    assert found["prompt_n"] == 16
    assert found["predicted_n"] == 20
    assert found["draft_n"] >= found["draft_n_accepted"] >= 0
    assert found["predicted_per_second"] == pytest.approx(1e3 * 20 / found["predicted_ms"])
    events = watched.post(COMPLETIONS, {"prompt": "a", "max_tokens": 4, "stream": True, "speculative": False}).events
    assert ["timings" in event for event in events] == [False] * (len(events) - 1) + [True]
    fields = {"prompt": "a", "max_tokens": 4, "stream": True, "timings_per_token": True}
    assert all("timings" in event for event in watched.post(COMPLETIONS, fields).events)


def test_su_2_gaps_between_chunks_are_not_times_per_token():
    """Blocks of 4 tokens: inter-token latency counts emissions, time per output token divides by tokens.

    https://github.com/dstackai/dstack/issues/4225
    """
    make = lambda: engine(guesses(TEXT), target=script_model(TEXT), num_speculative_tokens=3)  # noqa: E731
    with Site(make, enable_per_request_metrics=True) as site:
        found = site.complete(prompt=[7], temperature=0, max_tokens=21)["metrics"]
        gaps = site.metric("forerun:inter_token_latency_seconds_count")
        assert gaps == 5  # a prefill token, then 4 a step
        per_token = site.metric("forerun:request_time_per_output_token_seconds_sum")
        assert per_token == pytest.approx(found["generation_time_ms"] / 1e3 / 20)
        assert found["mean_itl_ms"] == pytest.approx(found["generation_time_ms"] / gaps)


def test_running_numbers_can_be_read_while_they_grow(site):
    """A request that is still being served is counted when somebody looks, and never twice."""
    import asyncio

    before = site.metric("forerun:spec_decode_target_steps_total")

    async def watch() -> float:
        fields = {"prompt": "a", "max_tokens": 300, "temperature": 0, "ignore_eos": True, "speculative": False}
        running = asyncio.ensure_future(site.call("POST", COMPLETIONS, fields).run())
        seen = before
        while seen == before:
            await asyncio.sleep(0.005)
            page = (await site.call("GET", "/metrics").run()).body.decode()
            [line] = [x for x in page.splitlines() if x.startswith("forerun:spec_decode_target_steps_total{")]
            seen = float(line.split()[-1])
        early = not running.done()
        await running
        return early

    assert site.run(watch())
    assert site.metric("forerun:spec_decode_target_steps_total") == before + 299


TRACE = DecodingStats()
for drafted, verified, accepted in ((3, 3, 3), (3, 3, 0), (3, 2, 1), (3, 0, 0), (0, 0, 0)):
    TRACE.record(drafted, verified, accepted)


def test_sp_6_the_log_line_has_vllms_formulas():
    """The hand-made trace: vLLM's mean length is 7/3 and its rates divide by all its rounds.

    https://github.com/sgl-project/sglang/pull/13212, https://github.com/SafeAILab/EAGLE/issues/95,
    https://github.com/SafeAILab/EAGLE/issues/153
    """
    assert drafting_line(TRACE, 2.0) == (
        "SpecDecoding metrics: Mean acceptance length: 2.33, Accepted throughput: 2.00 tokens/s, Drafted throughput: "
        "4.00 tokens/s, Accepted: 4 tokens, Drafted: 8 tokens, Per-position acceptance rate: 0.667, 0.333, 0.333, Avg "
        "Draft acceptance rate: 50.0%"
    )


def test_lines_come_only_while_something_happens():
    """An idle server is silent; each line is about its own interval, the hit rate too."""
    metrics, now, cache = Metrics("m", False), [0.0], [(0, 0)]
    log = StatsLog(metrics, lambda: Levels(3, 1, 0.25, *cache[0], 1.25), lambda: now[0])
    idle = StatsLog(metrics, lambda: Levels(0, 0, 0.0), lambda: now[0])
    assert idle.lines() == []
    now[0] = 10.0
    metrics.prompt(50)
    metrics.generated(200)
    metrics.decoded(TRACE)
    cache[0] = (50, 20)
    lines = log.lines()
    assert lines[-1] == (
        "Engine 000: Avg prompt throughput: 5.0 tokens/s, Avg generation throughput: 20.0 tokens/s, Running: 3 reqs, "
        "Waiting: 1 reqs, KV cache usage: 25.0%, Prefix cache hit rate: 40.0%"
    )
    assert lines[0].startswith("SpecDecoding metrics: ")
    assert "4 of 5 rounds drafted, 12 tokens drafted, 8 verified" in lines[1]
    assert "rounds by verified length 0: 2 2: 1 3: 2" in lines[1]
    assert lines[1].endswith("predicted gain 1.25")
    now[0], cache[0] = 20.0, (60, 20)
    last = log.lines()[-1]
    assert last.startswith("Engine 000: Avg prompt throughput: 0.0 tokens/s")
    assert last.endswith("hit rate: 0.0%")
    assert len(idle.lines()) == 3
    assert idle.lines() == []


def test_our_own_line_says_why_nothing_was_drafted():
    """Planned K, and the reasons of K = 0; no gain is told that nobody has estimated."""
    stats = DecodingStats(planned=12, skipped_steps={"gain": 3, "batch": 1})
    stats.record(4, 3, 2)
    assert own_line(stats).endswith("mean planned K 12.00, rounds by verified length 3: 1, K = 0 for: gain 3, batch 1")


def test_differences_add_up():
    """Two readings of growing counters: what was added, by position and by reason too."""
    later = DecodingStats(skipped_steps={"gain": 3})
    for drafted, verified, accepted in ((5, 5, 5), (3, 2, 1)):
        later.record(drafted, verified, accepted)
    earlier = DecodingStats(skipped_steps={"gain": 1})
    earlier.record(5, 5, 5)
    more = difference(later, earlier)
    assert (more.verified, more.accepted, more.skipped_steps) == (2, 1, {"gain": 2})
    assert more.accepted_by_position == [1, 0, 0, 0, 0]


def _round(accepted: int, verified: int = 4) -> DecodingStats:
    stats = DecodingStats()
    stats.record(4, verified, accepted)
    return stats


def _alarm(metrics: Metrics, name: str) -> float | None:
    labels = {"model_name": "m", "engine": "0", "drafter": name}
    return metrics.registry.get_sample_value(f"forerun:{ALARM}", labels)


def test_the_alarm_rings_when_accepted_length_drifts_from_the_card():
    """Not before enough rounds, not for a drafter that keeps its promise, and it stops when it is kept again."""
    metrics = Metrics("m", False, {"good": Promise(3.0), "bad": Promise(3.0)})

    def alarm(name: str) -> float:
        return _alarm(metrics, name)

    for _ in range(199):
        metrics.drift.add("good", _round(2))
        metrics.drift.add("bad", _round(0))
        metrics.drift.add("ngram+bad", _round(4))
    assert (alarm("good"), alarm("bad")) == (0, 0)
    metrics.drift.add("good", _round(2))
    metrics.drift.add("bad", _round(0))
    assert (alarm("good"), alarm("bad")) == (0, 1)
    for _ in range(256):
        metrics.drift.add("bad", _round(2))
    assert alarm("bad") == 0


@pytest.mark.parametrize(("verified", "accepted", "rings"), [(1, 1, 0), (0, 0, 0), (1, 0, 1), (4, 1, 1), (4, 2, 0)])
def test_the_alarm_asks_no_more_of_short_drafts_than_they_can_give(verified, accepted, rings):
    """Under load, or for a request that asks for it, one token is verified where the card's decoding verified four: who
    has it accepted keeps the promise."""
    metrics = Metrics("m", False, {"d": Promise(4.0, (0.9, 0.8, 0.7, 0.6))})
    for _ in range(DriftAlarm.ROUNDS):
        metrics.drift.add("d", _round(accepted, verified))
    assert _alarm(metrics, "d") == rings


def test_the_card_of_a_drafter_is_read(tmp_path):
    """The lines that `forerun train` writes, of the temperature with the smaller promise; a folder without a card
    promises nothing."""
    from forerun.drafters.ngram import Ngram

    rows = [
        {
            "temperature": t,
            "prompts": 20,
            "mean_accepted_length": length,
            "tokens_per_step": 2.0,
            "acceptance_by_position": rates,
        }
        for t, length, rates in ((0.0, 3.25, [0.9, 0.9]), (1.0, 2.75, [0.8, 0.5, None]))
    ]
    (tmp_path / "README.md").write_text("# card\n\n" + "\n\n".join(map(_decoding, rows)), encoding="utf-8")
    with_card = LoadedDrafter(Ngram(), SpeculativeConfig(method="ngram", model=str(tmp_path)))
    without = LoadedDrafter(Ngram(), SpeculativeConfig(method="ngram"))
    assert promises([with_card]) == {"ngram": Promise(2.75, (0.8, 0.4))}
    assert promises([without]) == {}


def test_a_trace_has_a_span_for_each_request(site):
    """One span when it is over, with its parent from the headers; without a collector nothing is written."""
    from forerun.serve.tracing import Tracer

    spans: list[dict] = []

    class Span:
        def __init__(self, name, context, start_time):
            self.found = {"name": name, "context": context, "start": start_time}

        def set_attribute(self, name, value):
            self.found[name] = value

        def end(self, at):
            spans.append({**self.found, "end": at})

    class Collector:
        def start_span(self, name, context=None, start_time=None):
            return Span(name, context, start_time)

    service = site.server.service
    before, service.tracer = service.tracer, Tracer(Collector(), lambda headers: headers["traceparent"])
    try:
        reply = site.post(COMPLETIONS, {"prompt": "abc", "max_tokens": 4, "seed": 1}, traceparent="00-1-2-01")
    finally:
        service.tracer = before
    assert reply.status == 200
    [span] = spans
    assert (span["name"], span["context"]) == ("llm_request", "00-1-2-01")
    assert (span["gen_ai.usage.prompt_tokens"], span["gen_ai.usage.completion_tokens"]) == (3, 4)
    assert span["start"] < span["end"]


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://localhost:4318", "http://localhost:4318/v1/traces"),
        ("http://localhost:4318/", "http://localhost:4318/v1/traces"),
        ("https://collector/tenant/v1/traces", "https://collector/tenant/v1/traces"),
        ("localhost:4317", None),
        ("grpc://localhost:4317", None),
    ],
)
def test_spans_go_where_a_collector_takes_them(given, url):
    """What is usually typed is the address alone, which answers 404; what cannot be posted to is told at the start."""
    from forerun.serve.tracing import Tracer, traces_url

    if url is not None:
        assert traces_url(given) == url
    else:
        with pytest.raises(OptionError, match="--otlp-traces-endpoint"):
            Tracer.to(given)
