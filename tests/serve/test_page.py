"""The page at `/`: its files and what browsers are told about them, and the numbers it shows."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

import forerun
from forerun.budget.calibration import Calibration, CalibrationKey, Table
from forerun.budget.costs import DraftCost, VerifyCost
from forerun.budget.curve import CostCurve
from forerun.budget.history import Outcome
from forerun.budget.planner import SchedulerOptions
from forerun.budget.profile import Profile, ProfileKey
from forerun.budget.reliability import Bin
from forerun.budget.scheduler import Scheduler
from forerun.budget.stored import load_study_path, write_load_study
from forerun.drafters.config import parse_configs
from forerun.drafters.fake import Oracle
from forerun.engine import Engine
from forerun.engine.schedule import RoundReport, Scheduling
from forerun.serve import ServeOptions, create_app
from forerun.serve.page_data import drafter_flags
from forerun.serve.page_files import HEADERS, PAGE
from forerun.serve.page_frontier import expected_frontier
from forerun.serve.provenance import SOURCES
from forerun.serve.reliability import Reliability
from forerun.verify import Draft
from serve.kit import Call, Site, engine, guesses, joined, noisy_engine, script_model

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
ASKED = {"stream": True, "stream_options": {"include_provenance": True}, "return_token_ids": True}


@pytest.fixture(scope="module")
def front():
    """A server with a page and a key, whose model is never loaded."""
    return create_app(lambda: noisy_engine(), ServeOptions(api_key=("secret",)), page=PAGE)


def get(app: Any, path: str, method: str = "GET", **headers: str) -> Any:
    import asyncio

    return asyncio.run(Call(app, method, path, b"", headers).run())


# ---------------------------------------------------------------------------------------------------------------- files


def test_the_page_needs_no_key_and_asks_for_one(front):
    """`/` and its files are open; everything else is not. The page is told that there is a key."""
    index = get(front, "/")
    assert index.status == 200
    assert index.headers["content-type"].startswith("text/html")
    assert b'data-key="needed"' in index.body
    assert get(front, "/static/app.js").status == 200
    for path in ("/server_info", "/metrics", "/forerun/profile", "/v1/models", "/other"):
        assert get(front, path).status == 401, path
    open_front = create_app(lambda: noisy_engine(), ServeOptions(), page=PAGE)
    assert b'data-key="open"' in get(open_front, "/").body


def test_every_file_the_page_asks_for_is_there(front):
    """Sources, styles, icons and imports, from the first file on; nothing from another place, no script in the HTML."""
    left, seen = ["/"], set()
    while left:
        path = left.pop()
        seen.add(path)
        reply = get(front, path)
        assert reply.status == 200, path
        text = reply.body.decode()
        assert not re.search(r"""(src|href)=["'](https?:)?//""", text), path
        assert not re.search(r"<script(?![^>]*\bsrc=)|\son\w+=|<style", text), path
        found = re.findall(r'(?:src|href)="(static/[^"]+)"', text)
        found += [f"static/{name}" for name in re.findall(r'from "\./([^"]+)"', text)]
        left += [f"/{one}" for one in found if f"/{one}" not in seen]
    shipped = {f"/static/{path.name}" for path in PAGE.iterdir()} - {"/static/index.html"}
    assert seen - {"/"} == shipped


def test_model_text_never_becomes_html():
    """No file of the page has one of the ways to make elements out of text."""
    for path in PAGE.glob("*.js"):
        found = re.findall(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\b", path.read_text()
        )
        assert not found, path.name


def test_browsers_are_told_to_load_nothing_else(front):
    """The policy is on every answer of the page; files are asked for again each time, and not sent twice."""
    reply = get(front, "/static/style.css")
    for name, value in HEADERS.items():
        assert reply.headers[name] == value
    assert "default-src 'self'" in reply.headers["content-security-policy"]
    again = get(front, "/static/style.css", **{"if-none-match": f'"other", W/{reply.headers["etag"]}'})
    assert (again.status, again.body) == (304, b"")
    assert again.headers["etag"] == reply.headers["etag"]
    changed = get(front, "/static/style.css", **{"if-none-match": '"other"'})
    assert changed.status == 200


@pytest.mark.parametrize(
    "path", ["/static/nothing.js", "/static/../app.py", "/static/%2e%2e/app.py", "/static/index.html"]
)
def test_nothing_but_the_page_is_served(front, path):
    """Names are looked up, never opened."""
    assert get(front, path).status == 404


def test_without_a_page_there_is_none():
    """An application that embeds the API has its own."""
    app = create_app(lambda: noisy_engine(), ServeOptions())
    assert get(app, "/").status == 404


# ----------------------------------------------------------------------------------------------------------- provenance


def told(events: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[tuple[int, int]]]:
    """All tokens of a stream, and (verified, accepted) of its steps."""
    parts = [choice["provenance"] for event in events for choice in event["choices"]]
    return [token for part in parts for token in part["tokens"]], [(p["verified"], p["accepted"]) for p in parts]


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_provenance_tells_of_every_token(site, path):
    """Ids and texts are the answer's; in each step the accepted draft tokens come first, then one of the target's own:
    a correction if a draft was refused, a bonus if none was, plain if there was none."""
    what = {"prompt": "ababab"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "ababab"}]}
    events = site.post(path, {**what, **ASKED, "temperature": 0.7, "seed": 1, "max_tokens": 60}).events
    choice = joined(events)
    tokens, _ = told(events)
    assert [token["id"] for token in tokens] == choice["token_ids"]
    text = "".join(token["text"] for token in tokens if not token.get("special"))
    assert text == choice["text"] + choice["content"]
    seen = dict.fromkeys(SOURCES, 0)
    for event in events:
        part = event["choices"][0]["provenance"]
        sources = [token["source"] for token in part["tokens"]]
        whole = part["accepted"] == part["verified"]
        own = "plain" if not part["verified"] else "bonus" if whole else "corrected"
        expected = ["drafted"] * part["accepted"] + [own]
        # Only the end of the answer may cut a run short.
        assert sources == expected or (event is events[-1] and sources == expected[: len(sources)])
        for token in part["tokens"]:
            seen[token["source"]] += 1
            assert ("confidence" in token) == (token["source"] in ("drafted", "corrected"))
            assert token.get("confidence") is None or 0 <= token["confidence"] <= 1
            assert ("instead_of" in token) == (token["source"] == "corrected")
            assert token.get("instead_of") != token["text"] or token["source"] != "corrected"
    assert all(seen.values()), seen


def test_provenance_counts_like_the_metrics(site):
    """Verified and accepted tokens of the steps add up to the counters of the same answer."""
    options = {"include_provenance": True, "include_usage": True}
    body = {"prompt": "abababab", "stream": True, "stream_options": options, "temperature": 0, "max_tokens": 50}
    *events, last = site.post(COMPLETIONS, body).events
    _, steps = told(events)
    counted = last["metrics"]["speculative_decoding"]
    assert sum(verified for verified, _ in steps) == counted["num_draft_tokens"] > 0
    assert sum(accepted for _, accepted in steps) == counted["num_accepted_draft_tokens"]


def test_chunks_stay_clean_unless_provenance_is_asked_for(site):
    """Off by default; it belongs to streams, and a whole answer with it is refused by name."""
    events = site.post(COMPLETIONS, {"prompt": "abab", "stream": True, "max_tokens": 8}).events
    assert all("provenance" not in choice for event in events for choice in event["choices"])
    refused = {"prompt": "abab", "stream_options": {"include_provenance": True}}
    assert site.refused(COMPLETIONS, refused)["param"] == "stream_options"


def test_a_character_of_several_tokens_is_whole():
    """Bytes as tokens: the text of a character stands with its last byte, however steps cut it."""
    text = "é€😀!"
    with Site(lambda: engine(guesses(text), target=script_model(text))) as site:
        tokens, _ = told(site.post(COMPLETIONS, {"prompt": "a", **ASKED, "temperature": 0, "max_tokens": 40}).events)
    shown = [token["text"] for token in tokens if not token.get("special")]
    assert "".join(shown) == text
    assert [one for one in shown if one] == list(text)
    assert [token["text"] for token in tokens if token.get("special")] != []


# ---------------------------------------------------------------------------------------------------------- reliability


def test_reliability_counts_what_verification_came_to():
    """Of a draft of four of which two were accepted three have a verdict: two kept, one refused. Rounds without
    confidences, and NaN, are no lesson."""
    found = Reliability()
    draft = Draft([1, 2, 3, 4], None, [0.95, 0.85, 0.31, 0.31])
    found.add(RoundReport(None, None, draft, "small", verified=4, accepted=2))
    found.add(RoundReport(None, None, Draft([1], None, [1.0]), "small", verified=1, accepted=1))
    found.add(RoundReport(None, None, Draft([1], None, []), "small", verified=1, accepted=1))
    found.add(RoundReport(None, None, Draft([1], None, [float("nan")]), "ngram", verified=1, accepted=0))
    found.add(RoundReport(None, None, Draft(), None, verified=0, accepted=0))
    small, ngram = sorted(found.as_list(), key=lambda one: -len(one["bars"]))
    assert ngram == {"drafter": "ngram", "bars": []}
    bars = {bar["low"]: bar for bar in small["bars"]}
    assert set(bars) == {0.3, 0.8, 0.9}
    assert (bars[0.3]["drafts"], bars[0.3]["observed"], bars[0.3]["predicted"]) == (1, 0.0, 0.31)
    assert (bars[0.9]["drafts"], bars[0.9]["observed"]) == (2, 1.0)
    assert bars[0.9]["predicted"] == pytest.approx(0.975)


# --------------------------------------------------------------------------------------------------------- the document

KEY = ProfileKey("m", "float64", "cpu", 1)
CURVE = CostCurve((1, 2, 8), (0.01, 0.012, 0.03))
PROFILE = Profile(KEY, VerifyCost(CURVE), {"oracle": DraftCost((2,), (CostCurve((1, 4), (0.001, 0.002)),))})


def scheduled(cache: str) -> Site:
    """A server whose scheduler goes by measured costs and a calibration."""
    bars = ((Bin(0.6, 0.7, 30, 0.65, 0.5),), (Bin(0.4, 0.5, 12, 0.45, 0.4),))
    key = CalibrationKey("rejection", "probabilistic", "greedy")
    table = Table(key, (1.5, 2.0), "prompts", 1000, (0.1, 0.1), (0.01, 0.02), bars, bars)
    made = Scheduler(PROFILE, SchedulerOptions("delayed"), {"oracle": Calibration([table])})

    def load() -> Engine:
        loaded = engine(Oracle({(97,): [*b"text"]}), target=script_model("text"), calibration_cache=cache)
        loaded.core.schedule.scheduling = Scheduling(made)
        return loaded

    return Site(load)


def test_the_loaded_profile_is_told(tmp_path):
    """Costs as measured and as planning reads them, calibrations with their diagrams, and speeds under load where they
    were measured with this profile."""
    with scheduled(str(tmp_path)) as site:
        found = site.get("/forerun/profile").json
        assert found["scheduling"] == {"policy": "delayed", "adapts": True, "min_predicted_gain": 0.005}
        target = found["profile"]["target"]
        assert target["measured"] == {"rows": [1, 2, 8], "seconds": [0.01, 0.012, 0.03]}
        assert target["planned"]["rows"] == list(range(1, 9))
        assert target["planned"]["seconds"][0] == pytest.approx(0.01)
        assert found["profile"]["drafters"][0]["lengths"] == [{"k": 2, "requests": [1, 4], "seconds": [0.001, 0.002]}]
        [calibration] = found["calibrations"]
        assert calibration["tables"][0]["bars_after"][1] == [[0.4, 0.5, 12, 0.45, 0.4]]
        assert found["load"] is None
        assert {one["policy"] for one in found["expected"]} >= {"plain", "best K"}
        assert {one["load"] for one in found["expected"]} == {"1"}  # K is 4, and 8 rows were measured
        point = {"drafter": "oracle", "policy": "plain", "load": "1", "per_user": 9.0, "total": 9.0}
        write_load_study(KEY, [point], {"made": "here"}, tmp_path)
        assert site.get("/forerun/profile").json["load"]["points"] == [point]
        load_study_path(KEY, tmp_path).write_text("[]")
        assert site.get("/forerun/profile").json["load"] is None


def test_the_expected_frontier_is_what_costs_and_acceptance_say():
    """By hand: one request, and two drafts that have always been accepted so far."""
    made = Scheduler(PROFILE, SchedulerOptions("delayed"))
    for _ in range(2000):
        made.history.record("oracle", 0, Outcome(2, 2))
    points = {(one["policy"], one["load"]): one for one in expected_frontier(made, PROFILE, {"oracle": 2}, 9)}
    assert points["plain", "1"]["total"] == pytest.approx(1 / 0.01)
    seconds = 0.001 + CURVE(3)
    assert points["fixed:2", "1"]["total"] == pytest.approx(3 / seconds, rel=0.03)
    assert points["best K", "1"]["total"] == max(
        points[way, "1"]["total"] for way in ("plain", "fixed:1", "fixed:2", "best K")
    )
    assert points["plain", "2"]["total"] == pytest.approx(2 / CURVE(2))
    assert points["plain", "2"]["per_user"] == pytest.approx(1 / CURVE(2))
    assert {load for _, load in points} == {"1", "2"}  # with 4 there would be 12 rows, and 8 were measured
    assert expected_frontier(made, PROFILE, {"other": 2}, 9) == []


def test_without_a_profile_the_document_says_so(site):
    """Nothing measured: null, so that the page can name the command; what was served is there."""
    site.complete(prompt="abababab", max_tokens=30, temperature=0)
    found = site.get("/forerun/profile").json
    assert found["profile"] is None
    assert found["expected"] == []
    assert found["load"] is None
    assert found["drafters"] == ["ngram", "small"]
    assert not found["scheduling"]["adapts"]
    assert {one["drafter"] for one in found["reliability"]} & {"ngram", "small"}
    assert site.get("/server_info").json["version"] == forerun.__version__
    assert json.dumps(found)  # no NaN


@pytest.mark.parametrize(
    ("drafters", "flags"),
    [
        (None, "my/model"),
        ("ngram,small", "my/model --drafter ngram,small"),
        ("dspark+lookup", "my/model --drafter dspark+lookup"),
        ({"model": "my drafter", "num_speculative_tokens": 3}, "my/model --drafter 'my drafter'"),
    ],
)
def test_commands_name_what_is_served(drafters, flags):
    """A drafter of a folder by its folder, one with prompt lookup as such: costs of another drafter would not count."""
    assert drafter_flags("my/model", parse_configs(drafters)) == flags


def test_the_page_is_read_while_answers_are_computed(site):
    """The document is made between two steps, whatever the engine does."""
    body = {"prompt": "abab" * 20, "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    busy = threading.Thread(target=site.post, args=(COMPLETIONS, body))
    busy.start()
    for _ in range(5):
        assert site.get("/forerun/profile").status == 200
    busy.join()
