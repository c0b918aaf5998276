"""The same prompt twice, as `forerun doctor` does it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.conftest import Run
from engine.conftest import engine_of, plain
from forerun import Sampling
from forerun.cli.checks.prefix_cache import prefix_cache_checks
from forerun.drafters.base import DraftView
from forerun.drafters.fake import Script
from forerun.drafters.ngram import Ngram
from forerun.drafters.small import Small
from forerun.target.table import history_model

PROMPT = [i % 7 for i in range(40)]


def test_a_pair_is_as_good_behind_a_hit(run: Run, tiny_qwen3_dir: Path, tiny_small_dir: Path) -> None:
    """Of a tiny model and its draft model: a finding without complaint, which says how much was found."""
    ran = run("doctor", tiny_qwen3_dir, tiny_small_dir, "--json", "--probe", 1)
    checks = {check["name"]: check for check in json.loads(ran.out)["checks"]}
    assert checks["small prefix cache"]["status"] == "ok"
    assert "48 of 64 prompt tokens found again; the same tokens" in checks["small prefix cache"]["found"]


@pytest.mark.parametrize("fault", ["drafts", "nothing kept", "none"])
def test_what_differs_is_a_warning(fault: str) -> None:
    """A drafter that guesses worse behind a hit, or keeps nothing; every loaded drafter has its line."""
    target, good = history_model(7, seed=3), Small(history_model(7, seed=3), 7)
    if fault == "drafts":
        known = plain(history_model(7, seed=3), [PROMPT], Sampling(temperature=0, max_tokens=24))[tuple(PROMPT)]

        def guess(view: DraftView) -> list[int]:
            done = len(view.tokens) - len(PROMPT)
            return [(token + (view.request_id > 1)) % 7 for token in known[done : done + view.k]]

        engine = engine_of(target, Script(guess), Ngram(1))
    elif fault == "nothing kept":
        reading = Script(lambda view: [1] * view.k)
        reading.taps = (1,)
        engine = engine_of(target, reading, Ngram(1))
    else:
        engine = engine_of(target, good, Ngram(1))
    first, second = prefix_cache_checks(engine, PROMPT, 24)
    assert second.name == "ngram prefix cache"
    assert second.status == "ok"
    assert first.status == ("ok" if fault == "none" else "warning")
    assert "0 of 40" in first.found if fault == "nothing kept" else "32 of 40" in first.found
    assert list(prefix_cache_checks(engine, PROMPT[:16], 4)) == []
