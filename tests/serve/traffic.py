"""Requests of every kind, right and wrong, and what must come of each: over any transport, against any server."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from serve.kit import Reply, difference, joined, seen

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
JSON = "application/json"
LONG = 32
"""Tokens of the longer answers."""

PROMPTS = ["abcab", "xyxy 12", *(f"a beginning that several have in common, then {end}" for end in ("ab", "xy"))]
LAWS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "verify_mode": "coupled"},
    {"temperature": 0.9, "seed": 7, "verify_mode": "coupled"},
    {"temperature": 0.9, "seed": 8, "verify_mode": "coupled"},
    {"temperature": 0.9, "verify_mode": "rejection"},
]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"n": 2},
    {"stop": ["ac", "by", "~ 1", "dex"]},
    {"stop": ["cx", "zz", "a a"], "include_stop_str_in_output": True, "n": 2},
    {"stop": ["ac", "by"], "logprobs": 1, "min_tokens": 5},
    {"logprobs": 2},
    {"echo": True},
    {"echo": True, "logprobs": 1},
    {"prompt": PROMPTS[:2]},
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"regex": "[ab]{2,9}"}},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    {"top_k": 3, "top_p": 0.9, "logit_bias": {"101": 2.0}, "bad_words": ["bc"]},
]
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"temperatur": 1}, "temperatur"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"n": "x"}, "n"),
    ({"stop": [""]}, "stop[0]"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ({"speculative": {"method": "nobody"}}, "speculative.method"),
]
"""Fields, and the one that the error must name."""
BROKEN: list[tuple[bytes, str]] = [
    (b"", JSON),
    (b"\x00\xff\xfe{]", JSON),
    (b'{"prompt": "a", "max_tok', JSON),
    (b'{"prompt": "\xff"}', JSON),
    (b'{"prompt": "a", "temperature": NaN}', JSON),
    (b"[" * 50_000, JSON),
    (b'{"a":' * 20_000, JSON),
    (b"prompt=a&max_tokens=3", "application/x-www-form-urlencoded"),
    (b'--x\r\ncontent-disposition: form-data; name="prompt"\r\n\r\na\r\n--x--', "multipart/form-data; boundary=x"),
]
"""Bodies that are no JSON, and what they say they are."""
KINDS = {
    400: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "unavailable_error",
}
"""Status of an error -> its type. No other status is an answer to what is sent here."""


@dataclass(frozen=True)
class Plan:
    """One request, and how its client behaves."""

    number: int
    conduct: str
    """stays, slow, leaves, cut, malformed, huge or too long."""
    path: str
    fields: dict[str, Any]
    """Without `stream` and `speculative`, of which no token depends."""
    stream: bool
    speculative: Any
    raw: tuple[bytes, str] | None = None
    """A body that is no JSON, and its content type."""
    param: str | None = None
    """What the error is about, where one must come."""
    moment: float = 0.0
    """When its client leaves: in [0, 1)."""

    @property
    def content(self) -> bytes:
        if self.raw is not None:
            return self.raw[0]
        more: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if self.stream else {}
        if self.speculative is not None:
            more["speculative"] = self.speculative
        return json.dumps({**more, **self.fields}).encode()

    @property
    def headers(self) -> dict[str, str]:
        return {"content-type": JSON if self.raw is None else self.raw[1], "x-request-id": self.id}

    @property
    def id(self) -> str:
        """Under which it is served."""
        return f"plan.{self.number}"

    @property
    def determined(self) -> bool:
        """Whether its tokens are those of plain decoding, and not only of the same law."""
        return self.fields["temperature"] == 0 or self.fields.get("verify_mode") == "coupled"

    @property
    def key(self) -> str:
        return json.dumps([self.path, self.fields])


def plans(size: int, methods: Sequence[Any], seed: int = 11) -> list[Plan]:
    """Of 100 requests 20 are left at a random point, 10 are malformed, 5 too long, 5 read slowly; in random order."""
    rng = random.Random(seed)
    shares = {"leaves": 19, "cut": 1, "malformed": 9, "huge": 1, "too long": 5, "slow": 5, "stays": 60}
    conducts = [conduct for conduct, share in shares.items() for _ in range(-(-share * size // 100))][:size]
    rng.shuffle(conducts)
    return [_plan(number, conduct, methods, rng) for number, conduct in enumerate(conducts)]


def _plan(number: int, conduct: str, methods: Sequence[Any], rng: random.Random) -> Plan:
    # In turn, not by chance: the fewest requests have every option under every law.
    option, law = OPTIONS[number % len(OPTIONS)], LAWS[number // 2 % len(LAWS)]
    fields = {"prompt": rng.choice(PROMPTS), "max_tokens": rng.choice([12, LONG, LONG]), **law, **option}
    path = COMPLETIONS
    if "echo" not in fields and isinstance(fields["prompt"], str) and rng.random() < 0.5:
        path, fields = CHAT, _as_chat(fields)
    if rng.random() < 0.7:
        fields["return_token_ids"] = True
    made = Plan(number, conduct, path, fields, rng.random() < 0.6, rng.choice(methods), moment=rng.random())
    if conduct == "malformed" and rng.random() < 0.5:
        return replace(made, raw=BROKEN[number % len(BROKEN)])
    if conduct == "malformed":
        wrong, param = rng.choice(WRONG)
        return replace(made, fields={**fields, **wrong}, param=param)
    if conduct == "huge":
        return replace(made, raw=(b" " * (3 << 20), JSON))
    if conduct == "too long":
        more = rng.choice([{"max_tokens": 50_000}, _of(path, "z" * 60_000)])
        return replace(made, fields={**fields, **more}, param="messages" if path == CHAT else "prompt")
    return made


def _of(path: str, text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}


def _as_chat(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The same question to the other endpoint, which says some things in another way."""
    made = {name: value for name, value in fields.items() if name not in ("prompt", "logprobs")}
    if "logprobs" in fields:
        made |= {"logprobs": True, "top_logprobs": fields["logprobs"]}
    return {**_of(CHAT, fields["prompt"]), **made}


def references(made: Sequence[Plan]) -> dict[str, Plan]:
    """For each different question with one right answer the request for it: whole, undrafted, with the ids."""
    asked = {}
    for plan in made:
        if plan.raw is None and plan.param is None and plan.determined:
            fields = {**plan.fields, "return_token_ids": True}
            whole = {"conduct": "stays", "stream": False, "speculative": False}
            asked[plan.key] = replace(plan, number=-1 - plan.number, fields=fields, **whole)
    return asked


class Sending(Protocol):
    """A request that has not been sent yet: `Call` or `Wire`."""

    reply: Reply
    cut: bool
    reads: Callable[[], Coroutine[Any, Any, None]] | None

    def leave(self) -> None: ...

    async def run(self) -> Reply: ...


async def behaving(plan: Plan, call: Sending) -> Reply:
    """Sends it as its client does, who waits, reads slowly, or leaves: before all is sent, before the first byte, in
    the middle, behind the last."""
    leaves = plan.conduct == "leaves"
    if plan.conduct == "slow":
        call.reads = partial(asyncio.sleep, 0.02)
    if leaves and plan.stream and plan.moment > 0.3:
        call.reads = partial(_leave_at, call, int(plan.moment * 30) - 8)
        return await call.run()
    call.cut = plan.conduct == "cut"
    running = asyncio.ensure_future(call.run())
    if leaves or call.cut:
        await asyncio.sleep(max(0.0, plan.moment - 0.1) * 0.4)
        call.leave()
    return await running


async def _leave_at(call: Sending, part: int) -> None:
    if len(call.reply.parts) == part:
        call.leave()


@dataclass
class Judge:
    """Says what became of a request; one that is neither whole nor a clear error is an AssertionError.

    Args:
        want: right answers by `Plan.key`, as `seen` gives them.
        decode: text of ids; None: not compared.
        tolerance: by how much log-probabilities may differ.
    """

    want: Mapping[str, Mapping[str, Any]]
    decode: Callable[[Sequence[int]], str] | None = None
    tolerance: float = 0.0
    ends: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)

    def judge(self, plan: Plan, reply: Reply) -> str:
        """whole, refused, busy, closed, failed (with a status), broken (an error ends the stream), left."""
        try:
            end = self._end(plan, reply)
        except Exception as error:
            raise AssertionError(f"{plan}\n{reply.status} {reply.headers}\n{reply.body[-2000:]!r}") from error
        self.sent[f"{plan.conduct}, {'streamed' if plan.stream else 'whole'}"] += 1
        self.ends[end] += 1
        return end

    def _end(self, plan: Plan, reply: Reply) -> str:
        if plan.conduct in ("leaves", "cut") and not reply.whole:
            self._holds_so_far(plan, reply)
            return "left"
        assert reply.whole, "it was cut, or answered twice"
        assert reply.headers["x-request-id"] == plan.id
        if reply.status != 200:
            return self._refused(plan, reply)
        assert plan.raw is None
        assert plan.param is None
        if plan.stream and (error := _last_error(reply)) is not None:
            self._holds_so_far(plan, reply)
            assert error["type"] in (KINDS[500], KINDS[503])
            return "broken"
        self._holds(plan, reply)
        return "whole"

    def _refused(self, plan: Plan, reply: Reply) -> str:
        error = reply.error
        assert error["type"] == KINDS[reply.status]
        assert error["message"]
        assert "purpose" not in error["message"], "the text of an exception may hold parts of a prompt"
        if reply.status == 429:
            assert int(reply.headers["retry-after"]) > 0
            return "busy"
        if reply.status == 503:
            assert "shutting down" in error["message"]
            return "closed"
        if reply.status == 500:
            assert plan.raw is None
            assert plan.param is None
            return "failed"
        assert reply.status == (413 if plan.conduct == "huge" else 400)
        assert plan.conduct in ("malformed", "huge", "too long", "cut")
        assert error["param"] == plan.param
        if plan.conduct == "too long":
            assert error["code"] == "context_length_exceeded"
        return "refused"

    def _holds(self, plan: Plan, reply: Reply) -> None:
        """A whole answer agrees with itself and, where there is one right answer, with that."""
        answer = seen(reply, plan.fields, plan.stream)
        if plan.stream:
            _in_order(reply.events)
        if plan.fields.get("return_token_ids"):
            _counts(plan, answer)
            self._texts(plan, answer)
        _formed(plan, answer)
        want = self.want.get(plan.key)
        if want is not None:
            given = {name for name in want if name != "seed" or "seed" in plan.fields}
            given -= set() if plan.fields.get("return_token_ids") else {"ids"}
            two = ({name: one[name] for name in given} for one in (answer, want))
            said = difference(*two, self.tolerance)
            assert not said, said

    def _texts(self, plan: Plan, answer: Mapping[str, Any]) -> None:
        """No token is lost or shown twice: the text is that of the ids, up to what ended it."""
        if self.decode is None:
            return
        for index, (shown, ids) in enumerate(zip(answer["texts"], answer["ids"], strict=True)):
            echoed = _echoed(plan, index)
            assert shown.startswith(echoed)
            text = shown[len(echoed) :]
            full, stop = self.decode(ids or []), answer["stop_reason"][index]
            if not isinstance(stop, str):
                assert text == full
            elif plan.fields.get("include_stop_str_in_output"):
                assert text.endswith(stop)
                assert full.startswith(text)
            else:
                assert full.startswith(text + stop)

    def _holds_so_far(self, plan: Plan, reply: Reply) -> None:
        """What has come of an answer that was not waited for, or that broke, is the beginning of a right one."""
        if not plan.stream or reply.status != 200:
            return
        events = [event for event in _complete_events(reply) if "choices" in event]
        for index in {choice["index"] for event in events for choice in event["choices"]}:
            had = joined(events, index)
            text, ids = had["content"] if plan.path == CHAT else had["text"], had["token_ids"]
            if self.decode is not None and ids and not had["stop_reason"]:
                assert self.decode(ids).startswith(text[len(_echoed(plan, index)) :])
            if plan.key in self.want:
                want = {name: values[index] for name, values in self.want[plan.key].items() if name != "usage"}
                assert want["texts"].startswith(text)
                assert (want["ids"] or [])[: len(ids)] == ids
                assert difference(had["logprobs"], _first(want["logprobs"], had["logprobs"]), self.tolerance) == ""
                assert had["finish_reason"] in (None, want["finish_reason"])


def _echoed(plan: Plan, index: int) -> str:
    """The text that a choice repeats in front of its own."""
    if not plan.fields.get("echo"):
        return ""
    prompt = plan.fields["prompt"]
    return prompt if isinstance(prompt, str) else prompt[index // plan.fields.get("n", 1)]


def _last_error(reply: Reply) -> dict[str, Any] | None:
    """The error with which a stream ended, said as one."""
    last = list(_complete_events(reply))[-1]
    assert reply.body.endswith(b"data: [DONE]\n\n")
    error: dict[str, Any] | None = last.get("error")
    if error is not None:
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        assert "purpose" not in error["message"]
    return error


def _complete_events(reply: Reply) -> Iterator[dict[str, Any]]:
    """Those of a stream that may have been cut anywhere."""
    for line in reply.body.split(b"\n\n")[:-1]:
        if line != b"data: [DONE]" and not line.startswith(b":"):
            yield json.loads(line.removeprefix(b"data: "))


def _in_order(events: Sequence[Mapping[str, Any]]) -> None:
    """One answer, in which nothing comes of a choice behind its end, and usage at the end of all."""
    assert len({event["id"] for event in events}) == 1
    assert [event for event in events if not event["choices"]] == [events[-1]]
    ended: set[int] = set()
    for event in events:
        for choice in event["choices"]:
            assert choice["index"] not in ended
            if choice["finish_reason"] is not None:
                ended.add(choice["index"])


def _counts(plan: Plan, answer: Mapping[str, Any]) -> None:
    """Usage, ids and log-probabilities tell of the same tokens."""
    usage, most = answer["usage"], plan.fields["max_tokens"]
    sizes = [len(ids or []) for ids in answer["ids"]]
    assert usage["completion_tokens"] == sum(sizes)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    for size, reason, scores in zip(sizes, answer["finish_reason"], answer["logprobs"], strict=True):
        assert size == most if reason == "length" else (reason == "stop" and size <= most)
        assert (scores is not None) == ("logprobs" in plan.fields)
        if scores is not None:
            shown = len(scores["content"] if plan.path == CHAT else scores["tokens"])
            assert shown == size + (usage["prompt_tokens"] if plan.fields.get("echo") else 0)


def _formed(plan: Plan, answer: Mapping[str, Any]) -> None:
    """What ended by itself has the form that was asked for."""
    for text, reason in zip(answer["texts"], answer["finish_reason"], strict=True):
        if reason == "stop" and "response_format" in plan.fields:
            assert isinstance(json.loads(text), dict)
        if reason == "stop" and "structured_outputs" in plan.fields:
            assert re.fullmatch(plan.fields["structured_outputs"]["regex"], text)


def _first(scores: Any, had: Any) -> Any:
    """As many log-probabilities as were had."""
    if had is None:
        return None
    return {name: None if had[name] is None else items[: len(had[name])] for name, items in scores.items()}
