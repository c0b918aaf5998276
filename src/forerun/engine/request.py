"""One request: what was asked, what has been committed, and the results handed to the caller."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from forerun.engine.stats import DecodingStats
from forerun.engine.text import TextStream
from forerun.sampling import Noise, Sampling, TokenLogprob, VerifyMode
from forerun.target.blocks import BlockKey

FinishReason = Literal["stop", "length", "abort"]


@dataclass(slots=True)
class Completion:
    """The result of one sample of one prompt."""

    prompt_index: int
    sample_index: int
    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | str | None
    """None for end-of-sequence and length, the stop id, or the matched string."""
    seed: int
    """Of its noise. In coupled mode, or without drafts, it gives this sample again, alone and with n = 1; in rejection
    mode the draws depend on what was drafted too."""
    from_draft: list[bool]
    """For each token, whether it was an accepted draft token."""
    logprobs: list[TokenLogprob] | None
    stats: DecodingStats
    drafter: str
    seconds: float
    """From the first step that computed the request to its last token."""

    @property
    def tokens_per_second(self) -> float | None:
        return len(self.token_ids) / self.seconds if self.seconds > 0 else None


@dataclass(slots=True)
class Chunk:
    """What one step added to one sample of a stream."""

    prompt_index: int
    sample_index: int
    text: str
    """Whole characters; the concatenation over a stream is the completion's text."""
    token_ids: list[int]
    from_draft: list[bool]
    rejected: list[int]
    """Draft tokens of this step that verification refused or never reached."""
    completion: Completion | None = None
    """Set on the last chunk of a sample, unless it failed or was cancelled."""
    finished: bool = False
    verified: int = 0
    """Draft tokens that this step sent to the target."""
    accepted: int = 0
    """Of these, kept by verification, before a stop rule cuts."""
    confidence: list[float] = field(default_factory=list)
    """c_k of the tokens that were verified, as the drafter gave them; empty: it gave none."""
    logprobs: list[TokenLogprob] | None = None
    """One for each of `token_ids`, if they were asked for."""
    stats: DecodingStats = field(default_factory=DecodingStats)
    """The request's own counters, which go on counting."""
    started: float | None = None
    """When the first step that computed it began; seconds of a monotonic clock."""
    at: float = 0.0
    """When the chunk was made, on the same clock."""

    @classmethod
    def of(cls, request: Request, text: str, progress: Progress) -> Chunk:
        finished = request.finish_reason is not None
        whole = finished and request.finish_reason != "abort"
        count = len(progress.token_ids)
        return cls(
            prompt_index=request.prompt_index,
            sample_index=request.sample_index,
            text=text,
            token_ids=progress.token_ids,
            from_draft=progress.from_draft,
            rejected=progress.rejected,
            completion=request.completion() if whole else None,
            finished=finished,
            verified=progress.verified,
            accepted=progress.accepted,
            confidence=progress.confidence,
            logprobs=None if request.sampling.logprobs is None else request.logprobs[len(request.logprobs) - count :],
            stats=request.stats,
            started=request.started,
            at=time.perf_counter(),
        )


@dataclass(slots=True)
class SpeculativeOption:
    """Per-request control: which loaded drafters may propose, and how much."""

    methods: tuple[str, ...] | None = None
    """Names of loaded drafters; None: all of them, in the order they were loaded; (): none."""
    max_draft: int | None = None
    """Lowers K; it never raises it."""
    confidence_threshold: float | None = None
    """Neither draft nor verify from the first c_k below it on; None: as configured."""


@dataclass(slots=True)
class Progress:
    """What a step did to one request."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    from_draft: list[bool] = field(default_factory=list)
    rejected: list[int] = field(default_factory=list)
    verified: int = 0
    """Draft tokens sent to the target."""
    accepted: int = 0
    """Of these, kept by verification, before a stop rule cuts."""
    confidence: list[float] = field(default_factory=list)
    """c_k of the verified tokens, as the drafter gave them; empty: it gave none."""


@dataclass(slots=True, eq=False)
class Request:
    """State of one sample. `tokens` and `rows` are the state; whatever else a step needs follows from them.

    tokens[:rows] have final KV rows; tokens[rows:] are still to be fed. After every round the newest token, the anchor,
    is the only one without a row, so decoding is the case of one pending token and prefill the case of many.
    """

    id: int
    tokens: list[int]
    prompt_length: int
    sampling: Sampling
    noise: Noise
    verify_mode: VerifyMode
    limit: int
    """Most tokens, prompt included, that the request may ever hold."""
    text: TextStream
    eos_ids: frozenset[int]
    speculative: SpeculativeOption = field(default_factory=SpeculativeOption)
    prediction: Sequence[int] = ()
    prompt_index: int = 0
    sample_index: int = 0
    priority: int = 0
    """Of waiting requests the one with the lowest is admitted first."""
    cache_salt: str | None = None
    """Rows are shared with requests of the same salt only."""
    first_sample: Request | None = None
    """Of the same prompt; None: this is it."""
    rows: int = 0
    blocks: list[int] = field(default_factory=list)
    block_keys: list[BlockKey] = field(default_factory=list)
    """Of the first complete blocks, as far as they were needed."""
    published: int = 0
    """How many of its first blocks others may find; it does not write to them any more."""
    from_draft: list[bool] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    stats: DecodingStats = field(default_factory=DecodingStats)
    drafters_used: dict[str, int] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    """Rounds in a row in which drafting failed, by drafter."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    started: float | None = None
    ended: float | None = None
    error: BaseException | None = None

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.rows

    @property
    def prefill(self) -> int:
        """Rows to feed before the next round of drafting and verification; 0 while decoding.

        A new request feeds its whole prompt, whose last row yields the first token. A preempted one stops short of its
        anchor: nothing is sampled on the way back, and the round it lost is run again with the same drafts and noise.
        """
        return self.pending - (len(self.tokens) > self.prompt_length)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def anchor(self) -> int:
        return len(self.tokens) - 1

    @property
    def end_ids(self) -> frozenset[int]:
        """Ids that end the request, which `min_tokens` keeps away until then."""
        return (frozenset() if self.sampling.ignore_eos else self.eos_ids) | frozenset(self.sampling.stop_token_ids)

    def commit(self, run: Sequence[int], accepted: int) -> int:
        """Commits a run of emitted tokens one by one; the first rule that fires ends the request.

        Returns how many were committed; the rest is discarded.
        """
        for index, token in enumerate(run):
            self.tokens.append(token)
            self.from_draft.append(index < accepted)
            self._apply_rules(token)
            if self.finish_reason is not None:
                return index + 1
        return len(run)

    def _apply_rules(self, token: int) -> None:
        """End of sequence, stop ids, stop strings, rules of the caller, length: in this order, at every token."""
        s = self.sampling
        early = len(self.tokens) - self.prompt_length <= s.min_tokens
        if token in self.eos_ids and not s.ignore_eos:
            # Also while min_tokens would forbid it: it can only come where nothing else was possible.
            self._finish("stop", None, token)
        elif not early and token in s.stop_token_ids:
            self._finish("stop", token, token)
        elif (matched := self.text.push(token, look_for_stops=not early)) is not None:
            self.finish_reason, self.stop_reason = "stop", matched
        elif any(ends(self.tokens) for ends in s.stop_when):
            self.finish_reason = "stop"
        elif len(self.tokens) >= self.limit:
            self.finish_reason = "length"

    def _finish(self, reason: FinishReason, stop_reason: int | None, token: int) -> None:
        self.finish_reason, self.stop_reason = reason, stop_reason
        if self.sampling.include_stop_str_in_output:
            self.text.push(token, look_for_stops=False)

    def completion(self) -> Completion:
        assert self.finish_reason is not None
        return Completion(
            prompt_index=self.prompt_index,
            sample_index=self.sample_index,
            prompt_token_ids=self.tokens[: self.prompt_length],
            text=self.text.text,
            token_ids=self.output,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            seed=self.noise.seed,
            from_draft=self.from_draft,
            logprobs=self.logprobs if self.sampling.logprobs is not None else None,
            stats=self.stats,
            drafter="+".join(self.drafters_used) or "vanilla",
            seconds=0.0 if self.started is None or self.ended is None else self.ended - self.started,
        )
