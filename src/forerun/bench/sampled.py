"""The law of tokens 2 and 3 on a real model, in rejection mode, against the target's own probabilities in float64.

Token 1 comes from the prefill and never meets verification; tokens 2 and 3 do. With top_k = 3 a handful of samples per
cell suffices, and every branch of the rule is taken: accepted, refused with a residual of two tokens, bonus.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from forerun.bench.chisquare import Tested, chi_square, detectable, sample_size
from forerun.bench.cold import own_salt
from forerun.bench.comparison import Advance
from forerun.engine import DecodingStats, Engine
from forerun.engine.stats import total
from forerun.sampling import Row, Sampling, distribution

TOP_K = 3
DRAFTED = 2
TOKENS = 4
"""Tokens decoded: one from the prefill, two that are tested, and one so that the third can be a draft."""

BATCH = 256
"""Requests handed to the engine at once; it decodes as many of them together as it may."""

FRAGMENT, CONTINUED = 2, 3
"""A prefix is a fragment of a prompt, its greedy continuation, and the fragment again: n-grams match there too."""

DEGREES = (TOP_K * (TOP_K - 1), TOP_K**2 * (TOP_K - 1))
"""Degrees of freedom of the two tests at most: one conditional law per token before."""

Law = Mapping[int, float]


@dataclass(frozen=True)
class Power:
    """What the tests are made to find."""

    total_variation: float = 0.05
    power: float = 0.9
    alarm: float = 0.01
    """Probability that a lossless engine fails any test of the family (Holm)."""

    def samples(self, tests: int) -> int:
        """Samples per drafter and prefix, for the test with most degrees of freedom."""
        return sample_size(self.total_variation, self.power, self.alarm / max(1, tests), max(DEGREES))

    def found(self, tested: Tested, tests: int) -> float:
        """The smallest total variation this test would have found."""
        if tested.dof == 0 or tested.samples == 0:
            return 1.0
        return detectable(tested.samples, self.power, self.alarm / max(1, tests), tested.dof, tested.allowed)


@dataclass(frozen=True)
class Prefix:
    """A text and the target's processed laws after it: of token 1, of 2 given 1, of 3 given 1 and 2."""

    ids: tuple[int, ...]
    laws: Mapping[tuple[int, ...], Law]
    """Output so far -> law of the next token; no entry for what cannot be produced."""
    border: float
    """Smallest gap of logits at the edge of top_k: what rounding would have to exceed to change the support."""

    @property
    def spread(self) -> float:
        """Mean entropy of the laws of tokens 2 and 3, in nats: a law near a point mass tests little."""
        tested = [law for before, law in self.laws.items() if before]
        return sum(-sum(p * math.log(p) for p in law.values()) for law in tested) / len(tested)


@dataclass(frozen=True)
class Draws:
    """How many samples are drawn, and from where their seeds count."""

    samples: int
    temperature: float
    seed: int = 0


def sampling(temperature: float, seed: int | None = None) -> Sampling:
    return Sampling(temperature=temperature, top_k=TOP_K, max_tokens=TOKENS, ignore_eos=True, seed=seed)


def choose_prefix(engine: Engine, prompts: Sequence[Sequence[int]], temperature: float, noise: float) -> Prefix:
    """The prefix with the widest spread among those whose support rounding cannot change; a choice without samples."""
    texts = [_with_echo(engine, prompt) for prompt in prompts]
    prefixes = [prefix_of(engine, text, temperature) for text in dict.fromkeys(texts)]
    safe = [prefix for prefix in prefixes if prefix.border > 2 * noise]
    if safe:
        return max(safe, key=lambda prefix: prefix.spread)
    return max(prefixes, key=lambda prefix: prefix.border)


def _with_echo(engine: Engine, prompt: Sequence[int]) -> tuple[int, ...]:
    fragment = list(prompt[-FRAGMENT:])
    greedy = Sampling(temperature=0, max_tokens=CONTINUED, ignore_eos=True)
    [completion] = engine.generate([fragment], greedy, speculative=False)
    return (*fragment, *completion.token_ids, *fragment)


def prefix_of(engine: Engine, ids: tuple[int, ...], temperature: float) -> Prefix:
    """The laws after a text, each from a pass that yields one row of logits."""
    laws: dict[tuple[int, ...], Law] = {}
    borders: list[float] = []
    outputs: list[tuple[int, ...]] = [()]
    for _ in range(3):
        rows = logits_after(engine, [(*ids, *output) for output in outputs])
        for output, logits in zip(outputs, rows, strict=True):
            place = Row(sampling(temperature), [*ids, *output], len(ids))
            law = distribution(logits[None], [place])[0]
            laws[output] = {token: float(law[token]) for token in law.nonzero()[:, 0].tolist()}
            best = logits.topk(min(TOP_K + 1, len(logits))).values
            borders.append(float(best[TOP_K - 1] - best[TOP_K]) if len(best) > TOP_K else math.inf)
        outputs = [(*output, token) for output in outputs for token in laws[output]]
    return Prefix(ids, laws, min(borders))


def logits_after(engine: Engine, texts: Sequence[Sequence[int]], together: bool = True) -> list[Tensor]:
    """The target's next-token logits [V] after each text, in float64, from one pass over all of them or one each."""
    seen: dict[tuple[int, ...], Tensor] = {}

    def watch(tokens: Sequence[int], logits: Tensor) -> Tensor:
        seen[tuple(tokens)] = logits.double().cpu()
        return logits

    once = Sampling(temperature=0, max_tokens=1, ignore_eos=True, logits_processors=(watch,))
    for batch in [texts] if together else [[text] for text in texts]:
        engine.generate([list(text) for text in batch], once, speculative=False, cache_salt=own_salt())
    return [seen[tuple(text)] for text in texts]


def rounding(engine: Engine, prefix: Prefix, temperature: float) -> float:
    """Bound of the relative error of the laws: twice what passes of two shapes disagree by; infinite if in the support.

    Both passes are plain prefills: no draft and no verification can widen the bound.
    """
    outputs = list(prefix.laws)
    worst = 0.0
    for output, logits in zip(outputs, logits_after(engine, [(*prefix.ids, *o) for o in outputs], False), strict=True):
        place = Row(sampling(temperature), [*prefix.ids, *output], len(prefix.ids))
        law = distribution(logits[None], [place])[0]
        for token, p in prefix.laws[output].items():
            q = float(law[token])
            worst = max(worst, abs(math.log(q / p)) if q > 0 else math.inf)
    return 2 * worst


Triple = tuple[int, int, int]


def draw_outputs(
    engine: Engine, drafter: str, prefix: Prefix, draws: Draws, advance: Advance
) -> tuple[Counter[Triple], DecodingStats]:
    """The first three tokens of many seeded samples, and what became of their drafts."""
    counts: Counter[Triple] = Counter()
    stats = DecodingStats()
    asked = {"method": drafter, "max_draft": DRAFTED, "verify_mode": "rejection"}
    for start in range(0, draws.samples, BATCH):
        seeds = range(draws.seed + start, draws.seed + min(start + BATCH, draws.samples))
        options = [sampling(draws.temperature, seed) for seed in seeds]
        done = engine.generate([list(prefix.ids)] * len(seeds), options, speculative=asked)
        for completion in done:
            one, two, three = completion.token_ids[:3]
            counts[one, two, three] += 1
        stats = total([stats, *(completion.stats for completion in done)])
        advance(len(seeds))
    return counts, stats


def tested_laws(counts: Mapping[Triple, int], prefix: Prefix, relative_error: float) -> tuple[Tested, Tested]:
    """Token 2 given token 1, and token 3 given both."""
    second: dict[tuple[int, ...], Counter[int]] = {}
    third: dict[tuple[int, ...], Counter[int]] = {}
    for (one, two, three), count in counts.items():
        second.setdefault((one,), Counter())[two] += count
        third.setdefault((one, two), Counter())[three] += count
    return _tested(second, prefix, relative_error), _tested(third, prefix, relative_error)


def _tested(seen: Mapping[tuple[int, ...], Counter[int]], prefix: Prefix, relative_error: float) -> Tested:
    """What comes after something impossible has no law: an empty one, under which everything is impossible."""
    return chi_square([(counts, prefix.laws.get(before, {})) for before, counts in seen.items()], relative_error)
