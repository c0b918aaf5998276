"""What the server adds to the bare engine: the same prompts at once, in turn through HTTP and by a call.

The engine of this process and that of the server are loaded with the same options. A pair measures one after the other,
in alternating order, on the next prompts of the list; only one of them has work at any time.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import psutil
from serving_process import NAME, VERIFIED, Served

import forerun
from forerun.bench.load.protocol import bound

SIDES = ("bare", "served")
WAYS: Mapping[str, bool] = {"plain": False, "drafted": True}
"""Name -> whether drafters may propose."""
DOUBT = 0.05
"""Chance that the truth lies above the upper bound, and that it lies below the lower one."""


def config(side: str, way: str) -> str:
    """Of a row."""
    return f"{side}-{way}"


def order(pair: int) -> tuple[str, ...]:
    """Every other pair begins with the other side: what warms up or cools down meets both."""
    return SIDES if pair % 2 == 0 else SIDES[::-1]


def group(pair: int, concurrency: int, prompts: int) -> tuple[int, ...]:
    """Numbers of a pair's prompts."""
    return tuple((pair * concurrency + i) % prompts for i in range(concurrency))


def bare_round(engine: forerun.Engine, prompts: Sequence[str], max_tokens: int, drafted: bool) -> dict[str, Any]:
    """All prompts at once by one call."""
    sampling = forerun.Sampling(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    process = psutil.Process()
    cpu, start = _cpu(process), time.perf_counter()
    done = engine.generate(list(prompts), sampling, speculative=drafted)
    seconds = time.perf_counter() - start
    texts, tokens = [one.text for one in done], sum(len(one.token_ids) for one in done)
    return _row(seconds, _cpu(process) - cpu, tokens, sum(one.stats.verified for one in done), texts)


def served_round(served: Served, prompts: Sequence[str], max_tokens: int, drafted: bool) -> dict[str, Any]:
    """All prompts at once, each a streamed request on a connection of its own. Answers are read as bytes; what they say
    is looked at afterwards."""
    bodies = [_body(prompt, max_tokens, drafted) for prompt in prompts]
    before = served.counted()
    cpu, start = served.cpu_seconds(), time.perf_counter()
    answers = asyncio.run(_together(served.url, bodies))
    seconds, cpu = time.perf_counter() - start, served.cpu_seconds() - cpu
    read = [_read(answer) for answer in answers]
    verified = served.counted()[VERIFIED] - before[VERIFIED]
    return _row(seconds, cpu, sum(tokens for _, tokens in read), int(verified), [text for text, _ in read])


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _row(seconds: float, cpu: float, tokens: int, verified: int, texts: Sequence[str]) -> dict[str, Any]:
    return {
        "seconds": round(seconds, 4),
        "cpu_seconds": round(cpu, 3),
        "tokens": tokens,
        "verified": verified,
        "texts": [hashlib.sha256(text.encode()).hexdigest()[:16] for text in texts],
        "load_average": round(os.getloadavg()[0], 2),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _body(prompt: str, max_tokens: int, drafted: bool) -> bytes:
    fields = {"model": NAME, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    fields |= {"speculative": drafted, "stream": True, "stream_options": {"include_usage": True}}
    return json.dumps(fields).encode()


async def _together(url: str, bodies: Sequence[bytes]) -> list[bytes]:
    return list(await asyncio.gather(*(_post(url, body) for body in bodies)))


async def _post(url: str, body: bytes) -> bytes:
    """The whole answer of /v1/completions, headers included: a client library would cost more than the server.

    HTTP 1.0: the end of the connection ends the answer, and nothing is put between its events.
    """
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    head = ["POST /v1/completions HTTP/1.0", f"Host: {place.netloc}", f"Content-Length: {len(body)}", "", ""]
    writer.write("\r\n".join(head).encode() + body)
    answer = await reader.read(-1)
    writer.close()
    return answer


def _read(answer: bytes) -> tuple[str, int]:
    """Text and tokens of a streamed answer. RuntimeError: it failed."""
    head, _, rest = answer.partition(b"\r\n\r\n")
    lines = [line for line in rest.decode().splitlines() if line.startswith("data: ")]
    if b" 200 " not in head.split(b"\r\n")[0] or not lines or lines[-1] != "data: [DONE]":
        raise RuntimeError(f"the server answered {answer[:300]!r}")
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    text = "".join(choice["text"] for event in events for choice in event["choices"])
    return text, events[-1]["usage"]["completion_tokens"]


# ----------------------------------------------------------------------------------------------------------- the answer


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """By way: how much longer the server takes than the bare engine, of whole pairs; None where there is none.

    Every pair counts once. What is compared is time for the same tokens. `low` and `high` bound the geometric mean of
    the pairs, each with a doubt of `DOUBT`; of a single pair they are None.
    """
    found: dict[str, Any] = {}
    for way in WAYS:
        by_side = {side: {r["trial"]: r for r in rows if r["config"] == config(side, way)} for side in SIDES}
        pairs = sorted(by_side["bare"].keys() & by_side["served"].keys())
        both = [(by_side["bare"][pair], by_side["served"][pair]) for pair in pairs]
        found[way] = _summary(both) if both else None
    return found


def _summary(both: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> dict[str, Any]:
    added = [s["seconds"] / b["seconds"] * b["tokens"] / s["tokens"] - 1 for b, s in both]
    by_side = dict(zip(SIDES, zip(*both, strict=True), strict=True))
    same = sum(x == y for b, s in both for x, y in zip(b["texts"], s["texts"], strict=True))
    loads = [row["load_average"] for pair in both for row in pair]
    return {
        "pairs": len(both),
        "overhead": _spread(added) | _bounds([1 + one for one in added]),
        "tokens_per_second": {
            side: _spread([row["tokens"] / row["seconds"] for row in rows]) for side, rows in by_side.items()
        },
        "cpu_seconds": {side: _spread([row["cpu_seconds"] for row in rows]) for side, rows in by_side.items()},
        "verified": {side: sum(row["verified"] for row in rows) for side, rows in by_side.items()},
        "same_texts": [same, sum(len(b["texts"]) for b, _ in both)],
        "load_average": [min(loads), max(loads)],
    }


def _bounds(ratios: Sequence[float]) -> dict[str, float | None]:
    if len(ratios) < 2:
        return {"low": None, "high": None}
    return {"low": bound(ratios, DOUBT, upper=False) - 1, "high": bound(ratios, DOUBT) - 1}


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": median(values), "min": min(values), "max": max(values)}
