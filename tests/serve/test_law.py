"""The law of what is drawn, for every option, through the server in rejection mode: chi-square against the exact law.

For each value of each option the first three tokens of SAMPLES answers with fixed seeds are counted. What is expected
is enumerated from the model's logits, row by row, by the reference law of `laws.naive`; of the server it takes only
what the request was turned into. Drafts come from another model, so most rounds reject; tokens 2 and 3 meet
verification.

Seeds are fixed, so a case passes or fails for ever. A correct server had a chance of ALARM in all to fail any of the
cases when its seeds were chosen (each is held to its share). The last tests show that the same test refuses what is not
the law. Options come from the schema by way of `VALUES`: `test_no_field_is_forgotten` knows all of its fields.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import pytest
import torch
from scipy.stats import chi2

from forerun.drafters.ngram import Ngram
from forerun.drafters.small import Small
from forerun.engine import judge
from forerun.engine.request import Request
from forerun.sampling import Row
from forerun.target.table import ByteTokenizer
from laws import naive
from serve.kit import VOCAB, Site, ascii_model, engine
from serve.options import ALPHABET, CASES, COMPLETIONS, TEMPLATE, VALUES, endpoint, request_with

SAMPLES, FEWER = 1024, 384
ALARM = 1e-3
LENGTH = 3
"""Tokens that are looked at."""
USUAL = [("temperature", 2), ("top_p", 0), ("repetition_penalty", 0), ("min_tokens", 0), ("guided_regex", 0)]
"""Cases of the quick suite."""

Text = tuple[int, ...]


def _model(seed: int = 0):
    return ascii_model(seed, eos_level=3, gap=0.8, alphabet=ALPHABET, tokenizer=ByteTokenizer(TEMPLATE))


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    """A drafter that is wrong most of the time, and one that finds something now and then."""
    make = lambda: engine(  # noqa: E731
        Ngram(prompt_lookup_min=2, prompt_lookup_max=3), Small(_model(7), VOCAB), target=_model(),
        num_speculative_tokens=3, max_num_seqs=64, max_num_batched_tokens=512,
    )  # fmt: skip
    with Site(make) as running:
        yield running


# ------------------------------------------------------------------------------------------------------ what is drawn


def _drawn(site: Site, option: str, value: object, samples: int) -> tuple[Counter[Text], Request]:
    """How often each beginning of an answer came, and what the server made of such a request."""
    path, count = endpoint(option, COMPLETIONS), value if option == "n" else 64
    base = {"n": count, "max_tokens": 6 if "min" in option else 4, "temperature": 1.0, "return_token_ids": True}
    made: list[Request] = []
    start = site.engine.start

    def watched(requests: Sequence[Request], listener: Any = None) -> None:
        made.extend(requests)
        start(requests, listener)

    counts: Counter[Text] = Counter()
    site.engine.start = watched
    try:
        for number in range(max(1, min(samples, 64 * count) // count)):
            fields = request_with(option, value, path, **base)
            if option != "seed" or number > 0:
                fields["seed"] = 1000 + number
            reply = site.post(path, fields)
            assert reply.status == 200, reply.body
            counts.update(tuple(choice["token_ids"][:LENGTH]) for choice in reply.json["choices"])
    finally:
        del site.engine.start
    asked = value.get("verify_mode") if isinstance(value, dict) else None
    assert {request.verify_mode for request in made} == {asked or "rejection"}
    return counts, made[0]


# --------------------------------------------------------------------------------------------------- what is expected


class Expected:
    """The exact law of the beginnings of a request's answer."""

    def __init__(self, request: Request):
        self._request = request
        self._prompt = request.tokens[: request.prompt_length]
        self._logits = _model()._logits
        self.row = lru_cache(maxsize=None)(self._row)

    def _row(self, output: Text) -> list[float]:
        """The law of the next token."""
        request, before = self._request, [*self._prompt, *output]
        logits = torch.tensor(self._logits(before), dtype=torch.float64)
        for processor in request.sampling.logits_processors:
            logits = processor(before, logits)
        # What lies 100 below the best is never drawn; the reference is slow where it looks at every byte.
        values = [x if x > float(logits.max()) - 100 else -math.inf for x in logits.tolist()]
        return naive.law(values, Row(request.sampling, before, request.prompt_length, (), request.end_ids))

    def ended(self, output: Text) -> bool:
        """Whether an answer ends with its newest token, by the rules of stopping."""
        request, s = self._request, self._request.sampling
        if not output:
            return False
        if output[-1] in request.eos_ids and not s.ignore_eos:
            return True
        if len(output) > s.min_tokens:
            text = bytes(token for token in output if token < 256).decode(errors="replace")
            if output[-1] in s.stop_token_ids or any(stop in text for stop in s.stop_strings):
                return True
        full = len(output) >= request.limit - request.prompt_length
        return full or any(ends([*self._prompt, *output]) for ends in s.stop_when)

    def chance(self, output: Text) -> float:
        """Of one beginning."""
        return math.prod(self.row(output[:place])[token] for place, token in enumerate(output))

    def cells(self, least: float) -> dict[Text, float]:
        """Beginnings of at least this chance."""
        found: dict[Text, float] = {}
        going: dict[Text, float] = {(): 1.0}
        while going:
            output, chance = going.popitem()
            for token, p in enumerate(self.row(output)):
                longer = (*output, token)
                if chance * p >= least:
                    whole = len(longer) == LENGTH or self.ended(longer)
                    (found if whole else going)[longer] = chance * p
        return found


def _p_value(counts: Counter[Text], expected: Expected) -> float:
    """Chance of counts at least as far from the law. What is expected fewer than five times is one cell together, or
    belongs to the smallest one."""
    total = counts.total()
    impossible = [text for text in counts if expected.chance(text) == 0]
    assert not impossible, f"drawn with probability 0: {impossible[:3]}"
    cells = expected.cells(5 / total)
    pairs = sorted(((counts[text], total * p) for text, p in cells.items()), key=lambda pair: pair[1])
    rest = total - sum(count for count, _ in pairs), total * (1 - math.fsum(cells.values()))
    if rest[1] < 5 and pairs:
        smallest = pairs.pop(0)
        rest = rest[0] + smallest[0], rest[1] + smallest[1]
    pairs.append(rest)
    if len(pairs) == 1:
        return float(pairs[0][0] == total)
    return float(chi2.sf(sum((count - mean) ** 2 / mean for count, mean in pairs), len(pairs) - 1))


# ---------------------------------------------------------------------------------------------------------- the tests


def _holds(site: Site, case: tuple[str, int], samples: int, share: float) -> None:
    option, index = case
    counts, request = _drawn(site, option, VALUES[option][index], samples)
    p_value = _p_value(counts, Expected(request))
    print(f"{option}: p = {p_value:.2g} over {len(counts)} beginnings")
    assert p_value > share


@pytest.mark.parametrize("case", USUAL, ids=str)
def test_the_law_of_an_option(site, case):
    """A few of all cases."""
    _holds(site, case, FEWER, ALARM / len(USUAL))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_law_of_every_option(site, case):
    """Each value of each option of the schema that has an effect on the answer."""
    _holds(site, case, SAMPLES, ALARM / len(CASES))


def test_drafts_were_refused_and_kept(site):
    """The cases would show nothing if all drafts were right, or all wrong."""
    site.complete(prompt="abcabcab xyxy", n=64, max_tokens=4, seed=1, temperature=1.0)
    verified, accepted = (site.metric(f"forerun:spec_decode_{word}_tokens_total") for word in ("verified", "accepted"))
    assert 0.05 * verified < accepted < 0.8 * verified


def test_the_same_test_refuses_drafts_that_are_taken_blindly(site, monkeypatch):
    """A verification that keeps every draft the target could have made: the answers follow the drafter."""
    real = judge.reject_packed
    monkeypatch.setattr(
        judge, "reject_packed", lambda drafts, laws, accept, final: real(drafts, laws, accept * 0, final)
    )
    counts, request = _drawn(site, "temperature", 1.0, FEWER)
    assert _p_value(counts, Expected(request)) < ALARM / len(CASES)


@pytest.mark.parametrize(("option", "value"), [("temperature", 1.4), ("repetition_penalty", 2.5)])
def test_the_same_test_refuses_another_law(site, option, value):
    """Answers drawn without the option against the law with it."""
    counts, _ = _drawn(site, "temperature", 1.0, FEWER)
    _, request = _drawn(site, option, value, 1)
    possible = Counter({text: n for text, n in counts.items() if Expected(request).chance(text) > 0})
    assert _p_value(possible, Expected(request)) < ALARM / len(CASES)
