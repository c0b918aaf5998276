"""The server as users run it: a process of its own on a socket, spoken to by OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest

from forerun.engine import Engine
from forerun.errors import ModelError
from forerun.serve import ServeOptions, serve
from serve.kit import seen
from serve.traffic import Judge, Plan, behaving, plans, references
from serve.wire import Wire

KEY = "secret-key"
SEATS = ("--max-num-seqs", "4", "--enable-log-requests")
"""So that others wait, and that the log tells who was let in."""
METHODS = [None, None, False, {"max_draft": 1}]


@dataclass
class Process:
    """A running `forerun serve`."""

    process: subprocess.Popen[str]
    url: str
    log: Path

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)


def start(model: str, log: Path, *flags: str) -> Process:
    """Starts it and waits until it is ready."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FORERUN_API_KEY": KEY}
    command = [sys.executable, "-m", "forerun", "serve", model, "--port", "0", *flags]
    with log.open("w") as file:
        process = subprocess.Popen(command, stderr=file, stdout=subprocess.DEVNULL, text=True, env=environment)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        found = re.search(r"listening at (http://[\d.:]+)", log.read_text())
        if found and _status(f"{found[1]}/health") == 200:
            return Process(process, found[1], log)
        assert process.poll() is None, log.read_text()
        time.sleep(0.1)
    process.kill()
    raise AssertionError(log.read_text())


def _status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, tiny_qwen3_dir: Path, tiny_small_dir: Path) -> Iterator[Process]:
    log = tmp_path_factory.mktemp("serve") / "log"
    config = json.dumps({"method": "small", "model": str(tiny_small_dir), "num_speculative_tokens": 3})
    template = "{# tools #}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    more = ("--served-model-name", "tiny", "--speculative-config", config, "--chat-template", template, *SEATS)
    process = start(str(tiny_qwen3_dir), log, *more)
    yield process
    if process.process.poll() is None:
        process.stop()


@pytest.fixture
def client(served: Process) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def test_the_openai_client_reads_whole_answers(client):
    """Chat, completion, models: every field where the library expects it."""
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    messages = [{"role": "user", "content": "hello"}]
    chat = client.chat.completions.create(
        model="tiny", messages=messages, temperature=0, max_completion_tokens=8, logprobs=True, top_logprobs=2, n=2
    )
    assert len(chat.choices) == 2
    assert chat.choices[0].message.role == "assistant"
    assert chat.usage.completion_tokens == sum(len(c.logprobs.content) for c in chat.choices)
    assert len(chat.choices[0].logprobs.content[0].top_logprobs) >= 2
    completion = client.completions.create(model="tiny", prompt="def area(", max_tokens=6, temperature=0, echo=True)
    assert completion.choices[0].text.startswith("def area(")
    assert completion.usage.prompt_tokens == 9


def test_server_info_tells_where_it_listens(served):
    """The port that was free, too."""
    request = urllib.request.Request(f"{served.url}/server_info", headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        options = json.load(answer)["options"]
    assert served.url == f"http://{options['host']}:{options['port']}"


def test_the_openai_client_reads_streams(client):
    """The pieces add up to the whole; usage comes last."""
    messages = [{"role": "user", "content": "hello"}]
    fields = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 12}
    whole = client.chat.completions.create(**fields)
    chunks = list(client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    parts = client.completions.create(model="tiny", prompt="abc", max_tokens=6, temperature=0, stream=True)
    text = client.completions.create(model="tiny", prompt="abc", max_tokens=6, temperature=0).choices[0].text
    assert "".join(part.choices[0].text for part in parts) == text


def test_the_openai_client_passes_our_own_fields_and_reads_our_own_answers(client):
    """extra_body: speculative and verify_mode; the same text with and without drafts; metrics at the root."""
    fields = {"model": "tiny", "prompt": "abcabc", "max_tokens": 20, "seed": 3, "temperature": 0.8}
    extra = {"verify_mode": "coupled"}
    drafted = client.completions.create(**fields, extra_body=extra)
    plain = client.completions.create(**fields, extra_body={**extra, "speculative": False})
    assert drafted.choices[0].text == plain.choices[0].text
    assert drafted.model_extra["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0
    assert plain.model_extra["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0


def test_the_openai_client_raises_its_own_errors(client, served):
    """A bad field, an unknown model, a wrong key: the classes that programs catch, with code and param."""
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="tiny", prompt="a", extra_body={"temprature": 1})
    assert (bad.value.param, bad.value.code) == ("temprature", "unknown_parameter")
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-5", prompt="a")
    stranger = openai.OpenAI(base_url=f"{served.url}/v1", api_key="wrong", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()


def test_the_openai_client_gets_tools_and_json(client):
    """response_format of the library's own kind."""
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    chat = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "json"}],
        max_tokens=100,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
    )
    if chat.choices[0].finish_reason == "stop":
        assert json.loads(chat.choices[0].message.content)["a"] in (1, 2)


class Weather(pydantic.BaseModel):
    """Of a place."""

    x: Literal["a", "b"]


def test_the_openai_client_parses_what_classes_describe(served):
    """Tools and forms made of Python classes, whole and streamed, by the library's own helpers."""

    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=KEY, max_retries=0) as client:
            asked = {"model": "tiny", "messages": [{"role": "user", "content": "go"}], "seed": 1, "max_tokens": 200}
            asked |= {"tools": [openai.pydantic_function_tool(Weather)], "tool_choice": "required"}
            called = await client.chat.completions.parse(**asked, parallel_tool_calls=False)
            async with client.chat.completions.stream(**asked, parallel_tool_calls=False) as stream:
                kinds = [event.type async for event in stream]
                streamed = await stream.get_final_completion()
            formed = await client.chat.completions.parse(**{**asked, "tool_choice": "none"}, response_format=Weather)
        assert "tool_calls.function.arguments.done" in kinds
        for answer in (called, streamed):
            [call] = answer.choices[0].message.tool_calls
            assert isinstance(call.function.parsed_arguments, Weather)
        assert isinstance(formed.choices[0].message.parsed, Weather)

    asyncio.run(main())


def test_the_async_client_in_parallel(served):
    """Twenty at once, whole and streamed: each gets its own answer, those of one prompt are equal."""

    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=KEY, max_retries=0) as client:

            async def one(number: int) -> str:
                fields = {"model": "tiny", "prompt": "ab" * (number % 3 + 1), "max_tokens": 15, "temperature": 0}
                if number % 2:
                    done = await client.completions.create(**fields)
                    return done.choices[0].text
                parts = await client.completions.create(**fields, stream=True)
                return "".join([part.choices[0].text async for part in parts])

            texts = await asyncio.gather(*(one(number) for number in range(20)))
            for number in range(20):
                assert texts[number] == texts[number % 3]

    asyncio.run(main())


def test_a_connection_that_breaks_off_frees_its_request(served):
    """A client that closes its socket in the middle of a stream: the server counts an abort and goes on."""
    host, port = served.url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": "a", "max_tokens": 240, "temperature": 0, "stream": True, "ignore_eos": True}).encode()
    lines = ["POST /v1/completions HTTP/1.1", "Host: x", f"Authorization: Bearer {KEY}", f"Content-Length: {len(body)}"]
    head = "\r\n".join([*lines, "", ""])
    before = _aborted(served)
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + body)
        assert b"200 OK" in connection.recv(100)
    deadline = time.monotonic() + 20
    # It is counted as soon as the client is gone, and leaves the engine behind the step that runs.
    while (_aborted(served) == before or _gauge(served, "num_requests_running")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _aborted(served) == before + 1
    assert _gauge(served, "num_requests_running") == 0


def _page(served: Process) -> str:
    request = urllib.request.Request(f"{served.url}/metrics", headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.read().decode()


def _aborted(served: Process) -> float:
    lines = [line for line in _page(served).splitlines() if "request_success_total{" in line and '"abort"' in line]
    return float(lines[0].split()[-1]) if lines else 0.0


def _gauge(served: Process, name: str) -> float:
    [line] = [line for line in _page(served).splitlines() if line.startswith(f"forerun:{name}{{")]
    return float(line.split()[-1])


@dataclass
class Crowd:
    """Clients of a server that is told to stop while some are answered and others wait.

    Args:
        served: the server.
        made: what they send.
        judge: of what comes.
        signal: that it gets.
    """

    served: Process
    made: list[Plan]
    judge: Judge
    signal: int
    limit: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(24))
    calls: dict[int, Wire] = field(default_factory=dict)
    """Those under way."""
    done: int = 0
    begun: set[int] = field(default_factory=set)
    """Those whose answers had begun at the signal."""
    let_in: set[int] = field(default_factory=set)
    """Those that were let in, early or late, as the log says."""
    ends: dict[int, str] = field(default_factory=dict)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._stop())
            for plan in self.made:
                group.create_task(self._one(plan))

    async def _one(self, plan: Plan) -> None:
        async with self.limit:
            call = self.calls[plan.number] = _wire(self.served, plan)
            reply = await asyncio.wait_for(behaving(plan, call), 120)
            del self.calls[plan.number]
        self.done += 1
        unreached = reply.status == 0 and self.begun and plan.conduct not in ("leaves", "cut")
        self.ends[plan.number] = "unreached" if unreached else self.judge.judge(plan, reply)

    async def _stop(self) -> None:
        """Once some are done, some run and some wait."""
        while self.done < len(self.made) // 3 or not await self._waiting() or not self._begun():
            assert self.done < len(self.made), "none of them ever waited"
            await asyncio.sleep(0.01)
        self.begun = self._begun()
        self.served.process.send_signal(self.signal)

    def _begun(self) -> set[int]:
        return {number for number, call in self.calls.items() if call.reply.parts}

    async def _waiting(self) -> float:
        return await asyncio.to_thread(_gauge, self.served, "num_requests_waiting")


def _wire(served: Process, plan: Plan) -> Wire:
    return Wire(served.url, plan.path, plan.content, {**plan.headers, "authorization": f"Bearer {KEY}"})


async def _right(served: Process, asked: dict[str, Plan]) -> dict[str, dict[str, Any]]:
    """The answers of plain decoding."""
    replies = await asyncio.gather(*(_wire(served, plan).run() for plan in asked.values()))
    return {key: seen(reply, plan.fields, False) for (key, plan), reply in zip(asked.items(), replies, strict=True)}


def _stopped(served: Process, size: int, number: int) -> Crowd:
    """Tells it to stop in the middle of a crowd: all of them end as they should, and the process with 0."""
    made = [plan for plan in plans(size, METHODS) if plan.conduct != "huge"]
    try:
        want = asyncio.run(_right(served, references(made)))
        crowd = Crowd(served, made, Judge(want, tolerance=1e-4), number)
        asyncio.run(crowd.run())
        assert served.process.wait(90) == 0, served.log.read_text()
    finally:
        served.process.kill()  # if it has not ended
    log = served.log.read_text()
    print(f"sent {dict(crowd.judge.sent)}\ncame {Counter(crowd.ends.values())}")
    assert "stopping" in log
    assert "Traceback" not in log
    crowd.let_in = {plan.number for plan in made if f"request {plan.id}:" in log}
    print(f"of those let in {Counter(crowd.ends[number] for number in crowd.let_in)}")
    assert "unreached" not in {crowd.ends[number] for number in crowd.let_in}
    return crowd


def _all_were_finished(crowd: Crowd) -> None:
    """Who was let in had the whole answer; who came too late was told, or found no server."""
    assert {crowd.ends[number] for number in crowd.begun | crowd.let_in} <= {"whole", "left", "refused"}
    assert {*crowd.ends.values()} <= {"whole", "left", "refused", "closed", "unreached"}


def test_sigterm_drains(served):
    """The last test of this server: what runs or waits is finished, streamed or whole, then the process ends with 0."""
    _all_were_finished(_stopped(served, 40, signal.SIGTERM))


@pytest.mark.slow
def test_sigint_drains(tmp_path, tiny_qwen3_dir):
    """Ctrl-C does the same."""
    _all_were_finished(_stopped(start(str(tiny_qwen3_dir), tmp_path / "log", *SEATS), 60, signal.SIGINT))


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [60, 1])
def test_sigterm_under_load(tmp_path, seconds):
    """The shipped model with two drafters: with time to drain all are finished; without, each is told what happened.
    In float32: in bfloat16 a prompt that is read in other pieces has log-probabilities that differ by more than 1e-4.
    """
    template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    flags = ("--drafter", "small,ngram", "--chat-template", template, "--drain-timeout", str(seconds), *SEATS)
    flags += ("--dtype", "float32")
    crowd = _stopped(start("embedded", tmp_path / "log", *flags), 300, signal.SIGTERM)
    if seconds == 60:
        _all_were_finished(crowd)
    else:
        assert {*crowd.ends.values()} <= {"whole", "left", "refused", "closed", "unreached", "broken"}


def test_a_model_that_cannot_be_loaded_ends_the_server():
    """What loading raised is raised, not a server that answers 503 forever; the address was told before."""
    said: list[str] = []

    def load() -> Engine:
        raise ModelError("--target: there is no such model")

    with pytest.raises(ModelError, match="no such model"):
        serve(load, ServeOptions(drain_timeout=math.inf), port=0, listening=said.append)
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+", said[0])


def test_a_stop_does_not_wait_for_the_model():
    """Told to stop while it loads, it says that a thread is still at it: nothing but the end of the process ends one
    that reads weights, and Python would wait for it.
    """
    release = threading.Event()

    def load() -> Engine:
        os.kill(os.getpid(), signal.SIGTERM)
        release.wait(30)
        raise ModelError("it was not waited for")

    try:
        assert serve(load, ServeOptions(), port=0) is True
        assert not release.is_set()
    finally:
        release.set()


@pytest.mark.slow
def test_schemathesis_finds_no_5xx(tmp_path, tiny_qwen3_dir):
    """Requests made of the OpenAPI document, right and wrong ones: never a 5xx, statuses and bodies as documented."""
    process = start(str(tiny_qwen3_dir), tmp_path / "log", "--max-model-len", "64")
    command = [
        str(Path(sys.executable).parent / "schemathesis"), "run", f"{process.url}/openapi.json",
        "--header", f"Authorization: Bearer {KEY}", "--checks", "not_a_server_error,response_schema_conformance",
        "--max-examples", "60", "--request-timeout", "20", "--seed", "1",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, cwd=tmp_path)
    process.stop()
    assert done.returncode == 0, done.stdout[-4000:]
