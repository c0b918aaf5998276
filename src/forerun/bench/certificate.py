"""`forerun verify`: is speculative decoding lossless here? Every claim a check, and every check able to fail."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from forerun.bench import agreement, checks, controls, exact, parameters, sampled
from forerun.bench.checks import Check, SampledResult
from forerun.bench.chisquare import holm
from forerun.bench.comparison import Advance, Comparison, Findings, Task
from forerun.bench.provenance import provenance
from forerun.bench.verdicts import LOSSLESS, NOT_LOSSLESS, NOT_PROVEN
from forerun.drafters.ngram import Ngram
from forerun.drafters.small import Small
from forerun.engine import Engine, EngineOptions
from forerun.engine.load import load_drafters
from forerun.engine.propose import LoadedDrafter
from forerun.sampling import Sampling, VerifyMode

logger = logging.getLogger("forerun")


@dataclass(frozen=True, kw_only=True)
class CertificateOptions:
    """How much is tried."""

    max_draft: int = 8
    """K runs from 1 to this."""
    max_tokens: int = 24
    """Of each greedy and coupled output."""
    samples: int | None = None
    """Per drafter in the sampled part; None: as many as `power` needs."""
    power: sampled.Power = field(default_factory=sampled.Power)
    temperature: float = 0.8
    """Of the coupled part."""
    sampled_temperature: float = 1.5
    """Of the sampled part: flat enough for every cell to be hit."""
    seed: int = 0


@dataclass(frozen=True)
class Certificate:
    """The result: what was checked, on what, and whether all of it holds."""

    checks: Sequence[Check]
    provenance: dict[str, Any]
    options: CertificateOptions
    prompts: int
    seconds: float

    @property
    def lossless(self) -> bool:
        return self.verdict == LOSSLESS

    @property
    def verdict(self) -> str:
        """One failed check is enough; one that had nothing to check leaves its claim open."""
        if any(not (check.passed or check.void) for check in self.checks):
            return NOT_LOSSLESS
        return LOSSLESS if self.checks and all(check.passed for check in self.checks) else NOT_PROVEN

    def as_dict(self) -> dict[str, Any]:
        """JSON types; `lossless` and `checks` first, as their readers expect."""
        return {
            "lossless": self.lossless,
            "verdict": self.verdict,
            "checks": [check.as_dict() for check in self.checks],
            "options": asdict(self.options) | {"prompts": self.prompts},
            "seconds": round(self.seconds, 1),
            **self.provenance,
        }


class Certifier:
    """Makes the certificate of one engine over some prompts.

    Args:
        engine: with the drafters to be checked, K of each at least `options.max_draft`.
        prompts: token ids; at least one.
        advance: told about work done, in units of one token decoded by the target; `total` of them in all.
    """

    TINY_SECONDS = 12.0
    """About what the parts on tiny targets take: their weight in the estimate of the time left."""

    def __init__(self, engine: Engine, prompts: Sequence[Sequence[int]], options: CertificateOptions):
        assert prompts, "a certificate needs prompts"
        assert engine.core.loaded, "a certificate needs a drafter"
        self.engine = engine
        self.prompts = prompts
        self.options = options
        self.longest = {entry.name: self._longest(entry) for entry in engine.core.loaded}
        self._labels = {entry.name: entry.label for entry in engine.core.loaded}
        self.drafters = list(self.longest)
        self.samples = options.samples or options.power.samples(2 * len(self.drafters))
        self._token_seconds = self._warm_up()
        self._advance: Advance = lambda _: None
        self._comparison = Comparison(engine, lambda tokens: self._advance(tokens))

    @property
    def total(self) -> int:
        """Units of work, estimated."""
        each = len(self.prompts) * self.options.max_tokens
        greedy = each * (1 + sum(1 + k for k in self.longest.values()))
        coupled = each * (1 + sum(1 + len(some_lengths(k)) for k in self.longest.values()))
        tiny = self._tiny() * TINY_PIECES
        return tiny + greedy + coupled + self._parameter_work() + len(self.drafters) * self._sampled_work()

    def _longest(self, entry: LoadedDrafter) -> int:
        """The largest K to try: what was asked for, unless the drafter is configured or trained for less."""
        configured = entry.config.draft_length(entry.drafter.default_draft, batch_size=1)
        caps = [self.options.max_draft, configured, entry.drafter.max_draft]
        return min(cap for cap in caps if cap is not None)

    def _warm_up(self) -> float:
        """Seconds per token of plain decoding, once warm; only the estimate of the time left uses it."""
        sampling = Sampling(temperature=0, max_tokens=4, ignore_eos=True)
        for _ in range(2):
            start = time.perf_counter()
            self.engine.generate([self.prompts[0]], sampling, speculative=False)
            seconds = time.perf_counter() - start
        return seconds / 4

    def run(self, advance: Advance = lambda _: None) -> Certificate:
        """All parts."""
        start = time.perf_counter()
        self._advance = advance
        done = [check for name in self.parts for check in self.part(name)]
        seconds = time.perf_counter() - start
        return Certificate(done, provenance(self.engine), self.options, len(self.prompts), seconds)

    @property
    def parts(self) -> Mapping[str, Callable[[], Iterator[Check]]]:
        return {
            "exact": self._exact,
            "negative controls": self._controls,
            "equal ids, exact targets": self._agreement,
            "parameters, exact target": self._exact_parameters,
            "greedy": self._greedy,
            "coupled": self._coupled,
            "parameters": self._parameters,
            "sampled": self._sampled,
        }

    def part(self, name: str) -> list[Check]:
        """The checks of one part; if it breaks, what it had found so far and a check that failed."""
        done: list[Check] = []
        try:
            done.extend(self.parts[name]())
        except Exception as error:  # what is checked may break in any way: that is a finding, not an accident
            logger.error("part %r of the certificate failed", name, exc_info=True)
            done.append(Check(name, False, f"{type(error).__name__}: {error}"))
        return done

    # ------------------------------------------------------------------------------------------- tiny targets, exactly

    def _tiny(self) -> int:
        """Units for each piece of the parts on tiny targets."""
        return max(1, round(self.TINY_SECONDS / self._token_seconds / TINY_PIECES))

    def _exact(self) -> Iterator[Check]:
        for case in [*exact.cases(), *controls.honest()]:
            yield checks.exact_check(case.name, exact.distance(case))
            self._advance(self._tiny())

    def _controls(self) -> Iterator[Check]:
        for case in controls.cheating():
            yield checks.control_check(case.name, exact.distance(case))
            self._advance(self._tiny())

    def _agreement(self) -> Iterator[Check]:
        yield checks.tally_check("equal ids: exact targets", agreement.exact_agreement())
        alarm = self.options.power.alarm
        yield checks.noise_check("noise: coupled draws", agreement.coupled_noise(), alarm)
        yield checks.noise_check("noise: uniform numbers", agreement.uniform_noise(), alarm)
        self._advance(self._tiny())

    def _exact_parameters(self) -> Iterator[Check]:
        """The same parameters where logits are equal, so that not even rounding could excuse a difference."""
        target = agreement.TARGETS["history"]()
        twin = Small(agreement.TARGETS["history"](), target.vocab_size)
        options = EngineOptions(num_speculative_tokens=5)
        engine = Engine(target, load_drafters([twin, Ngram(3, 1)], target, options), options)
        outcomes = parameters.try_parameters(Comparison(engine), agreement.PROMPTS[2], ["small", "ngram"], 5, 24)
        yield from (checks.parameter_check(outcome).on("exact target") for outcome in outcomes)
        self._advance(self._tiny())

    # ------------------------------------------------------------------------------------------------- the real model

    def _greedy(self) -> Iterator[Check]:
        sampling = Sampling(temperature=0, max_tokens=self.options.max_tokens)
        yield from self._compare("greedy", sampling, "rejection", lambda most: range(1, most + 1))

    def _coupled(self) -> Iterator[Check]:
        options = self.options
        sampling = Sampling(temperature=options.temperature, max_tokens=options.max_tokens, seed=options.seed)
        yield from self._compare("coupled", sampling, "coupled", some_lengths)

    def _compare(
        self, part: str, sampling: Sampling, mode: VerifyMode, lengths_of: Callable[[int], Sequence[int]]
    ) -> Iterator[Check]:
        """Each drafter at each K alone, and at the largest K with all prompts in one batch."""
        plains = [self._comparison.plain(Task(prompt, sampling, mode)) for prompt in self.prompts]
        noise = self._comparison.noise(plains[0], max(self.longest.values()) + 1)
        for drafter, most in self.longest.items():
            findings, lengths = Findings(), lengths_of(most)
            for k in lengths:
                for number, plain in enumerate(plains):
                    self._comparison.check(findings, plain, drafter, k, number)
            self._comparison.check_together(findings, plains, drafter, most)
            yield checks.findings_check(f"{part}: {self._labels[drafter]}", findings, plains, lengths, noise)

    def _parameters(self) -> Iterator[Check]:
        k, tokens = (self.options.max_draft + 1) // 2, self._parameter_tokens
        for outcome in parameters.try_parameters(self._comparison, self.prompts[0], self.drafters, k, tokens):
            yield checks.parameter_check(outcome)

    @property
    def _parameter_tokens(self) -> int:
        return min(16, self.options.max_tokens)

    def _parameter_work(self) -> int:
        each = 1 + len(self.drafters)
        return len(parameters.MODES) * self._parameter_tokens * (1 + len(parameters.NAMES) * each)

    # ------------------------------------------------------------------------------------------------------- sampled

    def _sampled(self) -> Iterator[Check]:
        """Both tests of every drafter at one prefix, corrected together."""
        engine, power = self.engine, self.options.power
        draws = sampled.Draws(self.samples, self.options.sampled_temperature, self.options.seed)
        prefix = sampled.choose_prefix(engine, self.prompts, draws.temperature, self._rounding_of_logits())
        error = 0.0 if self._comparison.exact else sampled.rounding(engine, prefix, draws.temperature)
        tests, stats = [], []
        for drafter in self.drafters:
            counts, seen = sampled.draw_outputs(engine, drafter, prefix, draws, self._sampled_units)
            tests.append(sampled.tested_laws(counts, prefix, error))
            stats.append(seen)
        adjusted = holm([tested.p_value for pair in tests for tested in pair])
        for i, drafter in enumerate(self.drafters):
            pair = adjusted[2 * i], adjusted[2 * i + 1]
            result = SampledResult(self._labels[drafter], tests[i], pair, stats[i])
            yield checks.sampled_check(result, draws, power, len(adjusted))

    def _rounding_of_logits(self) -> float:
        if self._comparison.exact:
            return 0.0
        plain = self._comparison.plain(Task(self.prompts[0], Sampling(temperature=0, max_tokens=8), "rejection"))
        return self._comparison.noise(plain, 2).max_difference

    def _sampled_units(self, samples: int) -> None:
        self._advance(samples // SAMPLES_PER_UNIT)

    def _sampled_work(self) -> int:
        return self.samples // SAMPLES_PER_UNIT


def some_lengths(most: int) -> list[int]:
    """The smallest, a middle and the largest K."""
    return sorted({1, (most + 1) // 2, most})


TINY_PIECES = 20
"""Steps that the parts on tiny targets report."""
SAMPLES_PER_UNIT = 4
"""Samples that take about as long as one token decoded alone: 64 of them share a pass, each needs three or four."""
