"""A server in this process without a socket: its event loop runs in a thread, requests go straight into the app."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Self

from engine.conftest import all_at_once, engine_of
from forerun.drafters.base import Drafter
from forerun.drafters.ngram import Ngram
from forerun.drafters.small import Small
from forerun.engine import Engine
from forerun.serve import ServeOptions, create_app
from forerun.serve.server import Server, until_ready
from forerun.target.table import ByteTokenizer, TableTarget, _hashed

VOCAB = 257
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a place.",
        "parameters": {
            "type": "object",
            "properties": {"x": {"enum": [1, 2]}},
            "required": ["x"],
            "additionalProperties": False,
        },
    },
}
TIME = {"type": "function", "function": {"name": "time"}}
"""Tools."""
PRINTABLE = range(32, 127)


def ascii_model(
    seed: int = 0,
    eos_level: int = 20,
    gap: float = 1.0,
    alphabet: Sequence[int] = PRINTABLE,
    memory: int | None = None,
    **options: Any,
) -> TableTarget:
    """Exact logits over bytes, a hash of the whole prefix: the letters of an alphabet so far apart, end-of-sequence
    among them at a fixed level (0: now and then, 20: hardly ever), every other byte far below.

    With a `memory` the order of the letters is a hash of so many last tokens, so that a text repeats itself; all of the
    prefix still moves each of them, by less than a gap.
    """
    letters = tuple(alphabet)

    def logits(prefix: Sequence[int]) -> Sequence[float]:
        return _ascii_row(tuple(prefix), seed, eos_level, gap, letters, memory)

    options = {"tokenizer": ByteTokenizer(), "eos_token_ids": [ByteTokenizer.EOS], "window": 400, **options}
    return TableTarget(logits, VOCAB, **options)


@lru_cache(maxsize=2048)  # plain, drafting and drafted for ask for the same rows
def _ascii_row(
    prefix: tuple[int, ...], seed: int, eos_level: int, gap: float, alphabet: tuple[int, ...], memory: int | None
) -> tuple[float, ...]:
    hashed = _hashed(prefix, f"ascii {seed}", VOCAB)
    order = hashed if memory is None else _hashed(prefix[-memory:], f"ascii {seed}", VOCAB)
    row = [byte - 600.0 for byte in range(VOCAB)]
    for level, byte in enumerate(sorted(alphabet, key=lambda b: (order[b], b))):
        row[byte] = -gap * (level if memory is None else level + hashed[byte] / 2**32)
    row[ByteTokenizer.EOS] = -eos_level - 0.5 + (hashed[256] % 7 == 0) * 3
    return tuple(row)


def script_model(text: str | bytes, **options: Any) -> TableTarget:
    """Greedily writes this text behind any prompt of one byte, then ends."""
    script = [*(text.encode() if isinstance(text, str) else text), ByteTokenizer.EOS]

    def logits(prefix: Sequence[int]) -> list[float]:
        row = [-10.0] * VOCAB
        row[script[min(len(prefix) - 1, len(script) - 1)]] = 0.0
        return row

    options = {"tokenizer": ByteTokenizer(), "eos_token_ids": [ByteTokenizer.EOS], "window": 400, **options}
    return TableTarget(logits, VOCAB, **options)


def guesses(text: str | bytes) -> Drafter:
    """A drafter that knows what `script_model` writes."""
    from forerun.drafters.fake import Oracle

    script = [*(text.encode() if isinstance(text, str) else text), ByteTokenizer.EOS]
    return Oracle({(first,): script for first in range(256)})


def engine(*drafters: Drafter, target: TableTarget | None = None, **options: Any) -> Engine:
    return engine_of(target or ascii_model(), *drafters, **options)


def noisy_engine(**options: Any) -> Engine:
    """Two drafters that are right now and then."""
    return engine(Ngram(prompt_lookup_min=1, prompt_lookup_max=3), Small(ascii_model(), VOCAB), **options)


@dataclass
class Reply:
    """An HTTP answer."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    parts: list[bytes] = field(default_factory=list)
    more: list[bool] = field(default_factory=list)
    """For each part whether it said that another follows."""
    starts: int = 0
    """How often it began."""

    @property
    def whole(self) -> bool:
        """Whether it began once and came to its end, behind which nothing was sent."""
        return self.starts == 1 and self.more == [*[True] * (len(self.parts) - 1), False]

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error of an answer that is one, with all of its fields."""
        found = self.json["error"]
        assert set(found) == {"message", "type", "param", "code"}, found
        return found

    @property
    def events(self) -> list[dict[str, Any]]:
        """The events of a stream that ended as it should."""
        assert self.status == 200, self.body
        assert self.headers["content-type"].startswith("text/event-stream")
        lines = self.body.decode().split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""], lines[-3:]
        kept = [line for line in lines[:-2] if not line.startswith(":")]
        assert all(line.startswith("data: ") and "\n" not in line for line in kept), kept
        return [json.loads(line.removeprefix("data: ")) for line in kept]


class Call:
    """One request into an ASGI app, under control: what its client reads, and when it leaves.

    `reads` is called before each part is taken; it may wait. `cut`: the body promises more than ever comes.
    """

    def __init__(self, app: Any, method: str, path: str, body: bytes, headers: dict[str, str]):
        self.reply = Reply()
        self._app = app
        self._body: list[bytes] = [body]
        self._left = asyncio.Event()
        self.cut = False
        self.reads: Callable[[], Coroutine[Any, Any, None]] | None = None
        path, _, query = path.partition("?")
        self._scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1",
            "method": method, "path": path, "raw_path": path.encode(), "query_string": query.encode(),
            "root_path": "", "scheme": "http", "server": ("test", 80), "client": ("test", 1),
            "headers": [(k.lower().encode(), v.encode("latin-1")) for k, v in headers.items()],
        }  # fmt: skip

    def leave(self) -> None:
        """The client goes away."""
        self._left.set()

    async def run(self) -> Reply:
        await self._app(self._scope, self._receive, self._send)
        return self.reply

    async def _receive(self) -> dict[str, Any]:
        if self._body:
            return {"type": "http.request", "body": self._body.pop(0), "more_body": bool(self._body) or self.cut}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.reply.starts += 1
            self.reply.status = message["status"]
            self.reply.headers = {k.decode(): v.decode("latin-1") for k, v in message.get("headers", ())}
            return
        if self.reads is not None:
            await self.reads()
        self.reply.parts.append(message.get("body", b""))
        self.reply.more.append(message.get("more_body", False))


class Site:
    """A running server.

    >>> with Site(engine) as site:
    ...     site.post("/v1/completions", {"prompt": "a"}).json
    """

    def __init__(self, make: Callable[[], Engine], **options: Any):
        self.app = create_app(make, ServeOptions(**{"disable_log_stats": True, **options}))
        self.server: Server = self.app.state.server
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._lifespan = self.app.router.lifespan_context(self.app)
        self.run(self._lifespan.__aenter__())
        self.run(until_ready(self.server))
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self._lifespan.__aexit__(None, None, None))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    @property
    def engine(self) -> Engine:
        return self.server.service.engine.engine

    def run(self, coroutine: Coroutine[Any, Any, Any], seconds: float = 60) -> Any:
        """Runs something in the server's event loop, but never hangs."""
        return asyncio.run_coroutine_threadsafe(asyncio.wait_for(coroutine, seconds), self._loop).result(seconds + 5)

    def call(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Call:
        """A request that has not been sent yet."""
        content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        return Call(self.app, method, path, content, {"content-type": "application/json", **(headers or {})})

    def get(self, path: str, **headers: str) -> Reply:
        return self.run(self.call("GET", path, headers=headers).run())

    def post(self, path: str, body: Any, **headers: str) -> Reply:
        return self.run(self.call("POST", path, body, headers).run())

    def complete(self, **fields: Any) -> dict[str, Any]:
        """A completion that is served."""
        reply = self.post("/v1/completions", fields)
        assert reply.status == 200, reply.body
        return reply.json

    def chat(self, **fields: Any) -> dict[str, Any]:
        """A chat that is served."""
        reply = self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], **fields})
        assert reply.status == 200, reply.body
        return reply.json

    def refused(self, path: str, body: Any, status: int = 400) -> dict[str, Any]:
        """The error of a request that is refused."""
        reply = self.post(path, body)
        assert reply.status == status, (reply.status, reply.body)
        return reply.error

    def together(self, calls: Sequence[Call]) -> list[Reply]:
        """Several requests at once."""

        async def all_of_them() -> list[Reply]:
            return list(await asyncio.gather(*(call.run() for call in calls)))

        return self.run(all_of_them())

    async def quiet(self) -> None:
        """Waits until nothing runs, and audits the engine on its own thread."""
        engine = self.server.service.engine
        while await engine.call(lambda: engine.engine.core.busy):
            await asyncio.sleep(0.002)
        await engine.call(engine.engine.audit)
        assert await engine.call(lambda: engine.engine.core.pool.used) == 0

    def settle(self) -> None:
        """Asserts that nothing is left behind."""
        self.run(self.quiet())
        assert self.server.service.gate.inside == 0

    def in_one_batch(self, calls: Sequence[Call]) -> list[Reply]:
        """Several requests, of which none begins before all are there: the engine's thread is held until then."""

        async def all_of_them() -> list[Reply]:
            async with all_at_once(self.server.service.engine, len(calls)):
                running = [asyncio.ensure_future(call.run()) for call in calls]
            return list(await asyncio.gather(*running))

        return self.run(all_of_them())

    def metric(self, name: str, **labels: str) -> float | None:
        """The value of a series on the page of /metrics, summed over the labels that are not given."""
        page = self.get("/metrics").body.decode()
        found = [_value(line, name, labels) for line in page.splitlines()]
        values = [value for value in found if value is not None]
        return sum(values) if values else None


def seen(reply: Reply, fields: Mapping[str, Any], stream: bool) -> dict[str, Any]:
    """What a client sees of all choices, streamed (with usage) or not."""
    assert reply.status == 200, reply.body
    prompt = fields.get("prompt")
    several = len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
    if stream:
        *events, last = reply.events
        choices = [joined(events, index) for index in range(several * fields.get("n", 1))]
        usage, texts = last["usage"], [choice["content" if "messages" in fields else "text"] for choice in choices]
    else:
        choices, usage = reply.json["choices"], reply.json["usage"]
        texts = [choice["message"]["content"] if "messages" in fields else choice["text"] for choice in choices]
    return {
        "usage": counted(usage),
        "texts": texts,
        "ids": [choice.get("token_ids") or None for choice in choices],
        **{name: [choice[name] for choice in choices] for name in ("finish_reason", "stop_reason", "logprobs", "seed")},
    }


def difference(found: Any, want: Any, tolerance: float = 0.0, where: str = "answer") -> str:
    """The first place where two documents differ, numbers that are no integers by more than a tolerance; "": none."""
    if isinstance(found, float) and isinstance(want, float):
        return "" if abs(found - want) <= tolerance else f"{where}: {found} and {want}"
    if isinstance(found, dict) and isinstance(want, dict) and found.keys() == want.keys():
        pairs = [(f"{where}.{name}", found[name], want[name]) for name in found]
    elif isinstance(found, list) and isinstance(want, list) and len(found) == len(want):
        pairs = [(f"{where}[{index}]", *pair) for index, pair in enumerate(zip(found, want, strict=True))]
    else:
        return "" if found == want else f"{where}: {found!r} and {want!r}"
    return next((said for place, *two in pairs if (said := difference(*two, tolerance, place))), "")


def counted(usage: dict[str, Any]) -> dict[str, Any]:
    """`usage` without what it owes to earlier requests: where tokens came from, not which there are."""
    return {name: value for name, value in usage.items() if name != "prompt_tokens_details"}


def _value(line: str, name: str, labels: dict[str, str]) -> float | None:
    series, _, value = line.rpartition(" ")
    own, _, rest = series.partition("{")
    fits = own == name and all(f'{label}="{wanted}"' in rest for label, wanted in labels.items())
    return float(value) if fits else None


def joined(events: Sequence[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """The choice that the events of a stream add up to."""
    ends = ("finish_reason", "stop_reason", "seed")
    choice: dict[str, Any] = {"index": index, "text": "", "content": "", "reasoning": "", "calls": [], "token_ids": []}
    choice |= dict.fromkeys(ends)
    entries: list[Any] = []
    for event in events:
        for part in event["choices"]:
            if part["index"] != index:
                continue
            delta = part.get("delta", {})
            choice["text"] += part.get("text", "")
            choice["content"] += delta.get("content") or ""
            choice["reasoning"] += delta.get("reasoning_content") or ""
            choice["calls"] += delta.get("tool_calls", [])
            choice["token_ids"] += part.get("token_ids", [])
            if part["logprobs"] is not None:
                entries.append(part["logprobs"])
            for name in ends:
                if part.get(name) is not None:
                    assert choice[name] is None, f"{name} came twice"
                    choice[name] = part[name]
    choice["logprobs"] = _joined_logprobs(entries)
    return choice


def _joined_logprobs(entries: list[dict[str, Any]]) -> Any:
    if not entries:
        return None
    return {
        name: None if entries[0][name] is None else [item for entry in entries for item in entry[name]]
        for name in entries[0]
    }


@contextmanager
def running(makes: Mapping[str, Callable[[], Engine]]) -> Iterator[dict[str, Site]]:
    """Several servers at once, by name; at the end each must be idle."""
    sites = {name: Site(make) for name, make in makes.items()}
    for site in sites.values():
        site.__enter__()
    yield sites
    for site in sites.values():
        site.settle()
        site.__exit__()
