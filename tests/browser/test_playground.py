"""One request from the page: its tokens as they come, where each came from, and what goes wrong."""

from __future__ import annotations

import json

from browser.conftest import answer_with, screenshot, until, until_ready

PROMPT = "def area(shape):\n"
SOURCES = ("drafted", "corrected", "bonus", "plain")
ANSWER = "#answers .answer:first-child"
DONE = f"{ANSWER} .badge.done"
TOKENS = f"{ANSWER} .output .token"


def ask(page, prompt=PROMPT, tokens="48", **fields):
    page.fill("#prompt", prompt)
    page.fill("#max-tokens", tokens)
    page.fill("#temperature", "0")
    for name, value in fields.items():
        page.fill(f"#{name}", value)
    page.click("#generate")


def test_an_answer_streams_in_colours(visit, served):
    """Tokens come one after the other; each is marked by its source; together they are the answer that any client gets;
    the numbers are those of the answer."""
    page = until_ready(visit(served).page)
    ask(page)
    page.wait_for_selector(TOKENS)
    assert page.locator(f"{ANSWER} .badge.working").count() == 1, "the first token was shown only when all were there"
    page.wait_for_selector(DONE)
    screenshot(page, "playground-light")
    want = served.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 48, "temperature": 0})
    seen = page.locator(TOKENS).all_text_contents()
    assert "".join(seen) == want["choices"][0]["text"]
    assert len(seen) == want["usage"]["completion_tokens"] == 48
    counts = {source: page.locator(f"{TOKENS}.{source}").count() for source in SOURCES}
    assert sum(counts.values()) == 48
    spec = want["metrics"]["speculative_decoding"]
    assert counts["drafted"] in range(spec["num_accepted_draft_tokens"] - 4, spec["num_accepted_draft_tokens"] + 1)
    assert counts["drafted"] > 0
    assert counts["corrected"] > 0
    names, values = (page.locator(f"{ANSWER} .figures {tag}").all_inner_texts() for tag in ("dt", "dd"))
    figures = dict(zip(names, values, strict=True))
    assert figures["tokens"] == "48"
    assert float(figures["accepted length"]) > 1
    assert page.locator(f"{ANSWER} .strip g").count() == spec["num_spec_steps"]


def test_without_drafts_every_token_is_plain(visit, served):
    """The switch is the request's `speculative: false`, and the answer is the same."""
    page = until_ready(visit(served).page)
    ask(page, tokens="24")
    page.wait_for_selector(DONE)
    drafted = page.locator(TOKENS).all_text_contents()
    page.locator("#speculative").uncheck()
    ask(page, tokens="24")
    page.wait_for_selector("#answers .answer:nth-child(2)")
    page.wait_for_selector(DONE)
    assert page.locator(TOKENS).all_text_contents() == drafted
    assert page.locator(f"{TOKENS}.plain").count() == 24
    assert "plain" in page.locator(f"{ANSWER} header").inner_text()


def test_without_a_drafter_nothing_is_said_to_be_speculative(visit, served):
    """The switch is off and cannot be moved; an answer is called plain."""

    def bare(route):
        answer = route.fetch()
        route.fulfill(response=answer, json={**answer.json(), "speculative_config": []})

    page = visit(served).page
    page.route("**/server_info", bare)
    page.reload()
    until_ready(page)
    assert page.locator("#speculative").is_disabled()
    assert not page.locator("#speculative").is_checked()
    ask(page, tokens="4")
    page.wait_for_selector(DONE)
    words = page.locator(f"{ANSWER} header .badge").all_inner_texts()
    assert "plain" in words
    assert "speculative" not in words


def test_a_token_says_how_sure_the_drafter_was(visit, served):
    """On hover and on focus; arrows go from token to token; the answer is one stop of the tab key."""
    page = until_ready(visit(served).page)
    ask(page)
    page.wait_for_selector(DONE)
    page.locator(f"{TOKENS}.drafted").first.hover()
    page.wait_for_selector("#tip:visible")
    assert "confidence of the drafter" in page.locator("#tip").inner_text()
    screenshot(page, "playground-tip")
    page.mouse.move(0, 0)
    page.wait_for_selector("#tip", state="hidden")
    assert page.locator(f'{TOKENS}[tabindex="0"]').count() == 1
    page.locator(f'{TOKENS}[tabindex="0"]').focus()
    page.keyboard.press("End")
    page.keyboard.press("ArrowLeft")
    assert page.evaluate("document.activeElement.dataset.place") == "46"
    assert page.locator("#tip").is_visible()
    corrected = page.locator(f"{TOKENS}.corrected").first
    corrected.focus()
    assert "the draft said" in page.locator("#tip").inner_text()
    page.keyboard.press("Escape")
    assert page.locator("#tip").is_hidden()


def test_a_chat_goes_on(visit, measured):
    """With a template the page chats; the second message comes with the first and its answer before it."""
    watched = visit(measured)
    page = watched.page
    page.fill("#key", measured.key)
    page.keyboard.press("Enter")
    until_ready(page)
    assert page.locator('input[value="chat"]').is_checked()
    sent = []
    page.on("request", lambda request: request.url.endswith("completions") and sent.append(request.post_data_json))
    for text in ("first", "second"):
        ask(page, text, tokens="12")
        page.wait_for_selector(f'{ANSWER}:has-text("{text}") .badge.done')
    roles = [message["role"] for message in sent[-1]["messages"]]
    assert roles == ["user", "assistant", "user"]
    page.click("#new-chat")
    ask(page, "third", tokens="4")
    page.wait_for_selector(f'{ANSWER}:has-text("third") .badge.done')
    assert [message["content"] for message in sent[-1]["messages"]] == ["third"]


def test_stop_ends_the_answer_and_its_request(visit, served):
    """Esc: what has come stays, and the server computes no more of it."""
    page = until_ready(visit(served).page)
    ask(page, tokens="1500")
    page.wait_for_selector(TOKENS)
    page.keyboard.press("Escape")
    page.wait_for_selector(f"{ANSWER} .badge.warn >> text=stopped")
    assert 0 < page.locator(TOKENS).count() < 1500
    for _ in range(50):
        if served.metric("forerun:num_requests_running") == 0:
            break
        page.wait_for_timeout(100)
    assert served.metric("forerun:num_requests_running") == 0
    assert page.locator("#stop").is_disabled()


def test_errors_say_what_to_do(visit, served):
    """A full queue, and a field that the server refuses: its own words."""
    watched = visit(served)
    page, watched.expected = until_ready(watched.page), ("429", "400")
    body = json.dumps({"error": {"message": "the queue is full", "type": "x", "param": None, "code": None}})
    headers = {"retry-after": "7"}
    page.route("**/v1/completions", lambda route: route.fulfill(status=429, body=body, headers=headers))
    ask(page)
    error = page.wait_for_selector(f"{ANSWER} .error")
    assert "Try again in 7 s" in error.inner_text()
    page.unroute("**/v1/completions")
    ask(page, tokens="99999")
    error = page.wait_for_selector(f"{ANSWER} .error >> text=context")
    assert "2048" in error.inner_text()


def test_what_a_model_writes_is_text(visit, served):
    """Markup in an answer is shown as it is, and does nothing."""
    page = until_ready(visit(served).page)
    evil = '<img src=x onerror="document.title=1"><script>document.title=2</script>'
    token = {"id": 5, "text": evil, "source": "corrected", "confidence": 0.5, "instead_of": "<b>bold</b>"}
    page.route("**/v1/completions", lambda route: answer_with(route, [token], evil))
    ask(page, prompt=evil)
    page.wait_for_selector(DONE)
    assert page.locator(TOKENS).text_content() == evil
    page.locator(TOKENS).hover()
    assert "<b>bold</b>" in page.locator("#tip").inner_text()
    assert page.locator(f"{ANSWER} img, {ANSWER} script, #tip b").count() == 0
    assert page.title() == "forerun"


def test_the_same_request_for_a_terminal(visit, served):
    """What is copied as curl is what was sent, without the page's own extras and without the key."""
    page = until_ready(visit(served, permissions=["clipboard-read", "clipboard-write"]).page)
    page.fill("#prompt", "it's")
    page.fill("#seed", "11")
    page.click("#copy-curl")
    page.wait_for_selector("text=Copied")
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied.startswith(f"curl -N {served.url}/v1/completions")
    assert '"seed": 11' in copied
    assert "it'\\''s" in copied
    assert "provenance" not in copied


def chatting(page):
    """A page that believes its model chats, and the routes of its answers, which the test gives."""

    def templated(route):
        answer = route.fetch()
        route.fulfill(response=answer, json={**answer.json(), "chat_template": True})

    held = []
    page.route("**/server_info", templated)
    page.route("**/v1/chat/completions", lambda route: held.append(route))
    page.reload()
    until_ready(page)
    return held


def test_what_is_typed_while_an_answer_comes_stays(visit, served):
    """The message box is emptied of what was sent, not of the next message."""
    page = visit(served).page
    held = chatting(page)
    ask(page, "first")
    page.wait_for_selector(f"{ANSWER} .badge.working")
    page.fill("#prompt", "second")
    answer_with(held.pop(), [{"id": 1, "text": "so", "source": "plain"}], delta={"content": "so"})
    page.wait_for_selector(DONE)
    assert page.input_value("#prompt") == "second"
    page.click("#generate")
    page.wait_for_selector(f"{ANSWER} .badge.working")
    said = [message["content"] for message in held[0].request.post_data_json["messages"]]
    assert said == ["first", "so", "second"]
    answer_with(held.pop(), [{"id": 1, "text": "yes", "source": "plain"}], delta={"content": "yes"})
    page.wait_for_selector(DONE)
    assert page.input_value("#prompt") == ""


def test_a_new_chat_stays_new(visit, served):
    """Also where an answer of the old one is still to come."""
    page = visit(served).page
    held = chatting(page)
    for text in ("first", "second"):
        ask(page, text)
        until(page, "document.querySelector('#answers .working')")
        if text == "second":
            page.click("#new-chat")
        answer_with(held.pop(), [{"id": 1, "text": "so", "source": "plain"}], delta={"content": "so"})
        page.wait_for_selector(DONE)
    ask(page, "third")
    until(page, "document.querySelector('#answers .working')")
    assert [message["content"] for message in held.pop().request.post_data_json["messages"]] == ["third"]
    page.unroute_all(behavior="ignoreErrors")


def test_copying_works_without_a_clipboard_of_its_own(visit, served):
    """Browsers give none to a page of http:// on another machine. Two clicks leave the button as it was."""
    page = visit(served).page
    page.add_init_script("delete Navigator.prototype.clipboard")
    page.reload()
    until_ready(page)
    page.click("#copy-curl")
    page.click("#copy-curl")
    page.wait_for_selector("text=Copied")
    page.focus("#prompt")
    page.keyboard.press("Control+a")
    page.keyboard.press("Control+v")
    assert page.input_value("#prompt").startswith("curl -N ")
    page.wait_for_timeout(2000)
    assert page.locator("#copy-curl").inner_text() == "Copy as curl"


def test_choices_outlive_a_reconnection(visit, served):
    """What the server tells of itself once more does not undo what was chosen."""
    page = until_ready(visit(served).page)
    page.select_option("#drafter", "small")
    page.evaluate(
        """async () => (await import('/static/playground.js')).know(await (await fetch('server_info')).json())"""
    )
    assert page.input_value("#drafter") == "small"


def test_a_seed_is_sent_as_it_was_typed_or_not_at_all(visit, served):
    """Numbers of JavaScript are exact up to 2^53 - 1; another seed than was asked for would be a lie."""
    watched = visit(served)
    page = until_ready(watched.page)
    ask(page, tokens="2", seed="9007199254740993")
    assert page.locator("#answers .answer").count() == 0
    ask(page, tokens="2", seed="-9007199254740991")
    page.wait_for_selector(DONE)
    assert not [url for url in watched.requests if url.endswith("completions")][1:]
