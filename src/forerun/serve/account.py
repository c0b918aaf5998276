"""What one HTTP request did: tokens, times and drafting, for its answer and for the metrics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from forerun.engine import Chunk, Completion, DecodingStats
from forerun.engine.stats import total
from forerun.serve.metrics import Metrics, difference
from forerun.serve.options import SpecMetrics

Place = tuple[int, int]
"""(prompt index, sample index)"""


@dataclass(slots=True)
class Sample:
    """One answer of a request. Times are those of one monotonic clock, in seconds."""

    tokens: int = 0
    emissions: int = 0
    started: float | None = None
    first: float | None = None
    last: float | None = None
    live: DecodingStats | None = None
    """The engine's own counters, which may be ahead of what has been read."""
    seen: DecodingStats = field(default_factory=DecodingStats)
    """Of these, what the metrics have."""
    steps: list[tuple[int, int]] = field(default_factory=list)
    """(verified, accepted) of each step that verified something."""
    completion: Completion | None = None


class Account:
    """Kept while the chunks of one request come.

    Args:
        metrics: of the server.
        arrived: when the request came, before anything of it was read.
        prompts: tokens of each prompt.
    """

    def __init__(self, metrics: Metrics, arrived: float, prompts: list[int]):
        self.arrived = arrived
        self.prompts = prompts
        self.samples: dict[Place, Sample] = {}
        self._metrics = metrics

    def open(self) -> None:
        """From here on it is asked when somebody reads the metrics."""
        self._metrics.open.add(self)

    def settle(self) -> None:
        """Brings the metrics up to the engine's counters: when they are read, and at the end."""
        for sample in self.samples.values():
            if sample.live is not None:
                more = difference(sample.live, sample.seen)
                self._metrics.decoded(more)
                sample.seen = total((sample.seen, more))

    def add(self, chunk: Chunk) -> None:
        """One chunk, in the order of its sample."""
        sample = self.samples.setdefault((chunk.prompt_index, chunk.sample_index), Sample())
        sample.live = chunk.stats
        sample.started = chunk.started if chunk.started is not None else sample.started
        sample.completion = chunk.completion
        self._step(sample, chunk)
        if chunk.token_ids:
            self._tokens(sample, chunk)
        if chunk.completion is not None:
            self._finish(sample, chunk.completion)

    def _tokens(self, sample: Sample, chunk: Chunk) -> None:
        metrics, now = self._metrics, chunk.at
        if sample.first is None:
            sample.first = now
            metrics.prompt(self.prompts[chunk.prompt_index] - chunk.stats.cached_tokens)
            metrics.observe("time_to_first_token_seconds", now - self.arrived)
        elif sample.last is not None:
            metrics.observe("inter_token_latency_seconds", now - sample.last)
        sample.last = now
        sample.tokens += len(chunk.token_ids)
        sample.emissions += 1
        metrics.generated(len(chunk.token_ids))

    def _step(self, sample: Sample, chunk: Chunk) -> None:
        """What the chunk's step verified and accepted, before a stop rule cut."""
        if chunk.verified:
            sample.steps.append((chunk.verified, chunk.accepted))
            self._metrics.observe("spec_decode_draft_length", chunk.verified)
            self._metrics.observe("spec_decode_accepted_length", chunk.accepted)

    def _finish(self, sample: Sample, completion: Completion) -> None:
        metrics = self._metrics
        metrics.finished(completion.finish_reason)
        metrics.observe("request_prompt_tokens", len(completion.prompt_token_ids))
        metrics.observe("request_generation_tokens", sample.tokens)
        metrics.drift.add(completion.drafter, completion.stats)
        if sample.first is None or sample.last is None or sample.started is None:
            return  # max_tokens = 0
        metrics.observe("e2e_request_latency_seconds", sample.last - self.arrived)
        metrics.observe("request_queue_time_seconds", sample.started - self.arrived)
        metrics.observe("request_prefill_time_seconds", sample.first - sample.started)
        metrics.observe("request_decode_time_seconds", sample.last - sample.first)
        if sample.tokens > 1:
            per_token = (sample.last - sample.first) / (sample.tokens - 1)
            metrics.observe("request_time_per_output_token_seconds", per_token)

    def close(self, expected: int) -> None:
        """At the end, also where it was cancelled or failed: what nobody read is counted, what is missing aborted."""
        self.settle()
        self._metrics.open.discard(self)
        done = sum(sample.completion is not None for sample in self.samples.values())
        for _ in range(expected - done):
            self._metrics.finished("abort")

    # ------------------------------------------------------------------------------------------------ for the answer

    @property
    def completion_tokens(self) -> int:
        return sum(sample.tokens for sample in self.samples.values())

    def usage(self) -> dict[str, Any]:
        """`usage` so far, without details."""
        prompt, completion = sum(self.prompts), self.completion_tokens
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that came from the prefix cache. Every sample has the whole prompt, which `usage` counts once:
        what the one with the fewest was spared, the request was."""
        by_prompt: dict[int, int] = {}
        for (prompt, _), sample in self.samples.items():
            if sample.live is not None:
                spared = sample.live.cached_tokens
                by_prompt[prompt] = min(by_prompt.get(prompt, spared), spared)
        return sum(by_prompt.values())

    def only(self) -> Sample | None:
        """The sample of a request that has one; None where it has several: their numbers cannot be told apart."""
        return next(iter(self.samples.values())) if len(self.samples) == 1 else None


def usage_of(account: Account, reasoning_tokens: int | None, predicted: bool) -> dict[str, Any]:
    """The whole `usage` of a finished request.

    Args:
        account: of the request.
        reasoning_tokens: those of the reasoning; None where none is told apart.
        predicted: whether the request brought a prediction: only then accepted and rejected ones are reported.
    """
    usage = account.usage() | {"prompt_tokens_details": {"cached_tokens": account.cached_tokens}}
    details: dict[str, int] = {}
    if reasoning_tokens is not None:
        details["reasoning_tokens"] = reasoning_tokens
    if predicted:
        stats = [sample.live for sample in account.samples.values() if sample.live is not None]
        details["accepted_prediction_tokens"] = sum(s.predicted_accepted for s in stats)
        details["rejected_prediction_tokens"] = sum(s.predicted_rejected for s in stats)
    return usage | ({"completion_tokens_details": details} if details else {})


def metrics_of(account: Account, level: SpecMetrics, times: bool, most: int | None) -> dict[str, Any] | None:
    """vLLM's `metrics` object of a finished request; None for several answers.

    Args:
        account: of the request.
        level: of the part about drafting.
        times: whether the part about times is wanted.
        most: K, where a drafter is loaded; 0: unbounded; None: there is no drafter.
    """
    sample = account.only()
    if sample is None or sample.completion is None:
        return None
    found: dict[str, Any] = _times(account, sample) if times else {}
    if level != "none" and most is not None:
        found["speculative_decoding"] = _speculative(sample, level, most)
    return found or None


def _times(account: Account, sample: Sample) -> dict[str, Any]:
    started, first, last = sample.started, sample.first, sample.last
    if started is None or first is None or last is None:
        return {}
    gap = None if sample.emissions < 2 else 1e3 * (last - first) / (sample.emissions - 1)
    return {
        "time_to_first_token_ms": 1e3 * (first - started),
        "generation_time_ms": 1e3 * (last - first),
        "queue_time_ms": 1e3 * max(0.0, started - account.arrived),
        "mean_itl_ms": gap,
        "tokens_per_second": sample.tokens / (last - started) if last > started else None,
    }


def _speculative(sample: Sample, level: SpecMetrics, most: int) -> dict[str, Any]:
    """Names and formulas are vLLM's: a step counts if at least one draft token was verified in it."""
    longest = max([most, *(verified for verified, _ in sample.steps)])
    histogram = [0] * (longest + 1)
    by_length: dict[str, list[int]] = {}
    for verified, accepted in sample.steps:
        histogram[accepted] += 1
        by_length.setdefault(str(verified), [0] * (verified + 1))[accepted] += 1
    steps, drafted = len(sample.steps), sum(verified for verified, _ in sample.steps)
    kept = sum(accepted for _, accepted in sample.steps)
    found = {
        "mean_acceptance_length": 1 + kept / steps if kept else 1.0,
        "draft_acceptance_rate": kept / drafted if drafted else 0.0,
        "acceptance_histogram": histogram,
        "acceptance_histogram_by_draft_length": by_length,
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": kept,
        "num_draft_tokens": drafted,
        "num_spec_tokens": most,
    }
    if level == "detailed":
        found["per_step_accepted"] = [accepted for _, accepted in sample.steps]
        found["per_step_drafted"] = [verified for verified, _ in sample.steps]
    return found


def timings_of(account: Account) -> dict[str, Any] | None:
    """llama.cpp's `timings` so far; None for several answers."""
    sample = account.only()
    if sample is None or sample.first is None or sample.last is None or sample.started is None:
        return None
    cached, prompt_ms = account.cached_tokens, 1e3 * (sample.first - sample.started)
    prompt = account.prompts[0] - cached
    found = {"cache_n": cached, "prompt_n": prompt, "prompt_ms": prompt_ms, **_rates("prompt", prompt, prompt_ms)}
    spent = 1e3 * (sample.last - sample.first)
    found |= {"predicted_n": sample.tokens, "predicted_ms": spent, **_rates("predicted", sample.tokens, spent)}
    if sample.steps:
        found["draft_n"] = sum(verified for verified, _ in sample.steps)
        found["draft_n_accepted"] = sum(accepted for _, accepted in sample.steps)
    return found


def _rates(what: str, count: int, ms: float) -> dict[str, float | None]:
    return {
        f"{what}_per_token_ms": ms / count if count else None,
        f"{what}_per_second": 1e3 * count / ms if ms > 0 else None,
    }


__all__ = ["Account", "Sample", "metrics_of", "timings_of", "usage_of"]
