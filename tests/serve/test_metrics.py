"""What operators watch: series under their names, books that balance, the lines that recipes parse, the alarm."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from forerun.engine import DecodingStats
from forerun.serve.account import metrics_of
from forerun.serve.cards import expected_lengths
from forerun.serve.loglines import Levels, StatsLog, drafting_line
from forerun.serve.metrics import ALARM, COUNTERS, GAUGES, HISTOGRAMS, Metrics, difference
from serve.kit import Site, engine, guesses, noisy_engine, script_model

COMPLETIONS = "/v1/completions"
ROOT = Path(__file__).parent.parent.parent
TEXT = "one block after the other"


@pytest.fixture(scope="module")
def watched():
    with Site(noisy_engine, metrics_compat="vllm", timings=True, enable_per_request_metrics=True) as site:
        for i in range(4):
            site.complete(prompt="abab" * (i + 1), max_tokens=20 + i, temperature=0, stop="~")
        site.complete(prompt="plain", max_tokens=5, speculative=False)
        site.post(COMPLETIONS, {"prompt": "streamed", "max_tokens": 7, "stream": True})
        yield site


@pytest.mark.parametrize("prefix", ["forerun:", "vllm:"])
def test_the_series_exist_under_both_names(watched, prefix):
    """Every shared series, and for counters the suffix _total; with the labels that dashboards select by."""
    page = watched.get("/metrics").body.decode()
    for name in HISTOGRAMS:
        assert f'{prefix}{name}_count{{engine="0",model_name="table"}}' in page
    for name in COUNTERS:
        assert f'{prefix}{name}_total{{engine="0",model_name="table"}}' in page
    for name in GAUGES:
        assert f'{prefix}{name}{{engine="0",model_name="table"}}' in page
    assert f'{prefix}request_success_total{{engine="0",finished_reason="length",model_name="table"}}' in page


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
    """Every series of docs/grafana.json is published by a server whose drafter has a card."""
    document = json.loads((ROOT / "docs" / "grafana.json").read_text(encoding="utf-8"))
    asked = " ".join(target["expr"] for panel in document["panels"] for target in panel["targets"])
    page = Metrics("m", False, {"dspark": 3.0}).text().decode()
    known = set(re.findall(r"^# TYPE (\S+) ", page, re.MULTILINE))
    for name in set(re.findall(r"forerun:\w+", asked)):
        base = re.sub(r"_bucket$", "", name)
        assert {base, base.removesuffix("_total")} & known, name
    assert len(document["panels"]) == 12


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
    """An idle server is silent; each line is about its own interval."""
    metrics, now = Metrics("m", False), [0.0]
    log = StatsLog(metrics, lambda: Levels(3, 1, 0.25), lambda: now[0])
    idle = StatsLog(metrics, lambda: Levels(0, 0, 0.0), lambda: now[0])
    assert idle.lines() == []
    now[0] = 10.0
    metrics.prompt(50)
    metrics.generated(200)
    metrics.decoded(TRACE)
    lines = log.lines()
    assert lines[-1] == (
        "Engine 000: Avg prompt throughput: 5.0 tokens/s, Avg generation throughput: 20.0 tokens/s, Running: 3 reqs, "
        "Waiting: 1 reqs, KV cache usage: 25.0%, Prefix cache hit rate: 0.0%"
    )
    assert lines[0].startswith("SpecDecoding metrics: ")
    assert "4 of 5 rounds drafted, 12 tokens drafted, 8 verified" in lines[1]
    now[0] = 20.0
    assert log.lines()[-1].startswith("Engine 000: Avg prompt throughput: 0.0 tokens/s")
    assert len(idle.lines()) == 3
    assert idle.lines() == []


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


def _round(accepted: int) -> DecodingStats:
    stats = DecodingStats()
    stats.record(4, 4, accepted)
    return stats


def test_the_alarm_rings_when_accepted_length_drifts_from_the_card():
    """Not before enough rounds, not for a drafter that keeps its promise, and it stops when it is kept again."""
    metrics = Metrics("m", False, {"good": 3.0, "bad": 3.0})

    def alarm(name: str) -> float:
        labels = {"model_name": "m", "engine": "0", "drafter": name}
        return metrics.registry.get_sample_value(f"forerun:{ALARM}", labels)

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


def test_the_card_of_a_drafter_is_read(tmp_path):
    """The line that `forerun train` writes; a folder without a card promises nothing."""
    from forerun.drafters.config import SpeculativeConfig
    from forerun.drafters.ngram import Ngram
    from forerun.engine.propose import LoadedDrafter
    from forerun.training.card import _decoding

    rows = [
        {"temperature": t, "prompts": 20, "mean_accepted_length": length, "tokens_per_step": 2.0}
        for t, length in ((0.0, 3.25), (1.0, 2.75))
    ]
    (tmp_path / "README.md").write_text("# card\n\n" + "\n\n".join(map(_decoding, rows)), encoding="utf-8")
    with_card = LoadedDrafter(Ngram(), SpeculativeConfig(method="ngram", model=str(tmp_path)))
    without = LoadedDrafter(Ngram(), SpeculativeConfig(method="ngram"))
    assert expected_lengths([with_card]) == {"ngram": 2.75}
    assert expected_lengths([without]) == {}


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
        reply = site.post(COMPLETIONS, {"prompt": "abc", "max_tokens": 4}, traceparent="00-1-2-01")
    finally:
        service.tracer = before
    assert reply.status == 200
    [span] = spans
    assert (span["name"], span["context"]) == ("llm_request", "00-1-2-01")
    assert (span["gen_ai.usage.prompt_tokens"], span["gen_ai.usage.completion_tokens"]) == (3, 4)
    assert span["start"] < span["end"]
