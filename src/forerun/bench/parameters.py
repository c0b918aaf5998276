"""Every sampling and stop parameter once against plain decoding: it must mean the same with and without a drafter.

The values are made from what the model really says (its most frequent token is banned, a text from its middle stops
it), so that they bite: a parameter that a verify block ignored would show.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from forerun.bench.comparison import Comparison, Findings, Plain, Task, run
from forerun.engine import Completion, Engine
from forerun.sampling import Sampling, VerifyMode

NAMES = (
    "repetition_penalty",
    "frequency and presence penalty",
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "top_k, top_p and min_p",
    "min_tokens",
    "stop_token_ids",
    "stop",
    "logprobs",
)

MODES: dict[VerifyMode, Sampling] = {
    "rejection": Sampling(temperature=0),
    "coupled": Sampling(temperature=0.9, seed=5),
}
"""Greedy, and coupled at a temperature: the two ways in which ids must be identical."""

TINY_LOGPROBS = 1e-5
"""Tolerance of log-probabilities where passes of different shapes agree to rounding in float32."""


@dataclass
class Outcome:
    """What one parameter showed, over modes and drafters."""

    name: str
    findings: Findings = field(default_factory=Findings)
    changed: bool = False
    """Whether it changed the plain output at all."""
    ends: list[str] = field(default_factory=list)
    """Outputs with the right ids and another text or reason to end."""
    logprob_error: float = 0.0
    logprob_tolerance: float = TINY_LOGPROBS

    @property
    def passed(self) -> bool:
        return self.findings.explained and not self.ends and self.logprob_error <= self.logprob_tolerance


def try_parameters(
    comparison: Comparison, prompt: Sequence[int], drafters: Sequence[str], k: int, tokens: int
) -> list[Outcome]:
    """One outcome per name of `NAMES`."""
    outcomes = {name: Outcome(name) for name in NAMES}
    for mode, base in MODES.items():
        bare = run(comparison.engine, task := Task(prompt, replace(base, max_tokens=tokens), mode), task.plainly)
        comparison.advance(tokens)
        for name, changes in values(comparison.engine, bare.token_ids, tokens).items():
            plain = comparison.plain(replace(task, sampling=replace(task.sampling, **changes)))
            outcome = outcomes[name]
            outcome.changed |= plain.token_ids != bare.token_ids
            for drafter in drafters:
                _try(comparison, outcome, plain, drafter, k)
    return list(outcomes.values())


def _try(comparison: Comparison, outcome: Outcome, plain: Plain, drafter: str, k: int) -> None:
    completion = run(comparison.engine, plain.task, plain.task.drafted(drafter, k))
    comparison.advance(len(plain.token_ids))
    outcome.findings.add(completion, comparison.differences(plain, completion, drafter, k, 0))
    if completion.token_ids == plain.token_ids and _end(completion) != _end(plain.completion):
        outcome.ends.append(f"{drafter}: {_end(completion)} for {_end(plain.completion)}")
    if plain.task.sampling.logprobs is not None:
        outcome.logprob_error = max(outcome.logprob_error, logprob_error(plain.completion, completion))
        noise = comparison.noise(plain, k + 1).max_difference
        # A log-probability is a logit minus the log-sum of all: each can move by the noise.
        outcome.logprob_tolerance = max(outcome.logprob_tolerance, 2 * noise)


def _end(completion: Completion) -> tuple[str, str, int | str | None]:
    return completion.text, completion.finish_reason, completion.stop_reason


def logprob_error(plain: Completion, other: Completion) -> float:
    """Largest difference of the log-probabilities of their common beginning, listed alternatives included."""
    assert plain.logprobs is not None
    assert other.logprobs is not None
    error = 0.0
    for mine, its in zip(plain.logprobs, other.logprobs, strict=False):
        if mine.token_id != its.token_id:
            break
        alternatives = dict(its.top)
        pairs = [(value, alternatives[token]) for token, value in mine.top if token in alternatives]
        error = max([error, abs(mine.logprob - its.logprob), *(abs(a - b) for a, b in pairs)])
    return error


def values(engine: Engine, output: Sequence[int], tokens: int) -> Mapping[str, Mapping[str, Any]]:
    """Values of every parameter that change this output."""
    assert len(output) > 0
    frequent = Counter(output).most_common(1)[0][0]
    middle = output[len(output) // 2]
    found: dict[str, Mapping[str, Any]] = {
        "repetition_penalty": {"repetition_penalty": 1.3},
        "frequency and presence penalty": {"frequency_penalty": 0.8, "presence_penalty": 0.5},
        "logit_bias": {"logit_bias": {frequent: -3.0, middle: 2.0}},
        "bad_words": {"bad_words": ((frequent,), tuple(output[:2]))},
        "allowed_token_ids": {"allowed_token_ids": sorted({*output, 0, 1} - {middle} or {*output})},
        "top_k, top_p and min_p": {"top_k": 8, "top_p": 0.9, "min_p": 0.02},
        "min_tokens": {"stop_token_ids": (output[0],), "min_tokens": max(1, tokens // 2)},
        "stop_token_ids": {"stop_token_ids": (middle,)},
        "stop": {"stop": tuple(_pieces(engine, output)) or ("\0",), "include_stop_str_in_output": True},
        "logprobs": {"logprobs": 3},
    }
    assert tuple(found) == NAMES
    return found


def _pieces(engine: Engine, output: Sequence[int]) -> Iterator[str]:
    """A text that spans two tokens in the middle of the output."""
    middle = len(output) // 2
    text = engine.target.tokenizer.decode(output[middle : middle + 2])
    if text and "\N{REPLACEMENT CHARACTER}" not in text:
        yield text
