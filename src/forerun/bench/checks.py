"""One line of a certificate, and how each part's results become one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from forerun.bench.agreement import Tally
from forerun.bench.chisquare import Tested
from forerun.bench.comparison import Findings, Plain
from forerun.bench.exact import EQUAL
from forerun.bench.margins import Difference, worst
from forerun.bench.parameters import Outcome
from forerun.bench.sampled import Draws, Power
from forerun.budget.bypass import Reason
from forerun.engine import DecodingStats
from forerun.target.noise import PassNoise

LEAST_DRAFTED = 0.05
"""Share of the sampled rounds that must have a draft: plain ones dilute whatever is wrong with the others."""


@dataclass(frozen=True)
class Check:
    """A claim that held or did not."""

    name: str
    passed: bool
    detail: str
    numbers: Mapping[str, Any] = field(default_factory=dict)
    """What the detail is made from, as JSON types."""
    void: bool = False
    """Neither held nor failed: there was nothing to check."""

    def on(self, where: str) -> Check:
        """The same check, named after where it was made."""
        return replace(self, name=f"{self.name} ({where})")

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "passed": self.passed,
            "void": self.void,
            "detail": self.detail,
            "numbers": dict(self.numbers),
        }


def exact_check(name: str, distance: float) -> Check:
    detail = f"every outcome enumerated: total variation {distance:.1e}, at most {EQUAL:.0e}"
    return Check(f"exact: {name}", distance <= EQUAL, detail, {"total_variation": distance})


def control_check(name: str, distance: float) -> Check:
    """A control passes where the comparison finds the fault."""
    found = distance > EQUAL
    detail = f"a fault {'found' if found else 'NOT found'}: its output is off by {distance:.3g} in total variation"
    return Check(f"control: {name}", found, detail, {"total_variation": distance})


def tally_check(name: str, tally: Tally) -> Check:
    """Also fails where nothing was accepted, refused or preempted: the runs would then show nothing."""
    met = min(tally.runs, tally.accepted, tally.rejected, tally.preemptions) > 0
    detail = (
        f"{tally.runs} outputs, {tally.different} different from plain decoding; {tally.accepted} drafts accepted, "
        f"{tally.rejected} refused, {tally.preemptions} preemptions"
    )
    return Check(name, met and tally.different == 0, detail, asdict(tally))


def noise_check(name: str, tested: Tested, alarm: float) -> Check:
    detail = f"chi-square {tested.statistic:.1f} with {tested.dof} degrees of freedom, p = {tested.p_value:.3g}"
    return Check(name, tested.p_value > alarm, f"{detail}, alarm below {alarm:g}", asdict(tested))


def findings_check(
    name: str, findings: Findings, plains: Sequence[Plain], lengths: Sequence[int], noise: PassNoise
) -> Check:
    """Greedy and coupled outputs of one drafter against plain ones; void if no draft had a part in them."""
    margins = sorted(margin for plain in plains for margin in plain.margins)[:3]
    smallest = ", ".join(f"{margin:.3g}" for margin in margins)
    detail = (
        f"{findings.outputs} outputs of {len(plains)} prompts, {findings.tokens} tokens, K = {_span(lengths)}: "
        f"{_differences(findings.differences)}; smallest margins {smallest}; noise {noise.max_difference:.2g}; "
        f"{_drafting(findings.stats)}"
    )
    numbers = {
        "outputs": findings.outputs,
        "tokens": findings.tokens,
        "lengths": list(lengths),
        "differences": [_as_dict(difference) for difference in findings.differences],
        "smallest_margins": [_finite(margin) for margin in margins],
        "noise": {name: _finite(value) for name, value in asdict(noise).items()},
        "stats": findings.stats.as_dict(),
    }
    held, tried = findings.explained and findings.outputs > 0, findings.stats.verified > 0
    if not tried:
        detail += _advice(findings.stats)
    return Check(name, held and tried, detail, numbers, void=held and not tried)


def _span(lengths: Sequence[int]) -> str:
    ends = [str(k) for k in lengths]
    return ", ".join(ends) if len(ends) < 4 else f"{ends[0]}..{ends[-1]}"


def _differences(differences: Sequence[Difference]) -> str:
    if not differences:
        return "none observed to differ"
    largest = worst(differences)
    verdict = "all within the noise" if all(d.explained for d in differences) else "NOT explained"
    return f"{len(differences)} differences, {verdict} (worst: {largest})"


def _drafting(stats: DecodingStats) -> str:
    """What was drafted; faults belong here too, since a drafter that fails leaves plain decoding behind."""
    rate = "nothing drafted" if stats.verified == 0 else f"{stats.accepted} of {stats.verified} drafts accepted"
    faults = stats.drafter_faults + stats.invalid_drafts
    return rate + (f"; {faults} rounds without a usable draft" if faults else "")


def _advice(stats: DecodingStats) -> str:
    """What to change where hardly anything was drafted."""
    if stats.drafter_faults + stats.invalid_drafts:
        return "; the drafter fails: see the warnings"
    if any(stats.skipped_steps.get(reason) for reason in (Reason.GAIN, Reason.BATCH)):
        return "; drafting was not worth it: leave out --policy, --min-predicted-gain and min_draft, to draft always"
    return "; give other --prompts or more --max-tokens, or lower confidence_threshold"


def _as_dict(difference: Difference) -> dict[str, Any]:
    return asdict(difference) | {"margin": _finite(difference.margin), "explained": difference.explained}


def _finite(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None


def parameter_check(outcome: Outcome) -> Check:
    found = outcome.findings
    parts = [f"{found.outputs} outputs: {_differences(found.differences)}", *outcome.ends]
    if outcome.name == "logprobs":
        parts.append(f"largest difference {outcome.logprob_error:.2g}, allowed {outcome.logprob_tolerance:.2g}")
    elif not outcome.changed:
        parts.append("it did not change the plain output")
    parts.append(_drafting(found.stats))
    numbers = {
        "outputs": found.outputs,
        "differences": [_as_dict(difference) for difference in found.differences],
        "changed": outcome.changed,
        "logprob_error": outcome.logprob_error,
    }
    return Check(f"parameter: {outcome.name}", outcome.passed and found.outputs > 0, "; ".join(parts), numbers)


@dataclass(frozen=True)
class SampledResult:
    """One drafter's samples, tested."""

    drafter: str
    tests: tuple[Tested, Tested]
    adjusted: tuple[float, float]
    """p-values after Holm's correction over the whole family."""
    stats: DecodingStats


def sampled_check(result: SampledResult, draws: Draws, power: Power, family: int) -> Check:
    """Void where hardly anything was drafted, or where rounding leaves no law to test against."""
    stats = result.stats
    drafted = stats.verified > 0 and stats.drafting_rounds >= LEAST_DRAFTED * stats.target_steps
    testable = drafted and all(math.isfinite(tested.allowed) for tested in result.tests)
    parts = [f"{draws.samples} samples at T = {draws.temperature:g}"]
    numbers: dict[str, Any] = {"samples": draws.samples, "stats": result.stats.as_dict()}
    for position, tested, adjusted in zip((2, 3), result.tests, result.adjusted, strict=True):
        least = power.found(tested, family) if testable else 1.0
        parts.append(
            f"token {position}: p = {tested.p_value:.3g}, corrected {adjusted:.3g} "
            f"(a total variation of {least:.2g} is found with power {power.power:g})"
        )
        numbers[f"token_{position}"] = {
            **{name: _finite(value) for name, value in asdict(tested).items()},
            "corrected_p_value": adjusted,
            "detectable_total_variation": least,
        }
    parts.append(f"alarm below {power.alarm:g} in {family} tests")
    if not testable:
        why = "rounding changes which tokens are possible" if drafted else "hardly any round had a draft"
        parts.append(f"not testable here: {why}")
    parts.append(_drafting(stats) + ("" if drafted else _advice(stats)))
    passed = testable and min(result.adjusted) > power.alarm
    return Check(f"sampled: {result.drafter}", passed, "; ".join(parts), numbers, void=not testable)
