"""The findings of a comparison as titles, sentences and tables, whatever they are shown on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forerun.bench.comparing.choices import (
    RULES,
    Choice,
    Speed,
    best_of_each,
    choose,
    speeds_of,
    worth_their_memory,
)
from forerun.bench.comparing.equality import sentence
from forerun.bench.comparing.facts import Facts
from forerun.bench.comparing.study import Contender, Result
from forerun.bench.comparing.trend import LEAST_ROUNDS, shown_of, trend
from forerun.bench.load.arrivals import Load
from forerun.bench.load.report import in_one_line
from forerun.bench.measurement import Row
from forerun.bench.screen import number, size

RATES = ("draft_acceptance_rate", "accepted_per_drafted", "mean_accepted_length", "tokens_per_step", "verify_rate")
"""Of the metrics list, those that are one number."""
DEFINITIONS = {
    "passes": "of the drafter's network for K tokens; + steps of a small head that chain the tokens of a block",
    "memory": "weights of its own as it decodes, the target's shared ones not counted; KV: keys, values and features "
    "that it keeps of every token of every request",
    "acceptance_by_position": "rounds with 1..k accepted / rounds with k verified and 1..k-1 accepted",
    "prefix_survival": "rounds with 1..k accepted / rounds with k verified",
    "draft_acceptance_rate, accepted_per_drafted": "accepted / verified; accepted / drafted",
    "mean_accepted_length": "1 + accepted / drafting rounds: bonus included, every round counting once",
    "tokens_per_step": "emitted / target steps",
    "verify_rate": "(accepted + drafting rounds) / (verified + drafting rounds)",
    "a round's cost": "tokens_per_step / speed-up: what drafting and verifying a round take, in plain steps",
    "ECE, Brier, AUROC": "of the predicted chance that drafts 1 .. k are all accepted: mean distance from what was "
    "observed over 15 bins; mean squared error; chance that a surviving draft was given more than another. floor: the "
    "ECE of a perfect predictor with as many rounds",
}
DECAY = (
    f"Decay: slope of a line through acceptance by position, over positions reached in {LEAST_ROUNDS} rounds or more; "
    "[95 %] by drawing whole prompts again."
)


@dataclass(frozen=True)
class Section:
    """A part of the report."""

    title: str
    lines: Sequence[str] = ()
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    pictures: Sequence[str] = ()
    """Names, of `pictures.draw`, that stand before the table."""


@dataclass(frozen=True)
class Findings:
    """What follows from the rows."""

    result: Result
    speeds: Sequence[Speed] = field(default=())
    choices: Sequence[Choice] = field(default=())

    @classmethod
    def of(cls, result: Result) -> Findings:
        speeds = [s for row in result.speeds() for s in speeds_of(row, result.contender(row["drafter"]).facts)]
        loads = list(dict.fromkeys(speed.load for speed in speeds))
        return cls(result, speeds, [choose(speeds, load) for load in loads])

    @property
    def loads(self) -> list[str]:
        return [choice.load for choice in self.choices]

    def fixed(self, label: str) -> Row:
        """Rates of a drafter with its K drafted and verified whole, at the smallest load."""
        row, way = self.result.speeds(label)[0], self.result.contender(label).ways[0]
        rates: Row = row["ways"][way]
        return rates

    def as_dict(self) -> dict[str, Any]:
        """The JSON of the command."""
        result = self.result
        made_with = {name: value for name, value in result.made_with.items() if name != "drafters"}  # plain has none
        return {
            "lossless": result.lossless,
            "best": [choice.as_dict() for choice in self.choices],
            "worth_their_memory": [s.drafter for s in worth_their_memory(self.speeds, self.loads[0])],
            "drafters": [self._drafter(contender) for contender in result.contenders],
            "absent": dict(result.absent),
            "rules": list(RULES),
            "rows": result.rows,
            "options": result.options,
            **made_with,
        }

    def _drafter(self, contender: Contender) -> dict[str, Any]:
        label = contender.label
        rates, row = self.fixed(label), self.result.speeds(label)[0]
        names = ("acceptance_by_position", "prefix_survival", *RATES)
        return {
            **contender.as_dict(),
            "speeds": [speed.as_dict() for speed in self.speeds if speed.drafter == label],
            **{name: rates.get(name) for name in names},
            "trend": trend(shown_of(row["acceptance"])).as_dict(),
        }


def sections(findings: Findings) -> list[Section]:
    """The whole report, most important first."""
    return [
        Section("Is it the same text?", list(sameness(findings.result))),
        Section("Which one here?", [*advice(findings)], pictures=("speed",)),
        _overview(findings),
        _speed(findings),
        _acceptance(findings),
        _confidence(findings),
        *([_absent(findings.result)] if findings.result.absent else []),
        Section("How it was measured", [setting(findings.result), *RULES, DECAY]),
        Section("Words", [f"{name}: {meaning}" for name, meaning in DEFINITIONS.items()]),
    ]


# ------------------------------------------------------------------------------------------------------------ sentences


def sameness(result: Result) -> Iterator[str]:
    """Whether the drafters changed the output, first of all; every difference that was looked at."""
    if result.lossless is None:
        yield (
            "Ids were not compared: sampled with verification by rejection the law is the same, not the text. "
            "`forerun verify` tests the law."
        )
        return
    found = [(row, way, r) for row in result.speeds() for way, r in row["equality"].items()]
    outputs, different = (sum(ruling[name] for _, _, ruling in found) for name in ("outputs", "different"))
    unexplained, unexamined = (sum(ruling[name] for _, _, ruling in found) for name in ("unexplained", "unexamined"))
    if not different:
        yield f"LOSSLESS here: every one of {outputs:,} outputs is, id by id, that of plain decoding in the same run."
    elif not unexplained:
        rest = f"; {unexamined:,} more were not looked at" if unexamined else ""
        yield (
            f"LOSSLESS up to rounding: {different:,} of {outputs:,} outputs leave plain decoding's where its best two "
            f"tokens were nearer than passes of different lengths agree in {result.made_with['target']['dtype']}{rest}."
        )
    else:
        yield (
            f"NOT LOSSLESS: {unexplained:,} of {outputs:,} outputs are not those of plain decoding, and rounding does "
            "not explain it. Speeds below compare different work."
        )
    for row, way, ruling in found:
        for one in ruling["differences"]:
            if not one["explained"]:
                yield f"DIFFERS: {row['drafter']}, {way}, {together(str(Load.of(row)))}: {sentence(one)}"
    yield from _rounding([one for _, _, ruling in found for one in ruling["differences"] if one["explained"]])


def _rounding(differences: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Differences that rounding explains: their number, and the one that was nearest to not being explained."""
    measured = [one for one in differences if one["position"] is not None]
    if measured:
        widest = max(measured, key=lambda one: one["margin"] / one["noise"])
        yield f"rounding: {len(measured):,} places were looked at; the widest margin for its noise: {sentence(widest)}"
    if len(measured) < len(differences):
        alone = len(differences) - len(measured)
        yield f"rounding: {alone:,} outputs are plain decoding's alone, which itself is another one in company"


def advice(findings: Findings) -> Iterator[str]:
    """The best choice at every load with its reason, what memory buys, and a line about every drafter."""
    for choice in findings.choices:
        yield from _best(choice)
    worth = worth_their_memory(findings.speeds, findings.loads[0])
    if worth:
        bought = "; ".join(f"{size(s.memory)} on top of the target: {s.drafter}, {s.mean:.2f}x" for s in worth)
        yield f"by memory, {together(findings.loads[0])}: {bought}"
    for contender in findings.result.contenders:
        yield _of_one(findings, contender.label, worth)


def _best(choice: Choice) -> Iterator[str]:
    where, best = together(choice.load), choice.best
    if best is None:
        nearest = "" if choice.nearest is None else f"; the nearest is {told(choice.nearest)}"
        yield f"{where}: plain decoding, as nothing is faster beyond the spread{nearest}"
        return
    why = f": {best.tokens_per_step:.2f} tokens a step for {best.round_cost:.2f} plain steps" if best.round_cost else ""
    yield f"{where}: {told(best)}{why}"
    if choice.ties:
        yield f"    tied with it: {'; '.join(told(one) for one in choice.ties)}"


def _of_one(findings: Findings, label: str, worth: Sequence[Speed]) -> str:
    """Where it is the best choice, or why it is not."""
    places: dict[str, list[str]] = {}
    for choice in findings.choices:
        own = next(s for s in best_of_each(findings.speeds, choice.load) if s.drafter == label)
        places.setdefault(_standing(choice, own), []).append(choice.load)
    said = [f"{standing} at {' and '.join(loads)}" for standing, loads in places.items()]
    if label not in [speed.drafter for speed in worth]:
        return f"{label}: {', '.join(said)}"
    return f"{label}: {', '.join(said)}; worth its memory at {findings.loads[0]}"


def _standing(choice: Choice, own: Speed) -> str:
    if choice.best is not None and choice.best.drafter == own.drafter:
        return "the best choice"
    if own.drafter in [one.drafter for one in choice.ties]:
        return "tied for the best"
    if own.faster:
        assert choice.best is not None
        return f"faster than plain decoding, but {choice.best.drafter} is faster"
    return "slower than plain decoding" if own.high < 1 else "no faster than plain decoding beyond the spread"


def told(speed: Speed) -> str:
    """A speed-up with its spread."""
    return f"{speed.name}, {speed.mean:.2f}x [{speed.low:.2f}-{speed.high:.2f}]"


def together(load: str) -> str:
    return "one request at a time" if load == "1" else f"{load} requests together"


def setting(result: Result) -> str:
    """Models, hardware and options in one line: a number means nothing without them."""
    least, most = result.options["max_tokens"]
    return in_one_line(result.made_with, result.options, f"{least}-{most}" if least < most else str(most))


# --------------------------------------------------------------------------------------------------------------- tables


def _overview(findings: Findings) -> Section:
    head = ["drafter", "K", "passes", "parameters", "memory", "KV a token", "accepted length"]
    head += [f"speed-up at {load}" for load in findings.loads]
    lines = ("Speed-up: of the fastest way of each, the mean over pairs and the least and greatest of them.",)
    return Section("What each takes and brings", lines, head, [_overview_row(findings, c) for c in _all(findings)])


def _all(findings: Findings) -> Sequence[Contender]:
    return findings.result.contenders


def _overview_row(findings: Findings, contender: Contender) -> list[str]:
    facts = contender.facts
    best = {load: best_of_each(findings.speeds, load) for load in findings.loads}
    speeds = [next(s for s in best[load] if s.drafter == contender.label) for load in findings.loads]
    return [
        contender.label,
        str(facts.draft_tokens),
        passes(facts),
        f"{facts.parameters:,}",
        size(facts.weight_bytes),
        size(facts.kv_bytes_per_token),
        number(findings.fixed(contender.label).get("mean_accepted_length")),
        *(f"{speed.mean:.2f}x ({min(speed.pairs):.2f} - {max(speed.pairs):.2f})" for speed in speeds),
    ]


def passes(facts: Facts) -> str:
    return f"{facts.draft_passes} + {facts.head_steps} steps" if facts.head_steps else str(facts.draft_passes)


def _speed(findings: Findings) -> Section:
    head = ("requests", "drafter", "way", "tok/s", "plain", "speed-up", "[95 %]", "median (min - max)", "tokens a step",
            "a round's cost", "same text")  # fmt: skip
    same = {
        (row["drafter"], way, str(Load.of(row))): f"{found['outputs_identical']}/{found['outputs']}"
        for row in findings.result.speeds()
        for way, found in row["ways"].items()
    }
    rows = [
        [
            s.load, s.drafter, s.way, f"{s.tokens_per_second:.1f}", f"{s.plain_tokens_per_second:.1f}",
            f"{s.mean:.2f}x", f"{s.low:.2f}-{s.high:.2f}", f"{s.median:.2f} ({min(s.pairs):.2f} - {max(s.pairs):.2f})",
            number(s.tokens_per_step), number(s.round_cost), same[s.drafter, s.way, s.load],
        ]
        for load in findings.loads
        for s in findings.speeds
        if s.load == load
    ]  # fmt: skip
    return Section("Speed beside plain decoding", ("fixed:K drafts and verifies K tokens in every round; other ways "
                   "are policies of the scheduler, at its measured costs.",), head, rows, ("memory",))  # fmt: skip


def _acceptance(findings: Findings) -> Section:
    """By position, and the verdict on decay; a column for every rate of the metrics list."""
    most = max(len(_positions(findings, c.label)) for c in _all(findings))
    head = ["drafter", "metric", *(f"k = {k}" for k in range(1, most + 1))]
    rows, lines = [], []
    for contender in _all(findings):
        rates, label = findings.fixed(contender.label), contender.label
        for name in ("acceptance_by_position", "prefix_survival"):
            values = rates.get(name) or []
            rows.append([label, name, *(number(v, 3) for v in values), *[""] * (most - len(values))])
        lines.append(f"{label}: {trend(shown_of(findings.result.speeds(label)[0]['acceptance']))}")
        known = [f"{name} {rates[name]:.3f}" for name in RATES if rates.get(name) is not None]
        lines.append(f"    {', '.join(known) or 'nothing was drafted'}")
    return Section("What is accepted, and does it decay?", lines, head, rows, ("acceptance",))


def _positions(findings: Findings, label: str) -> Sequence[float | None]:
    values: Sequence[float | None] = findings.fixed(label).get("acceptance_by_position") or []
    return values


def _confidence(findings: Findings) -> Section:
    head = ("drafter", "k", "survival", "ECE", "floor", "Brier", "AUROC", "calibrated: ECE", "Brier")
    rows, lines = [], []
    for contender in _all(findings):
        found = findings.result.confidence(contender.label)
        if found["note"]:
            lines.append(f"{contender.label}: {found['note']}")
        rows += [_confidence_row(contender.label, one) for one in found["positions"]]
    lines.append("Raw confidences, and scaled by `forerun calibrate` where it was run for this drafter.")
    return Section("Can its confidence be trusted?", lines, head if rows else (), rows, ("confidence",) if rows else ())


def _confidence_row(label: str, one: Mapping[str, Any]) -> list[str]:
    raw, fitted = one["raw"], one.get("calibrated")
    return [
        label,
        str(one["position"]),
        f"{one['survival']:.3f}",
        percent(raw["ece"]),
        percent(raw["floor"]),
        f"{raw['brier']:.3f}",
        number(raw["auroc"], 3),
        "-" if fitted is None else percent(fitted["ece"]),
        "-" if fitted is None else f"{fitted['brier']:.3f}",
    ]


def _absent(result: Result) -> Section:
    return Section("What is not here", [f"{name}: {reason}" for name, reason in result.absent.items()])


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


__all__ = ["DEFINITIONS", "Findings", "Section", "advice", "sameness", "sections", "setting", "together"]
