"""Answers by OpenAI-compatible servers: a number of requests at a time to each, none lost while one is down."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

from forerun.errors import OptionError
from forerun.training.data.jobs import Answer, Job, seed_of
from forerun.training.data.records import ids_hash
from forerun.training.data.report import Dropped
from forerun.training.data.server import Server, ServerError

FAILED = "no answer from the server"
PATIENCE = 300.0
"""Seconds without any server that can be reached, after which a run ends; it can be gone on with."""


class ServerAnswers:
    """Answers of one model behind any number of URLs.

    Args:
        servers: each gets `concurrency` requests at a time; whichever is free takes the next conversation.
        model: as the servers name it.
        sampling: fields of every request, with their names in the API.
        concurrency: requests at a time, per server.
        retries: how often a turn is tried again, at whichever server is free.
        template_options: `chat_template_kwargs` of every request.
        token_ids: ask for the emitted ids (`return_token_ids`, which vLLM and forerun know).
    """

    def __init__(
        self,
        servers: Sequence[Server],
        model: str,
        sampling: Mapping[str, Any],
        *,
        concurrency: int,
        retries: int,
        template_options: Mapping[str, Any] | None = None,
        token_ids: bool = False,
    ):
        self.model = model
        self.sampling = dict(sampling)
        self._servers = servers
        self._options = dict(template_options or {})
        self._concurrency = concurrency
        self._retries = retries
        self._token_ids = token_ids
        self._waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._over: queue.SimpleQueue[Job | BaseException] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._last = ""

    def run(self, jobs: Iterator[Job]) -> Generator[Job]:
        """Jobs in the order in which they end.

        Raises:
            OptionError: a server refuses the key or the model; no server can be reached for `PATIENCE`, or none has
                answered for a whole round of conversations.
        """
        workers = [self._worker(server) for server in self._servers for _ in range(self._concurrency)]
        going = silent = 0
        try:
            while True:
                while going < 2 * len(workers) and (job := next(jobs, None)) is not None:
                    self._waiting.put(job)
                    going += 1
                if not going:
                    return
                ended = self._next()
                going -= 1
                failed = ended.failure is not None and ended.failure.reason == FAILED
                silent = silent + 1 if failed else 0
                yield ended
                if silent >= max(8, len(workers)):
                    assert ended.failure is not None
                    raise OptionError(
                        "--url", f"the last {silent} conversations got no answer ({ended.failure.detail})"
                    )
        finally:
            self._stop.set()

    def _next(self) -> Job:
        """The next job that ends."""
        since = time.monotonic()
        while True:
            try:
                ended = self._over.get(timeout=0.5)
            except queue.Empty:
                if not all(server.failing for server in self._servers):
                    since = time.monotonic()
                elif time.monotonic() - since > PATIENCE:
                    raise OptionError(
                        "--url", f"no server could be reached for {PATIENCE:.0f} s ({self._last})"
                    ) from None
                continue
            if isinstance(ended, BaseException):
                raise ended
            return ended

    def _worker(self, server: Server) -> threading.Thread:
        """A daemon: an interrupted run does not wait for answers that nobody reads any more."""
        thread = threading.Thread(target=self._work, args=(server,), daemon=True)
        thread.start()
        return thread

    def _work(self, server: Server) -> None:
        try:
            while not self._stop.wait(server.pause()):
                if server.failing and not server.reach():
                    self._stop.wait(0.1)
                    continue
                try:
                    job = self._waiting.get(timeout=0.2)
                except queue.Empty:
                    continue
                if not server.failing:  # it may have failed for another thread while this one waited for the job
                    self._converse(server, job)
                (self._over if job.over else self._waiting).put(job)
        except BaseException as error:  # raised again by whoever reads: this thread has no one else to tell
            self._over.put(error)

    def _converse(self, server: Server, job: Job) -> None:
        """Turns of a job until it is over, or until the server fails and another one may try."""
        while not job.over and not self._stop.is_set():
            try:
                job.take(self._answer(server, job))
            except Dropped as dropped:
                job.failure = dropped
            except (KeyError, IndexError, TypeError, AttributeError) as error:
                job.failure = Dropped("a reply that is not in OpenAI's shape", f"{type(error).__name__}: {error}")
            except ServerError as error:
                self._last = str(error)
                if error.status in (401, 403, 404):
                    raise OptionError("--url", f"{error} (--api-key, --model)") from error
                job.attempts += 1
                if not error.again:
                    job.failure = Dropped("a request that the server refuses", str(error))
                elif job.attempts > self._retries:
                    job.failure = Dropped(FAILED, str(error))
                return

    def _answer(self, server: Server, job: Job) -> Answer:
        body = {"model": self.model, **self.sampling, **self._seed(job)}
        if self._token_ids:
            body["return_token_ids"] = True
        if job.prompt is not None:
            reply = server.post("/completions", {**body, "prompt": job.prompt})
            choice = reply["choices"][0]
            return _read(reply, choice, {"role": "assistant", "content": choice["text"]})
        messages = [{key: value for key, value in m.items() if key != "weight"} for m in job.messages()]
        body |= {"messages": [_as_sent(message) for message in messages]}
        body |= {"tools": list(job.tools)} if job.tools else {}
        body |= {"chat_template_kwargs": self._options} if self._options else {}
        reply = server.post("/chat/completions", body)
        choice = reply["choices"][0]
        return _read(reply, choice, _message(choice["message"]))

    def _seed(self, job: Job) -> dict[str, int]:
        seed = seed_of(self.sampling.get("seed"), job)
        return {} if seed is None else {"seed": seed}


def the_model(servers: Sequence[Server], model: str | None) -> str:
    """The model that every server has: the one that is named, or the only one.

    Raises:
        OptionError: a server does not answer, lacks that model, or has several and none was named.
    """
    for server in servers:
        try:
            names = [one["id"] for one in server.get("/models")["data"]]
        except ServerError as error:
            raise OptionError("--url", f"{error}") from error
        except (KeyError, TypeError) as error:
            raise OptionError("--url", f"{server.url}: its list of models is not in OpenAI's shape") from error
        if model is None and len(names) == 1:
            model = names[0]
        if model not in names:
            has = ", ".join(names) or "none"
            raise OptionError(
                "--model",
                f"{server.url} has {has}" if model is None else f"{server.url} has no {model!r}, it has {has}",
            )
    assert model is not None
    return model


def _message(given: Mapping[str, Any]) -> dict[str, Any]:
    """A message of a reply: what of it belongs into a conversation."""
    message = {"role": "assistant", "content": given.get("content") or ""}
    reasoning = given.get("reasoning_content") or given.get("reasoning")
    message |= {"reasoning_content": reasoning} if reasoning else {}
    message |= {"tool_calls": given["tool_calls"]} if given.get("tool_calls") else {}
    if not message["content"].strip() and len(message) == 2:
        raise Dropped("empty answer")
    return message


def _as_sent(message: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of tool calls as text, as the API has them."""
    if "tool_calls" not in message:
        return dict(message)
    calls = []
    for call in message["tool_calls"]:
        function = dict(call["function"])
        if not isinstance(function.get("arguments"), str):
            function["arguments"] = json.dumps(function.get("arguments", {}), ensure_ascii=False)
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}


def _read(reply: Mapping[str, Any], choice: Mapping[str, Any], message: dict[str, Any]) -> Answer:
    reason = str(choice.get("finish_reason"))
    if reason not in ("stop", "length", "tool_calls"):
        raise Dropped(f"finish_reason {reason}")
    tokens = (reply.get("usage") or {}).get("completion_tokens") or 0
    ids, prompt = choice.get("token_ids"), reply.get("prompt_token_ids") or choice.get("prompt_token_ids")
    if not ids or not prompt:
        return Answer(message, reason, tokens)
    return Answer(message, reason, tokens, ids, ids_hash(prompt))
