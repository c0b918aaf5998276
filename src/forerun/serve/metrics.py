"""Prometheus series: our own under `forerun:`, the shared ones also under vLLM's names if asked.

Names, types and definitions are those of the documentation's table; counters only grow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from forerun.engine import DecodingStats, Engine
from forerun.engine.stats import total
from forerun.serve.cards import Promise
from forerun.serve.engine_series import CACHE_SERIES, ENGINE_SERIES, EngineSeries

LABELS = ("model_name", "engine")
FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
SLOW = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
SIZES = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))
LENGTHS = tuple(range(17))

HISTOGRAMS: Mapping[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("Arrival to first committed token.", FAST + SLOW[12:]),
    "inter_token_latency_seconds": ("Between two emissions of a request, one sample per step.", FAST),
    "request_time_per_output_token_seconds": ("(last - first) / (tokens - 1) of a request.", FAST),
    "e2e_request_latency_seconds": ("Arrival to last token.", SLOW),
    "request_queue_time_seconds": ("Arrival to the first step that computes it.", SLOW),
    "request_prefill_time_seconds": ("First step to first token.", SLOW),
    "request_decode_time_seconds": ("First to last token.", SLOW),
    "request_prompt_tokens": ("Prompt tokens of a finished request.", SIZES),
    "request_generation_tokens": ("Generated tokens of a finished request.", SIZES),
}
COUNTERS: Mapping[str, str] = {
    "prompt_tokens": "Prompt tokens computed.",
    "generation_tokens": "Tokens committed.",
    "num_preemptions": "Preemptions.",
}
GAUGES: Mapping[str, str] = {
    "num_requests_running": "Requests being decoded.",
    "num_requests_waiting": "Requests waiting.",
    "kv_cache_usage_perc": "Used share of the KV blocks, 0 to 1.",
}
OWN_COUNTERS: Mapping[str, str] = {
    "spec_decode_drafted_tokens": "Draft tokens proposed.",
    "spec_decode_verified_tokens": "Draft tokens sent to the target.",
    "spec_decode_accepted_tokens": "Draft tokens kept by verification, bonus excluded.",
    "spec_decode_emitted_tokens": "Accepted + 1 per target step.",
    "spec_decode_discarded_tokens": "Emitted, but cut by a stop rule.",
    "spec_decode_drafting_rounds": "Rounds with at least one token drafted.",
    "spec_decode_target_steps": "Target steps after the prefill, summed over requests.",
    "spec_decode_drafter_faults": "Rounds in which a drafter failed; they were decoded plainly.",
    "spec_decode_probes": "Rounds that drafted to learn what drafts are worth.",
    "requests_refused": "Requests answered with 429.",
}
OWN_HISTOGRAMS: Mapping[str, str] = {
    "spec_decode_draft_length": "Draft tokens verified in a step.",
    "spec_decode_accepted_length": "Draft tokens accepted in a step that verified some.",
}
PER_POSITION = ("verified", "reached", "accepted")
SUCCESS, SKIPPED = "request_success", "spec_decode_skipped_steps"
INVALID = "spec_decode_invalid_drafts"
EXPECTED, RECENT = "spec_decode_expected_accepted_length", "spec_decode_recent_accepted_length"
ALARM = "spec_decode_drift_alarm"

SHARED = (*HISTOGRAMS, *GAUGES, *(f"{name}_total" for name in (*COUNTERS, *CACHE_SERIES, SUCCESS)))
"""Series that exist under vLLM's names too, if asked."""
OWN = (
    *OWN_HISTOGRAMS, *ENGINE_SERIES, EXPECTED, RECENT, ALARM,
    *(f"{name}_total" for name in (*OWN_COUNTERS, *(f"spec_decode_{kind}_per_pos" for kind in PER_POSITION))),
    f"{SKIPPED}_total", f"{INVALID}_total",
)  # fmt: skip
"""Series of ours. These two lists are all there is, as they are named on the page behind their prefix."""


class Source(Protocol):
    """Something that still counts."""

    def settle(self) -> None: ...


class Metrics:
    """All series of one server. It is fed on the event loop.

    Args:
        model: the first served name.
        compat: whether the shared series exist under `vllm:` too, with vLLM's four own ones.
        expected: by drafter, what its card promises.
    """

    def __init__(self, model: str, compat: bool, expected: Mapping[str, Promise] | None = None):
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model, "engine": "0"}
        self._prefixes = ("forerun:", "vllm:") if compat else ("forerun:",)
        self._series: dict[str, list[Any]] = {}
        for name, (text, buckets) in HISTOGRAMS.items():
            self._add(name, Histogram, text, self._prefixes, buckets=buckets)
        for name, text in COUNTERS.items():
            self._add(name, Counter, text, self._prefixes)
        for name, text in GAUGES.items():
            self._add(name, Gauge, text, self._prefixes)
        for name, text in OWN_COUNTERS.items():
            self._add(name, Counter, text, self._prefixes[:1])
        for name, text in OWN_HISTOGRAMS.items():
            self._add(name, Histogram, text, self._prefixes[:1], buckets=LENGTHS)
        self._success = [self._counter(p, SUCCESS, "finished_reason") for p in self._prefixes]
        self._positions = {
            kind: self._counter("forerun:", f"spec_decode_{kind}_per_pos", "position") for kind in PER_POSITION
        }
        self._skipped = self._counter("forerun:", SKIPPED, "reason")
        self._invalid = self._counter("forerun:", INVALID, "reason", "action")
        self._compat = _VllmCounters(self) if compat else None
        self.drift = DriftAlarm(self, expected or {})
        self.totals = DecodingStats()
        """Everything that was decoded so far, for the log line."""
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.open: set[Source] = set()
        """Requests being served: they are asked when somebody reads, not counted step by step."""

    def watch(self, engine: Engine) -> None:
        """From here on the page has what this engine itself counts."""
        self.registry.register(EngineSeries(engine, self._labels, self._prefixes))

    def _add(self, name: str, kind: Callable[..., Any], text: str, prefixes: Sequence[str], **options: Any) -> None:
        made = [kind(prefix + name, text, LABELS, registry=self.registry, **options) for prefix in prefixes]
        self._series[name] = [series.labels(**self._labels) for series in made]

    def _counter(self, prefix: str, name: str, *labels: str) -> Callable[..., Any]:
        """`counter(*values)`: the series with these values of its labels."""
        series = Counter(prefix + name, f"By {' and '.join(labels)}.", (*LABELS, *labels), registry=self.registry)
        return lambda *values: series.labels(**self._labels, **dict(zip(labels, values, strict=True)))

    def gauge(self, name: str, text: str, label: str) -> Callable[[str], Any]:
        """A gauge of our own with a label of its own."""
        series = Gauge(f"forerun:{name}", text, (*LABELS, label), registry=self.registry)
        return lambda value: series.labels(**self._labels, **{label: value})

    def own_counter(self, prefix: str, name: str, text: str) -> Any:
        """A counter under one prefix only."""
        return Counter(prefix + name, text, LABELS, registry=self.registry).labels(**self._labels)

    def observe(self, name: str, value: float) -> None:
        for series in self._series[name]:
            series.observe(max(0.0, value))

    def count(self, name: str, value: float = 1) -> None:
        for series in self._series[name]:
            series.inc(value)

    def set(self, name: str, value: float) -> None:
        for series in self._series[name]:
            series.set(value)

    def prompt(self, tokens: int) -> None:
        self.prompt_tokens += tokens
        self.count("prompt_tokens", tokens)

    def generated(self, tokens: int) -> None:
        self.generation_tokens += tokens
        self.count("generation_tokens", tokens)

    def finished(self, reason: str) -> None:
        """A sample that ended: stop, length or abort."""
        for series in self._success:
            series(reason).inc()

    def decoded(self, more: DecodingStats) -> None:
        """What one or more rounds did."""
        for name in ("drafted", "verified", "accepted", "emitted", "discarded"):
            self.count(f"spec_decode_{name}_tokens", getattr(more, name))
        self.count("spec_decode_drafting_rounds", more.drafting_rounds)
        self.count("spec_decode_target_steps", more.target_steps)
        self.count("spec_decode_drafter_faults", more.drafter_faults)
        self.count("spec_decode_probes", more.probes)
        self.count("num_preemptions", more.preemptions)
        for kind in PER_POSITION:
            for position, value in enumerate(getattr(more, f"{kind}_by_position")):
                self._positions[kind](str(position)).inc(value)
        for reason, rounds in more.skipped_steps.items():
            self._skipped(reason).inc(rounds)
        for what, positions in more.invalid_positions.items():
            self._invalid(*what.split()).inc(positions)
        if self._compat is not None:
            self._compat.add(more)
        self.totals = total((self.totals, more))

    def settle(self) -> None:
        """Asks the requests being served what they have done since they were last asked."""
        for source in list(self.open):
            source.settle()

    def text(self) -> bytes:
        """The page of /metrics."""
        self.settle()
        return generate_latest(self.registry)


class _VllmCounters:
    """vLLM's four, with its own definitions: a draft is a round for which at least one token was verified."""

    def __init__(self, metrics: Metrics):
        made = {
            name: metrics.own_counter("vllm:", f"spec_decode_num_{name}", text)
            for name, text in (
                ("drafts", "Rounds with at least one draft token scheduled."),
                ("draft_tokens", "Draft tokens scheduled."),
                ("accepted_tokens", "Draft tokens accepted."),
            )
        }
        self._drafts, self._tokens, self._accepted = made.values()
        self._per_position = metrics._counter("vllm:", "spec_decode_num_accepted_tokens_per_pos", "position")

    def add(self, more: DecodingStats) -> None:
        self._drafts.inc(sum(more.verified_by_position[:1]))
        self._tokens.inc(more.verified)
        self._accepted.inc(more.accepted)
        for position, value in enumerate(more.accepted_by_position):
            self._per_position(str(position)).inc(value)


class DriftAlarm:
    """Whether recent requests accept what the drafter's card promises.

    Compared is what rounds accept beyond the token they would have had anyway with what they should have by the card,
    given how many tokens each of them verified: K is small under load, and where a request says so. Half of the promise
    is the border: a drafter of another template or target falls far below it, other prompts and temperatures do not
    (assumed, and the border `forerun doctor` uses).
    """

    WINDOW = 256
    """Requests that count as recent."""
    ROUNDS = 200
    """Rounds they must have together before anything is said."""

    def __init__(self, metrics: Metrics, expected: Mapping[str, Promise]):
        self._expected = dict(expected)
        self._recent: dict[str, deque[tuple[float, ...]]] = {name: deque(maxlen=self.WINDOW) for name in expected}
        if not expected:
            return
        label = "drafter"
        card = metrics.gauge(EXPECTED, "What the drafter's card says.", label)
        self._length = metrics.gauge(RECENT, "Of recent requests, bonus included.", label)
        self._alarm = metrics.gauge(ALARM, "1: recent requests accept less than half of what the card says.", label)
        for name, promise in expected.items():
            card(name).set(promise.length)
            self._alarm(name).set(0)

    def add(self, drafter: str, stats: DecodingStats) -> None:
        """A finished request that this drafter alone drafted for."""
        if drafter not in self._recent or stats.drafting_rounds == 0:
            return
        recent = self._recent[drafter]
        recent.append((stats.drafting_rounds, stats.accepted, self._expected[drafter].accepted(stats)))
        rounds, accepted, promised = (sum(column) for column in zip(*recent, strict=True))
        self._length(drafter).set(1 + accepted / rounds)
        if rounds >= self.ROUNDS:
            self._alarm(drafter).set(float(accepted < promised / 2))


NUMBERS = (
    "drafted", "verified", "accepted", "emitted", "discarded", "drafting_rounds", "target_steps", "drafter_faults",
    "preemptions", "invalid_drafts", "probes", "planned", "cached_tokens",
)  # fmt: skip
"""Counters of `DecodingStats` that are published."""


def difference(now: DecodingStats, before: DecodingStats) -> DecodingStats:
    """What was added between two readings."""
    more = DecodingStats(**{name: getattr(now, name) - getattr(before, name) for name in NUMBERS})
    for kind in PER_POSITION:
        name = f"{kind}_by_position"
        old = getattr(before, name)
        new = list(getattr(now, name))
        setattr(more, name, [value - (old[k] if k < len(old) else 0) for k, value in enumerate(new)])
    for name in ("skipped_steps", "invalid_positions"):
        old = getattr(before, name)
        setattr(more, name, {what: count - old.get(what, 0) for what, count in dict(getattr(now, name)).items()})
    return more


__all__ = ["ALARM", "OWN", "SHARED", "DriftAlarm", "Metrics", "difference"]
