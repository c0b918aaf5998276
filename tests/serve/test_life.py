"""Life under load: who may enter, who leaves early, what a fault costs, how it ends. Nothing is ever left behind."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import random
import signal
import threading
import time
from contextlib import suppress

import pytest
import uvicorn

from forerun.drafters.fake import Broken
from forerun.engine import aio
from forerun.serve import ServeOptions
from forerun.serve.gate import Gate
from forerun.serve.lanes import LONG
from forerun.serve.run import _Uvicorn
from forerun.serve.security import Entrance, _digest
from forerun.serve.server import LOADER, Server
from serve.kit import Reply, Site, ascii_model, engine, noisy_engine

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ENDLESS = {"prompt": "a", "max_tokens": 390, "temperature": 0, "ignore_eos": True}


def _slowed(seconds: float, make=noisy_engine, **options):
    """An engine whose every step takes a while."""
    loaded = make(**options)
    whole = loaded.target.forward

    def forward(*args):
        time.sleep(seconds)
        return whole(*args)

    loaded.target.forward = forward
    return loaded


# ------------------------------------------------------------------------------------------------------------ leaving


def _stepped(allowed: threading.Semaphore):
    """An engine that makes one step for each release."""
    loaded = noisy_engine()
    whole = loaded.target.forward

    def forward(*args):
        allowed.acquire()
        return whole(*args)

    loaded.target.forward = forward
    return loaded


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_cancelled_within_a_step(stream):
    """The step that runs when it leaves is the last one that computes it; whoever shares the batch is not disturbed."""
    allowed = threading.Semaphore(0)
    with Site(lambda: _stepped(allowed)) as site:
        core, gate = site.engine.core, site.server.service.gate

        async def step() -> None:
            made = len(site.engine.target.passes)
            allowed.release()
            while len(site.engine.target.passes) == made:
                await asyncio.sleep(0.001)

        async def leave() -> None:
            call = site.call("POST", COMPLETIONS, {**ENDLESS, "stream": stream})
            leaving = asyncio.ensure_future(call.run())
            mate = asyncio.ensure_future(site.call("POST", COMPLETIONS, {**ENDLESS, "max_tokens": 40}).run())
            while gate.inside < 2:
                await asyncio.sleep(0.001)
            while len(core.admission.running) < 2 or any(request.prefill for request in core.admission.running):
                await step()
            call.leave()
            await leaving  # the engine still waits inside of a step with both of them
            assert len(core.admission.running) == 2
            await step()
            while len(core.admission.running) > 1:  # no further step is needed
                await asyncio.sleep(0.001)
            allowed.release(1000)
            assert (await mate).json["usage"]["completion_tokens"] == 40

        site.run(leave())
        site.settle()
        assert site.metric("forerun:request_success_total", finished_reason="abort") == 1


def test_ca_1_clients_that_leave_at_any_moment_leave_nothing():
    """Two hundred requests, each left at a random moment or not at all: no block is lost, the others get their text.

    https://github.com/sgl-project/sglang/pull/28374, https://github.com/vllm-project/vllm/pull/29987
    """
    rng = random.Random(4)
    with Site(lambda: noisy_engine(max_num_seqs=8), max_queue=300) as site:
        want = site.complete(prompt="stays", max_tokens=25, temperature=0)["choices"][0]["text"]

        async def one(number: int) -> None:
            stays = number % 4 == 0
            fields = {"prompt": "stays" if stays else f"leaves {number}", "max_tokens": 25, "temperature": 0}
            call = site.call("POST", COMPLETIONS, {**fields, "stream": bool(number % 3)})
            running = asyncio.ensure_future(call.run())
            if not stays:
                await asyncio.sleep(rng.random() * 0.3)
                call.leave()
            reply = await running
            if stays and number % 3:
                assert "".join(event["choices"][0]["text"] for event in reply.events) == want
            elif stays:
                assert reply.json["choices"][0]["text"] == want

        async def all_of_them() -> None:
            await asyncio.gather(*(one(number) for number in range(200)))

        site.run(all_of_them())
        site.settle()
        assert not site.server.service.metrics.open


def test_an_unread_stream_does_not_grow(monkeypatch, caplog):
    """A client that stops reading is cancelled once a bound of chunks waits for it; the engine never waits."""
    monkeypatch.setattr(aio, "MOST_UNREAD", 20)
    with Site(noisy_engine) as site:

        async def slow() -> Reply:
            call = site.call("POST", COMPLETIONS, {**ENDLESS, "stream": True, "speculative": False})
            gate = asyncio.Event()

            async def reads() -> None:
                if len(call.reply.parts) == 1:
                    await gate.wait()

            call.reads = reads
            running = asyncio.ensure_future(call.run())
            mate = await site.call("POST", COMPLETIONS, {**ENDLESS, "max_tokens": 15}).run()
            assert mate.json["usage"]["completion_tokens"] == 15  # fewer than may wait: it is never behind
            await site.quiet()
            gate.set()
            return await running

        reply = site.run(slow())
        *_, last, done = reply.body.decode().strip().split("\n\n")
        assert done == "data: [DONE]"
        assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"
        assert "behind" in caplog.text
        site.settle()


def test_a_client_that_never_reads_is_left(caplog):
    """--write-timeout: a send that does not return ends the request."""
    with Site(noisy_engine, write_timeout=0.2) as site:

        async def stuck() -> None:
            call = site.call("POST", COMPLETIONS, {**ENDLESS, "stream": True})

            async def reads() -> None:
                await asyncio.sleep(60)

            call.reads = reads
            await call.run()

        site.run(stuck(), 20)
        assert "read nothing" in caplog.text
        site.settle()


def test_pings_keep_a_silent_stream_open():
    """Comments while nothing comes; clients skip them."""
    with Site(lambda: _slowed(0.15), sse_ping_interval=0.03) as site:
        reply = site.post(COMPLETIONS, {"prompt": "a", "max_tokens": 3, "stream": True, "seed": 1})
        assert reply.body.count(b": ping\n\n") >= 3
        assert "".join(event["choices"][0]["text"] for event in reply.events)


# ----------------------------------------------------------------------------------------------------------- entering


def test_a_full_queue_is_a_429_with_retry_after():
    """Beyond max_num_seqs + --max-queue: at once, with a time; afterwards everything is served again."""
    with Site(lambda: _slowed(0.005, max_num_seqs=2), max_queue=3) as site:
        calls = [site.call("POST", COMPLETIONS, {**ENDLESS, "max_tokens": 120}) for _ in range(9)]
        replies = site.together(calls)
        refused = [reply for reply in replies if reply.status == 429]
        assert len(refused) == 4
        for reply in refused:
            assert (reply.error["type"], reply.error["code"]) == ("rate_limit_error", "queue_full")
            assert 1 <= int(reply.headers["retry-after"]) <= 60
        assert sum(reply.status == 200 for reply in replies) == 5
        assert site.complete(prompt="a", max_tokens=2)["choices"]
        assert site.refused(COMPLETIONS, {"prompt": "a", "n": 6})["param"] == "n"
        assert site.metric("forerun:requests_refused_total") == 4
        site.settle()


def test_only_answers_tell_how_long_to_wait():
    """Retry-After comes of what answers take: neither texts to tokenise nor requests that are refused lower it."""
    with Site(noisy_engine) as site:
        gate = site.server.service.gate
        gate._seconds = before = 30.0
        assert site.post("/tokenize", {"prompt": "a"}).status == 200
        assert site.post("/detokenize", {"tokens": [97]}).status == 200
        assert site.refused(COMPLETIONS, {"prompt": "a", "max_tokens": 5000})["code"] == "context_length_exceeded"
        assert gate._seconds == before
        for stream in (False, True):
            site.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1, "stream": stream})
            assert gate._seconds < before
            before = gate._seconds


class Held:
    """A tokenizer's `encode` that waits at texts that begin with `held`; what it was asked for is remembered."""

    def __init__(self, site: Site):
        self.tokenizer = site.server.service.prompts.tokenizer
        self._encode, self._release, self.begun = self.tokenizer.encode, threading.Event(), list[str]()

    def __enter__(self) -> Held:
        self.tokenizer.encode = self._waits
        return self

    def __exit__(self, *_: object) -> None:
        self._release.set()
        self.tokenizer.encode = self._encode

    def _waits(self, text: str, *more: bool) -> list[int]:
        self.begun.append(text[:12])
        if text.startswith("held"):
            assert self._release.wait(20)
        return self._encode(text, *more)

    async def wait(self, count: int) -> None:
        while len(self.begun) < count:
            await asyncio.sleep(0.001)


def test_a_full_queue_is_told_before_a_text_is_touched():
    """What waits to be tokenised has its place in the queue: who comes behind them is refused at once, text unread."""
    with Site(lambda: noisy_engine(max_num_seqs=1), max_queue=3) as site, Held(site) as held:

        async def full() -> None:
            calls = [site.call("POST", COMPLETIONS, {"prompt": f"held {i}", "max_tokens": 1}) for i in range(4)]
            inside = [asyncio.ensure_future(call.run()) for call in calls]
            await held.wait(2)
            for path, body in ((COMPLETIONS, {"prompt": "late"}), ("/tokenize", {"prompt": "late"})):
                assert (await site.call("POST", path, body).run()).status == 429
            held._release.set()
            assert [reply.status for reply in await asyncio.gather(*inside)] == [200] * 4

        site.run(full())
        assert sorted(held.begun) == [f"held {i}" for i in range(4)]


@pytest.mark.parametrize("end", ["leaves", "deadline", "request_timeout"])
def test_who_is_gone_costs_no_tokenising(end):
    """A deadline counts from the arrival, and whoever left is let go, also while texts before theirs are tokenised:
    what has not begun does not begin."""
    limit = {"request_timeout": 0.3} if end == "request_timeout" else {}
    with Site(noisy_engine, **limit) as site, Held(site) as held:

        async def gone() -> None:
            before = [site.call("POST", "/tokenize", {"prompt": f"held {i}"}) for i in range(2)]
            holding = [asyncio.ensure_future(call.run()) for call in before]
            await held.wait(2)
            more = {"deadline": 0.05} if end == "deadline" else {}
            call = site.call("POST", COMPLETIONS, {"prompt": "gone", **more})
            leaving = asyncio.ensure_future(call.run())
            if end == "leaves":
                while site.server.service.gate.inside < 3:
                    await asyncio.sleep(0.001)
                call.leave()
            reply = await leaving
            assert reply.status == (0 if end == "leaves" else 408)
            held._release.set()
            await asyncio.gather(*holding)
            assert (await site.call("POST", "/tokenize", {"prompt": "next"}).run()).status == 200 or limit

        site.run(gone())
        assert "gone" not in held.begun
        site.settle()


def test_long_texts_do_not_hold_up_short_ones():
    """However many of them wait to be tokenised."""
    with Site(noisy_engine) as site, Held(site) as held:

        async def short() -> None:
            calls = [site.call("POST", "/tokenize", {"prompt": "held" + "x" * LONG}) for _ in range(3)]
            holding = [asyncio.ensure_future(call.run()) for call in calls]
            await held.wait(1)
            assert (await site.call("POST", COMPLETIONS, {"prompt": "a", "max_tokens": 1}).run()).status == 200
            held._release.set()
            assert [reply.json["count"] for reply in await asyncio.gather(*holding)] == [LONG + 4] * 3

        site.run(short())


def test_a_long_prediction_is_tokenised_among_the_long_texts():
    """Only what an answer could be as long as gets to the engine's callers, all of whom share their threads."""
    with Site(noisy_engine) as site:
        tokenizer, threads = site.server.service.prompts.tokenizer, set()
        encode = tokenizer.encode

        def noted(text: str, *more: bool) -> list[int]:
            if len(text) >= LONG:
                threads.add(threading.current_thread().name)
            return encode(text, *more)

        tokenizer.encode = noted
        error = site.refused(COMPLETIONS, {"prompt": "a", "prediction": {"type": "content", "content": "x" * LONG}})
        assert error["param"] == "prediction"
        assert "the window is 400" in error["message"]
        assert threads == {"forerun-long-text_0"}
        assert site.refused(COMPLETIONS, {"prompt": "a", "bad_words": ["x" * LONG]})["param"] == "bad_words"
        assert threads == {"forerun-long-text_0"}


def test_long_prompts_starve_nobody():
    """While a prompt of many steps is read, a short one that came later gets its tokens; what decodes goes on."""
    # Slow steps: the short prompt comes long before the first long one, of 94 steps at least, is read.
    make = lambda: _slowed(0.005, engine, target=ascii_model(window=6000), max_num_batched_tokens=32)  # noqa: E731
    with Site(make) as site:
        done: list[str] = []

        async def one(name: str, prompt: str, most: int) -> None:
            await site.call("POST", COMPLETIONS, {"prompt": prompt, "max_tokens": most, "temperature": 0}).run()
            done.append(name)

        async def all_of_them() -> None:
            tasks = [asyncio.ensure_future(one(f"long {i}", str(i) * 3000, 1)) for i in range(2)]
            await asyncio.sleep(0.05)
            tasks += [asyncio.ensure_future(one("short", "y", 5))]
            await asyncio.gather(*tasks)

        site.run(all_of_them())
        assert done[0] == "short"


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_ends_a_request(stream):
    """Of the request or of the server: 408, told not to be sent again; a stream that has begun gets an error event."""
    with Site(lambda: _slowed(0.02)) as site:
        reply = site.post(COMPLETIONS, {**ENDLESS, "deadline": 1.0, "stream": stream})
        if stream:
            assert reply.status == 200
            assert b'"code": "deadline_exceeded"' in reply.body
            assert reply.body.endswith(b"data: [DONE]\n\n")
        else:
            assert (reply.status, reply.error["code"]) == (408, "deadline_exceeded")
            assert reply.headers["x-should-retry"] == "false"
        site.settle()
    with Site(lambda: _slowed(0.02), request_timeout=0.2) as site:
        start = time.monotonic()
        assert site.post(COMPLETIONS, {**ENDLESS, "deadline": 100.0}).status == 408
        assert time.monotonic() - start < 10


def test_a_key_opens():
    """Every route but /health and /version needs one of the keys; the scheme is read in any case."""
    with Site(noisy_engine, api_key=("first", "second")) as site:
        for path in ("/v1/models", "/metrics", "/server_info", "/openapi.json", "/nothing"):
            for headers in (
                {},
                {"authorization": "Bearer wrong"},
                {"authorization": "Basic first"},
                {"authorization": "first"},
            ):
                reply = site.get(path, **headers)
                assert (reply.status, reply.error["code"]) == (401, "invalid_api_key"), (path, headers)
        assert site.get("/health").status == 200
        assert site.get("/version").status == 200
        for headers in ({"authorization": "Bearer first"}, {"authorization": "bearer second"}):
            assert site.get("/v1/models", **headers).status == 200


def test_how_long_a_key_takes_to_compare_says_nothing(monkeypatch):
    """Every key is compared, in constant time and of equal length, also behind the one that fits."""
    compared: list[tuple[int, int]] = []

    def compare(left: bytes, right: bytes) -> bool:
        compared.append((len(left), len(right)))
        return left == right

    monkeypatch.setattr(hmac, "compare_digest", compare)
    entrance = Entrance(lambda *_: None, keys=("first", "a second key", "3"))
    scope = {"path": "/metrics", "method": "GET"}
    for key, opens in (("first", True), ("3", True), ("wrong", False), ("", False), ("firs", False)):
        assert entrance._lets_in(scope, b"Bearer", _digest(key.encode())) is opens
        assert compared == [(32, 32)] * 3
        compared.clear()


def test_other_pages_may_not_call_unless_they_are_allowed():
    """CORS is off; --allowed-origins opens it for those."""
    preflight = {"origin": "https://a.example", "access-control-request-method": "POST"}
    with Site(noisy_engine) as site:
        reply = site.get("/v1/models", origin="https://a.example")
        assert "access-control-allow-origin" not in reply.headers
    with Site(noisy_engine, allowed_origins=("https://a.example",)) as site:
        reply = site.run(site.call("OPTIONS", COMPLETIONS, headers=preflight).run())
        assert reply.headers["access-control-allow-origin"] == "https://a.example"


@pytest.mark.parametrize(
    ("site_of_page", "origin", "allowed", "status"),
    [
        ("cross-site", "https://evil.example", (), 403),
        ("same-site", "http://127.0.0.1:9999", (), 403),
        ("cross-site", "https://evil.example", ("https://a.example",), 403),
        ("cross-site", "https://a.example", ("https://a.example",), 200),
        ("cross-site", "https://evil.example", ("*",), 200),
        ("same-origin", "http://127.0.0.1", (), 200),
        ("none", None, (), 200),
    ],
)
def test_a_foreign_page_cannot_make_the_server_work(site_of_page, origin, allowed, status):
    """CORS hides the answer from the page only; a body that is called text needs no preflight. Clients that are no
    browsers say nothing of it."""
    headers = {"content-type": "text/plain", "sec-fetch-site": site_of_page} | ({"origin": origin} if origin else {})
    with Site(noisy_engine, allowed_origins=allowed) as site:
        reply = site.run(site.call("POST", COMPLETIONS, {"prompt": "a", "max_tokens": 1}, headers=headers).run())
        assert reply.status == status
        assert site.get("/health", **headers).status == 200


def test_prompts_are_not_logged_unless_asked(caplog):
    """--enable-log-requests is the only way a prompt gets into a log."""
    caplog.set_level(logging.DEBUG, "forerun")
    with Site(noisy_engine, disable_log_stats=False, log_stats_interval=0.05) as site:
        site.complete(prompt="very secret", max_tokens=2)
        site.refused(COMPLETIONS, {"prompt": "very secret", "temperature": 9})
        time.sleep(0.2)
    assert "secret" not in caplog.text
    with Site(noisy_engine, enable_log_requests=True) as site:
        site.complete(prompt="very secret", max_tokens=2)
    assert "very secret" in caplog.text


# ------------------------------------------------------------------------------------------------------------- faults


def test_a_target_that_raises_costs_the_requests_of_that_step():
    """500 for them, without the message of what was raised; the server lives and serves the next one."""
    with Site(noisy_engine) as site:
        target = site.server.service.target
        whole, calls = target.forward, iter(range(10_000))

        def forward(*args):
            if next(calls) == 4:
                raise ValueError("secret of the inside")
            return whole(*args)

        target.forward = forward
        reply = site.post(COMPLETIONS, {**ENDLESS, "speculative": False})
        assert (reply.status, reply.error["type"]) == (500, "server_error")
        assert "secret" not in reply.error["message"]
        assert site.complete(prompt="a", max_tokens=3, seed=1)["usage"]["completion_tokens"] == 3
        site.settle()
        target.forward = whole
        site.complete(prompt="a", max_tokens=3)


def test_an_error_after_the_stream_began_is_an_event():
    """The status was sent: one event with the error, then [DONE]."""
    with Site(noisy_engine) as site:
        target = site.server.service.target
        whole, calls = target.forward, iter(range(10_000))

        def forward(*args):
            if next(calls) == 6:
                raise MemoryError
            return whole(*args)

        target.forward = forward
        reply = site.post(COMPLETIONS, {**ENDLESS, "stream": True, "speculative": False})
        assert reply.status == 200
        *_, last, done = reply.body.decode().strip().split("\n\n")
        assert done == "data: [DONE]"
        assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"
        site.settle()


def test_a_drafter_that_raises_costs_speed_only():
    """The text is that of plain decoding; the fault is counted."""
    with Site(engine) as site:
        want = site.complete(**ENDLESS)["choices"][0]["text"]
    broken = lambda: engine(Broken(lambda view: None, raises=True))  # noqa: E731
    with Site(broken) as site:
        assert site.complete(**ENDLESS)["choices"][0]["text"] == want
        assert site.metric("forerun:spec_decode_drafter_faults_total") > 0


def test_a_request_that_memory_cannot_hold_is_refused():
    """More KV rows than there are: a 400 that says so, nothing runs."""
    target = ascii_model()
    with Site(lambda: engine(target=target, kv_cache_memory_bytes=4 * target.block_bytes)) as site:
        error = site.refused(COMPLETIONS, {"prompt": "a" * 30, "max_tokens": 100})
        assert error["param"] == "max_tokens"
        assert "kv_cache_memory_bytes" in error["message"]
        assert site.chat(max_tokens=5, seed=1)["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize(
    ("length", "fields", "param"),
    [
        (30, {"max_tokens": 100}, "max_tokens"),
        (30, {"max_completion_tokens": 100}, "max_completion_tokens"),
        (100, {}, "messages"),
        (100, {"prompt_logprobs": 1}, "messages"),
    ],
)
def test_a_chat_that_memory_cannot_hold_is_told_by_its_own_fields(length, fields, param):
    """Neither `prompt` nor `max_tokens` where the client gave another one."""
    target = ascii_model()
    with Site(lambda: engine(target=target, kv_cache_memory_bytes=4 * target.block_bytes)) as site:
        error = site.refused(CHAT, {"messages": [{"role": "user", "content": "a" * length}], **fields})
        assert error["param"] == param
        assert error["message"].startswith(f"{param}: ")


# ------------------------------------------------------------------------------------------------------------- ending


def test_draining_finishes_what_runs_and_lets_nobody_in():
    """503 for whoever comes, /health is 503, and who was inside gets the whole answer."""
    with Site(lambda: _slowed(0.005)) as site:

        async def drain() -> None:
            running = asyncio.ensure_future(site.call("POST", COMPLETIONS, {**ENDLESS, "max_tokens": 40}).run())
            while site.server.service.gate.inside < 1:
                await asyncio.sleep(0.001)
            draining = asyncio.ensure_future(site.server.drain())
            await asyncio.sleep(0)
            late = await site.call("POST", COMPLETIONS, {**ENDLESS}).run()
            assert (late.status, late.error["type"]) == (503, "unavailable_error")
            assert (await site.call("GET", "/health").run()).status == 503
            await draining
            assert running.done()
            assert (await running).json["usage"]["completion_tokens"] == 40

        site.run(drain())


async def _answering(site: Site, stream: bool) -> asyncio.Future[Reply]:
    """An answer that has begun and has no end."""
    call = site.call("POST", COMPLETIONS, {**ENDLESS, "stream": stream})
    running = asyncio.ensure_future(call.run())
    while site.server.service.gate.inside < 1 or (stream and not call.reply.parts):
        await asyncio.sleep(0.001)
    return running


@pytest.mark.parametrize("stream", [False, True])
def test_who_is_not_done_when_draining_ends_is_told(stream):
    """--drain-timeout: a clear error, never half an answer without one."""
    with Site(lambda: _slowed(0.02), drain_timeout=0.2) as site:

        async def drain() -> Reply:
            running = await _answering(site, stream)
            await site.server.drain()
            return await running

        reply = site.run(drain())
        if stream:
            assert b'"unavailable_error"' in reply.body
            assert reply.body.endswith(b"data: [DONE]\n\n")
        else:
            assert reply.status == 503
        site.settle()


@pytest.mark.parametrize("stream", [False, True])
def test_who_runs_when_a_stop_is_hurried_is_told(stream):
    """Ctrl-C twice: the same clear error, without waiting for --drain-timeout."""
    with Site(lambda: _slowed(0.02), drain_timeout=600) as site:

        async def drain() -> Reply:
            running = await _answering(site, stream)
            draining = asyncio.ensure_future(site.server.drain())
            await asyncio.sleep(0)
            site.server.hurry()
            await draining
            return await running

        reply = site.run(drain())
        assert b'"unavailable_error"' in reply.body
        assert reply.body.endswith(b"data: [DONE]\n\n") if stream else reply.status == 503
        site.settle()


def test_ctrl_c_again_hurries_and_sigterm_again_does_not(monkeypatch):
    """Whoever is at the keyboard need not wait for --drain-timeout; what is cut off is told, not cancelled."""
    server, hurried = Server(noisy_engine, ServeOptions()), []
    monkeypatch.setattr(server, "hurry", lambda: hurried.append(True))
    web = _Uvicorn(uvicorn.Config(app="none"))
    web.server = server
    for number in (signal.SIGTERM, signal.SIGTERM):
        web.handle_exit(number, None)
    assert web.should_exit
    assert not hurried
    web.handle_exit(signal.SIGINT, None)
    assert hurried
    assert not web.force_exit


def test_while_the_model_loads_everything_is_503():
    """/health answers before there is a model; /version too."""
    release = threading.Event()

    def slow():
        release.wait(30)
        return noisy_engine()

    site = Site(slow)
    site._thread.start()
    site._lifespan = site.app.router.lifespan_context(site.app)
    site.run(site._lifespan.__aenter__())
    assert site.get("/health").status == 503
    assert site.get("/version").status == 200
    reply = site.post(COMPLETIONS, {"prompt": "a"})
    assert (reply.status, reply.error["type"]) == (503, "unavailable_error")
    assert site.get("/metrics").status == 503
    release.set()
    from forerun.serve.server import until_ready

    site.run(until_ready(site.server))
    assert site.get("/health").status == 200
    site.__exit__()


def test_the_thread_that_loaded_the_model_ends():
    """Its OpenMP workers would be too many beside those of the engine's thread, whose passes then take far longer."""
    with Site(noisy_engine) as site:
        assert site.complete(prompt="a", max_tokens=2)
        deadline = time.monotonic() + 10
        while any(thread.name.startswith(LOADER) for thread in threading.enumerate()):
            assert time.monotonic() < deadline, "it is still there"
            time.sleep(0.01)


def test_the_gate_counts_samples():
    """Places are taken by samples and given back whatever happens."""

    async def main() -> None:
        gate = Gate(2, 1)
        with suppress(ZeroDivisionError), gate.enter(3, None):
            assert gate.inside == 3
            raise ZeroDivisionError
        assert gate.inside == 0
        with gate.enter(2, None), gate.enter(1, None):
            assert gate.inside == 3
        await asyncio.wait_for(gate.drain(1), 2)

    asyncio.run(main())
