"""The race: two measured runs, a verdict about their tokens, and a replay on one clock."""

from __future__ import annotations

import json

import pytest

from browser.conftest import answer_with, screenshot, until, until_ready


def race(page, **fields):
    page.fill("#race-max-tokens", "40")
    for name, value in fields.items():
        if name == "mode":
            page.select_option("#race-verify-mode", value)
        else:
            page.fill(f"#race-{name}", value)
    page.click("#race-start")
    page.wait_for_selector("#verdict:visible")
    return page.locator("#verdict h2").inner_text()


def ids(page, lane):
    return page.locator(f"#lane-{lane} .token").all_text_contents()


def test_a_greedy_race_is_identical(visit, served):
    """Both answers token by token; the times; and nothing else was asked of the server while it was measured."""
    watched = visit(served, "#race", reduced_motion="reduce")
    page = until_ready(watched.page)
    assert page.locator("#panel-race").is_visible()
    assert race(page) == "Identical"
    asked = [url.rpartition("/")[2] for url in watched.requests]
    first = asked.index("completions")
    last = len(asked) - 1 - asked[::-1].index("completions")
    assert asked[first : last + 1] == ["completions"] * 4  # two to warm up
    assert ids(page, "plain") == ids(page, "speculative")
    assert len(ids(page, "plain")) == 40
    assert page.locator("#lane-plain .token:not(.plain)").count() == 0
    assert page.locator("#lane-speculative .token.drafted").count() > 0
    assert "40 tokens" in page.locator("#verdict p").first.inner_text()
    assert "×" in page.locator(".gain").inner_text()
    assert "one after the other" in page.locator("#race-progress").inner_text()
    screenshot(page, "race-light")


PROMISED = {"coupled": {"Identical"}, "rejection": {"Differs, as separate draws may", "Identical"}}


@pytest.mark.parametrize("mode", PROMISED)
def test_the_verdict_knows_what_is_promised(visit, served, mode):
    """Above temperature 0: in coupled mode the ids agree; in rejection mode the law does, which is said, not marked as
    a failure."""
    page = until_ready(visit(served, "#race", reduced_motion="reduce").page)
    assert race(page, mode=mode, temperature="0.9", seed="5") in PROMISED[mode]
    assert page.locator("#verdict.bad").count() == 0


def forged(last_of):
    """Answers that differ in their last token, and log-probabilities of both."""

    def answer(route):
        body = route.request.post_data_json
        if body.get("echo"):
            scores = {"token_logprobs": [None, last_of[body["prompt"][-1]]]}
            route.fulfill(status=200, body=json.dumps({"choices": [{"logprobs": scores}]}))
            return
        last = 9 if body.get("speculative") is False else 8
        tokens = [{"id": i, "text": f" {i}", "source": "plain"} for i in (1, 2, last)]
        answer_with(route, tokens, prompt_token_ids=[5, 6])

    return answer


def test_what_differs_is_shown(visit, served):
    """Two answers that must agree and do not: the verdict names the first token that differs, and it is marked."""
    page = until_ready(visit(served, "#race", reduced_motion="reduce").page)
    page.route("**/v1/completions", forged({}))
    assert race(page) == "Differs from token 3 on"
    assert page.locator(".token.differs").count() == 2
    assert page.locator("#verdict.bad").count() == 1
    assert "report" in page.locator("#verdict p").first.inner_text()


@pytest.mark.parametrize(("other", "kind"), [(-0.71, "fair"), (-3.0, "bad")])
def test_rounding_explains_a_near_tie_and_nothing_else(visit, served, other, kind):
    """In half precision the target is asked how far apart it has the two tokens."""
    watched = visit(served, "#race", reduced_motion="reduce")
    page = watched.page

    def in_bfloat16(route):
        answer = route.fetch()
        route.fulfill(response=answer, json={**answer.json(), "dtype": "bfloat16"})

    page.route("**/server_info", in_bfloat16)
    page.reload()
    until_ready(page)
    page.route("**/v1/completions", forged({9: -0.70, 8: other}))
    assert race(page).startswith("Differs")
    assert page.locator(f"#verdict.{kind}").count() == 1
    assert ("near tie" in page.locator("#verdict h2").inner_text()) == (kind == "fair")
    assert f"{abs(other + 0.7):.3f} apart" in page.locator("#verdict p").first.inner_text()


def test_a_replay_shows_both_from_one_start(visit, served):
    """Not where motion is unwelcome; on demand always. Afterwards both lanes hold their whole answers again."""
    page = until_ready(visit(served, "#race").page)
    race(page)
    assert "Replay" in page.locator("#race-progress").inner_text()
    page.wait_for_selector("#lane-plain.done")
    page.wait_for_selector("#lane-speculative.done")
    assert ids(page, "plain") == ids(page, "speculative")
    assert len(ids(page, "plain")) == 40
    page.click("#race-again")
    page.wait_for_selector("#lane-plain.running")
    page.keyboard.press("Escape")
    page.wait_for_selector("#lane-plain.done")
    assert len(ids(page, "plain")) == 40


def test_both_at_once_are_told_apart(visit, served):
    """The other way to race: at once, which is said to be slower for both."""
    page = until_ready(visit(served, "#race", reduced_motion="reduce").page)
    page.check("#race-together")
    assert race(page) == "Identical"
    assert "shared the machine" in page.locator("#race-progress").inner_text()


def test_of_two_at_once_none_runs_on_alone(visit, served):
    """Where one fails the other's request is ended too: it would go on writing into the next race."""
    watched = visit(served, "#race", reduced_motion="reduce")
    page, watched.expected = until_ready(watched.page), ("429",)

    def refused(route):
        if route.request.post_data_json.get("speculative") is False:
            return route.continue_()
        until(page, "document.querySelector('#lane-plain .token')")
        return route.fulfill(status=429, body=json.dumps({"error": {"message": "full"}}))

    page.route("**/v1/completions", refused)
    page.check("#race-together")
    page.check("#race-ignore-eos")
    page.fill("#race-max-tokens", "1500")
    page.click("#race-start")
    page.wait_for_selector("#verdict.bad")
    assert page.locator(".lane.running").count() == 0
    shown = page.locator("#lane-plain .token").count()
    page.wait_for_timeout(500)
    assert page.locator("#lane-plain .token").count() == shown < 1500


def test_a_replay_that_is_begun_anew_keeps_the_mark(visit, served):
    """Of the first token that differs."""
    page = until_ready(visit(served, "#race", reduced_motion="reduce").page)
    page.route("**/v1/completions", forged({}))
    race(page)
    page.click("#race-again")
    page.click("#race-again")
    page.keyboard.press("Escape")
    page.wait_for_selector("#lane-plain.done")
    assert page.locator(".token.differs").count() == 2
