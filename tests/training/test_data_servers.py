"""Answers by OpenAI-compatible servers, real ones on this machine: what they are asked, what is done when they fail."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from forerun.errors import OptionError
from forerun.training.data import server as client
from forerun.training.data import server_answers
from forerun.training.data.jobs import Job, jobs_of
from forerun.training.data.records import ids_hash, read_record
from forerun.training.data.server import Server
from forerun.training.data.server_answers import FAILED, ServerAnswers, the_model
from forerun.training.data.sources import Raw

Reply = tuple[int, Any]
"""Status, and the body; a body of None ends the connection without an answer."""


class Fake:
    """A server that answers every chat with the last user's words in capitals, unless `respond` says otherwise."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        self.respond: Callable[[dict[str, Any]], Reply] = self.answer
        self.models = ["tiny"]
        self.headers: dict[str, str] = {}
        self.busy = self.most = 0
        self.connections = 0
        self.close = False
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    def answer(self, body: dict[str, Any]) -> Reply:
        if "prompt" in body:
            choice: dict[str, Any] = {"text": body["prompt"].upper()}
        else:
            choice = {"message": {"role": "assistant", "content": body["messages"][-1]["content"].upper()}}
        return 200, {"choices": [{**choice, "finish_reason": "stop"}], "usage": {"completion_tokens": 3}}

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                fake.connections += 1

            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                self.reply(200, {"data": [{"id": name} for name in fake.models]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with fake._lock:
                    fake.asked.append((self.path, body, dict(self.headers)))
                    fake.busy += 1
                    fake.most = max(fake.most, fake.busy)
                status, content = fake.respond(body)
                with fake._lock:
                    fake.busy -= 1
                self.reply(status, content)

            def reply(self, status: int, content: Any) -> None:
                if content is None:
                    self.close_connection = True
                    return
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                for name, value in fake.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)
                self.close_connection = fake.close  # without saying so beforehand

        return Handler


@pytest.fixture
def fakes() -> Iterator[Callable[[], Fake]]:
    made: list[Fake] = []

    def start() -> Fake:
        made.append(Fake())
        return made[-1]

    yield start
    for one in made:
        one.stop()


@pytest.fixture
def fake(fakes: Callable[[], Fake]) -> Fake:
    return fakes()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses of milliseconds."""
    monkeypatch.setattr(client, "FIRST_PAUSE", 0.005)
    monkeypatch.setattr(client, "LONGEST_PAUSE", 0.05)


def job(name: str, **content: Any) -> Job:
    return jobs_of(read_record(Raw("f", {"id": name, **(content or {"turns": [f"q {name}"]})}), "PROMPTS"))[0]


def jobs(count: int) -> list[Job]:
    return [job(str(i)) for i in range(count)]


def answers(urls: list[str], todo: list[Job], timeout: float = 10.0, **more: Any) -> dict[str, Job]:
    sampling = more.pop("sampling", {"temperature": 0.5, "max_tokens": 7})
    more = {"concurrency": 16, "retries": 6, **more}
    servers = [Server(url, more.pop("key", None), timeout) for url in urls]
    ended = list(ServerAnswers(servers, "tiny", sampling, **more).run(iter(todo)))
    assert len({one.id for one in ended}) == len(ended)
    return {one.id: one for one in ended}


def content(one: Job) -> str:
    assert one.failure is None, one.failure.detail
    return str(one.answers[-1].message["content"])


# --------------------------------------------------------------------------------------------------- what is asked


def test_a_chat_is_asked_turn_by_turn(fake: Fake) -> None:
    """With everything that was answered before, the sampling, the template's options, tools and the key."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    chat = {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "a"},
            {"role": "user", "content": "b"},
        ]
    }
    ended = answers(
        [f"{fake.url}/v1/"], [job("x", **chat, tools=tools)], key="secret", sampling={"temperature": 0.5, "seed": 4},
        template_options={"enable_thinking": False},
    )  # fmt: skip
    assert ended["x"].record() == {
        "id": "x",
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "a"}, {"role": "assistant", "content": "A"},
            {"role": "user", "content": "b"}, {"role": "assistant", "content": "B"},
        ],
        "tools": tools,
        "finish_reason": "stop",
    }  # fmt: skip
    (path, first, headers), (_, second, _) = fake.asked
    assert path == "/v1/chat/completions"
    assert first["messages"] == ended["x"].record()["messages"][:2]
    assert second["messages"] == ended["x"].record()["messages"][:4]
    assert headers["Authorization"] == "Bearer secret"
    seeds = {first.pop("seed"), second.pop("seed")}
    assert len(seeds) == 2
    assert all(0 <= seed < 2**63 for seed in seeds)
    first.pop("messages")
    assert first == {
        "model": "tiny", "temperature": 0.5, "tools": tools, "chat_template_kwargs": {"enable_thinking": False},
    }  # fmt: skip


def test_a_plain_prompt_is_completed(fake: Fake) -> None:
    """Without a template, at the other endpoint; a URL without /v1 means the same."""
    ended = answers([fake.url], [job("x", prompt="abc")])
    assert ended["x"].record() == {"id": "x", "prompt": "abc", "completion": "ABC", "finish_reason": "stop"}
    [(path, body, headers)] = fake.asked
    assert path == "/v1/completions"
    assert body == {"model": "tiny", "prompt": "abc", "temperature": 0.5, "max_tokens": 7}
    assert "Authorization" not in headers


def test_tool_calls_thoughts_and_emitted_ids_are_kept(fake: Fake) -> None:
    """As the server gives them; calls of the history are sent as the API has them, weights are not sent."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}

    def respond(_: dict[str, Any]) -> Reply:
        message = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"}
        choice = {"message": message, "finish_reason": "tool_calls", "token_ids": [5, 6]}
        return 200, {"choices": [choice], "prompt_token_ids": [1, 2], "usage": None}

    fake.respond = respond
    history = [
        {"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "1"},
    ]  # fmt: skip
    record = answers([fake.url], [job("x", messages=history)], token_ids=True)["x"].record()
    assert record["messages"][-1] == {
        "role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call],
    }  # fmt: skip
    assert (record["finish_reason"], record["token_ids"]) == ("tool_calls", [[5, 6]])
    assert record["prompt_hashes"] == [ids_hash([1, 2])]
    [(_, body, _)] = fake.asked
    assert body["return_token_ids"] is True
    assert body["messages"][1] == {"role": "assistant", "content": "", "tool_calls": [call]}


def until(true: Callable[[], bool]) -> None:
    """Waits for something that should come soon; gives up in silence."""
    deadline = time.monotonic() + 5
    while not true() and time.monotonic() < deadline:
        time.sleep(0.001)


def test_all_servers_work_each_at_its_limit(fakes: Callable[[], Fake]) -> None:
    """As many requests at a time as allowed, at every server, and no more."""
    both = [fakes(), fakes()]
    for fake in both:
        fake.respond = lambda body, fake=fake: (until(lambda: fake.most >= 4), fake.answer(body))[1]  # type: ignore[misc]
    ended = answers([fake.url for fake in both], jobs(60), concurrency=4)
    assert {name: content(one) for name, one in ended.items()} == {str(i): f"Q {i}" for i in range(60)}
    assert [fake.most for fake in both] == [4, 4]
    assert all(fake.connections <= 4 + 1 for fake in both)  # kept between requests


# ---------------------------------------------------------------------------------------------------- what may fail


def failing_at_first(fake: Fake, times: int, reply: Reply) -> None:
    """The first requests get this reply."""
    left = [times]

    def respond(body: dict[str, Any]) -> Reply:
        left[0] -= 1
        return reply if left[0] >= 0 else fake.answer(body)

    fake.respond = respond


@pytest.mark.parametrize("reply", [(500, {"error": {"message": "boom"}}), (429, {}), (503, b"<html>"), (200, None)])
def test_what_may_pass_is_tried_again(fake: Fake, reply: Reply) -> None:
    """Errors of the server, too many requests, connections that end: every prompt is answered in the end."""
    failing_at_first(fake, 5, reply)
    ended = answers([fake.url], jobs(12), concurrency=3)
    assert sorted(map(content, ended.values())) == sorted(f"Q {i}" for i in range(12))


def test_a_server_that_asks_to_wait_is_left_alone(fake: Fake) -> None:
    """Retry-After, though the usual pause is shorter."""
    fake.headers = {"Retry-After": "1"}
    failing_at_first(fake, 1, (429, {}))
    started = time.monotonic()
    answers([fake.url], jobs(1))
    assert time.monotonic() - started >= 1


def test_a_kept_connection_that_was_closed_costs_no_attempt(fake: Fake) -> None:
    """The server closes after every answer; nothing counts as a failure."""
    fake.close = True
    ended = answers([fake.url], jobs(6), concurrency=1, retries=0)
    assert sorted(map(content, ended.values())) == sorted(f"Q {i}" for i in range(6))


def test_one_dead_server_loses_nothing(fakes: Callable[[], Fake]) -> None:
    """What it was given goes to the other one, from the start or after some answers."""
    alive, dead, dying = fakes(), fakes(), fakes()
    dead.stop()
    failing_at_first(dying, 10**6, (200, None))
    urls = [dead.url, dying.url, alive.url]
    ended = answers(urls, jobs(40), concurrency=2, retries=50)
    assert sorted(map(content, ended.values())) == sorted(f"Q {i}" for i in range(40))


def test_a_refused_prompt_fails_alone(fake: Fake) -> None:
    """At once, with the server's words."""
    refusal = {"error": {"message": "context too long"}}
    fake.respond = lambda body: (400, refusal) if "q 1" in str(body["messages"]) else fake.answer(body)
    ended = answers([fake.url], jobs(3))
    failure = ended["1"].failure
    assert failure is not None
    assert (failure.reason, failure.detail.split(": ")[-1]) == ("a request that the server refuses", "context too long")
    assert [content(ended[name]) for name in ("0", "2")] == ["Q 0", "Q 2"]
    assert len(fake.asked) == 3


def choice(content: str, reason: str) -> dict[str, Any]:
    return {"choices": [{"message": {"content": content}, "finish_reason": reason}]}


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ({"choices": []}, "a reply that is not in OpenAI's shape"),
        ({"answer": "x"}, "a reply that is not in OpenAI's shape"),
        ([], "a reply that is not in OpenAI's shape"),
        (choice(" ", "stop"), "empty answer"),
        (choice("x", "content_filter"), "finish_reason content_filter"),
        (b"not json", "a request that the server refuses"),
    ],
)  # fmt: skip
def test_replies_that_are_no_answers(fake: Fake, reply: Any, reason: str) -> None:
    """Counted under a reason; the others are answered."""
    fake.respond = lambda body: (200, reply) if "q 1" in str(body["messages"]) else fake.answer(body)
    ended = answers([fake.url], jobs(2))
    failure = ended["1"].failure
    assert failure is not None
    assert failure.reason == reason
    assert content(ended["0"]) == "Q 0"


def test_a_server_that_is_too_slow(fake: Fake) -> None:
    """No answer within the timeout is a failure that is tried again; then the prompt is given up."""
    fake.respond = lambda body: (time.sleep(0.5), fake.answer(body))[1]
    ended = answers([fake.url], jobs(1), timeout=0.05, retries=1)
    failure = ended["0"].failure
    assert failure is not None
    assert failure.reason == FAILED
    assert "no answer in time" in failure.detail
    assert len(fake.asked) == 2


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_wrong_key_or_model_ends_the_run(fake: Fake, status: int) -> None:
    """It is wrong for every prompt. The key itself is not shown."""
    fake.respond = lambda _: (status, {"error": {"message": "no"}})
    with pytest.raises(OptionError, match=rf"^--url: .*HTTP {status}: no .*--api-key") as caught:
        answers([fake.url], jobs(50), key="secret")
    assert "secret" not in str(caught.value)


def test_a_run_ends_when_nothing_is_answered_any_more(fake: Fake) -> None:
    """Every request fails, again and again: the remaining prompts are not burnt."""
    fake.respond = lambda _: (500, {"error": {"message": "out of memory"}})
    with pytest.raises(OptionError, match=r"^--url: the last 8 conversations got no answer .*out of memory"):
        answers([fake.url], jobs(200), retries=0, concurrency=2)


def test_a_run_ends_when_no_server_can_be_reached(fakes: Callable[[], Fake], monkeypatch: pytest.MonkeyPatch) -> None:
    """After some patience, in which a server may come back; no prompt is given up for it."""
    monkeypatch.setattr(server_answers, "PATIENCE", 0.6)
    dead = fakes()
    dead.stop()
    with pytest.raises(OptionError, match=r"^--url: no server could be reached for 1 s .*refused"):
        answers([dead.url], jobs(5), retries=3)


def test_an_interrupted_run_does_not_wait_for_servers(fake: Fake) -> None:
    """Leaving the iteration returns at once, though requests are on their way."""
    fake.respond = lambda body: (time.sleep(0.0 if "q 0" in str(body) else 2.0), fake.answer(body))[1]
    run = ServerAnswers([Server(fake.url, None, 10.0)], "tiny", {}, concurrency=16, retries=0).run(iter(jobs(20)))
    assert next(run).id == "0"
    started = time.monotonic()
    run.close()
    assert time.monotonic() - started < 1


# --------------------------------------------------------------------------------------------------- before it begins


def test_the_model_is_the_one_named_or_the_only_one(fakes: Callable[[], Fake]) -> None:
    """On every server."""
    one, two = Server(fakes().url, None, 5.0), fakes()
    two.models = ["tiny", "other"]
    both = [one, Server(two.url, None, 5.0)]
    assert the_model([one], None) == the_model(both, None) == the_model(both, "tiny") == "tiny"
    with pytest.raises(OptionError, match=r"--model: .* has no 'other', it has tiny"):
        the_model(both, "other")
    with pytest.raises(OptionError, match=r"--model: .* has tiny, other"):
        the_model(both[1:], None)


def test_a_server_that_is_not_there_is_told_at_once(fakes: Callable[[], Fake]) -> None:
    """Before any prompt is asked; so is a URL that is none."""
    dead = fakes()
    dead.stop()
    with pytest.raises(OptionError, match=rf"^--url: {dead.url}: .*refused"):
        the_model([Server(dead.url, None, 5.0)], None)
    for url in ("localhost:8000", "ftp://x", "http://", "http://user:pw@x", "http://x/v1?a=b"):
        with pytest.raises(OptionError, match="--url: must be like http"):
            Server(url, None, 5.0)
