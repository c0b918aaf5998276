"""The benchmark of the server: what the load tool is asked and what is read of its report, pairs and their summary, and
the whole of it on a tiny model with a stand-in for the tool.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

SIDES = ("bare", "served")


def _distribution(median: float, total: float = 0.0) -> dict[str, Any]:
    good = {"mean": median, "median": median, "total_sum": total, "percentiles": {"p95": 2 * median}}
    return {"successful": good, "errored": None}


def _report(tokens: float) -> dict[str, Any]:
    """A report of GuideLLM 0.8, as far as it is read."""
    from serving_load import DISTRIBUTIONS

    metrics = {name: _distribution(5.0, tokens) for name in DISTRIBUTIONS}
    totals = {"successful": 3, "incomplete": 1, "errored": 0, "total": 4}
    return {
        "metadata": {"guidellm_version": "0.8.1"},
        "benchmarks": [{"metrics": {"request_totals": totals, **metrics}}],
    }


# ------------------------------------------------------------------------------------------------------ the load tool


def test_what_the_tool_is_asked() -> None:
    """Streams, requests and lengths; raw completions at temperature 0; a tokenizer that lies here; no request data."""
    from serving_load import Load, command_line

    line = command_line("tool", "http://127.0.0.1:1", "/models/a", Load(4, 20, 100, 30), {"speculative": False})
    assert line[:2] == ["tool", "run"]
    backend = json.loads(line[line.index("--backend") + 1])
    assert backend["request_format"] == "/v1/completions"
    assert backend["extras"] == {"body": {"temperature": 0, "speculative": False}}
    assert "kind=concurrent,streams=4" in line
    assert "kind=max_requests,count=20" in line
    assert "kind=synthetic_text,prompt_tokens=100,output_tokens=30" in line
    assert "kind=huggingface_auto,model=/models/a" in line


def test_a_load_that_is_none_is_refused() -> None:
    """By the flag."""
    from serving_load import Load

    with pytest.raises(ValueError, match="--output-tokens: must be at least 1, got 0"):
        Load(1, 1, 1, 0)


def test_what_is_read_of_the_tools_report() -> None:
    """Of successful requests only; a report of several benchmarks is not one of ours."""
    from serving_load import numbers

    found = numbers(_report(60.0))
    assert found["requests"]["incomplete"] == 1
    assert found["time_to_first_token_ms"] == {"mean": 5.0, "median": 5.0, "total_sum": 60.0, "p95": 10.0}
    with pytest.raises(ValueError, match="one benchmark"):
        numbers({"benchmarks": []})


def test_nobodys_folder_is_emptied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--venv may name a folder that somebody has things in: it is refused, and they are still there. An environment is
    taken as it is."""
    import serving_load

    made: list[Any] = []
    monkeypatch.setattr(serving_load.venv, "create", lambda folder, **options: made.append(options))
    monkeypatch.setattr(serving_load.subprocess, "run", lambda *_, **__: None)
    (tmp_path / "thesis.tex").write_text("years")
    with pytest.raises(ValueError, match=r"--venv: .* is not empty and no virtual environment"):
        serving_load.tool(tmp_path)
    (tmp_path / "pyvenv.cfg").touch()
    serving_load.tool(tmp_path)
    assert not any(options.get("clear") for options in made)


def test_plain_and_drafted_runs_of_a_load_are_neighbours() -> None:
    """What changes on the machine in between meets both."""
    from serving import runs
    from serving_load import Load

    loads = [Load(streams, 1, 1, 1) for streams in (1, 4)]
    found = [(way, load.streams) for way, load in runs({"plain": False, "drafted": True}, loads)]
    assert found == [("plain", 1), ("drafted", 1), ("plain", 4), ("drafted", 4)]


def test_a_request_the_tool_lost_is_seen() -> None:
    """It counts neither as answered nor as failed: the page says how many were asked for."""
    from serving_load import numbers
    from serving_page import _load_cells

    row = {"way": "plain", "load": {"streams": 2, "requests": 5}, **numbers(_report(60.0))}
    cells = _load_cells(row | {"counted": {"generation_tokens_total": 80.0}})
    assert cells[2:4] == ["3/5", "1"]
    assert cells[-1] == "60 / 80"


# ----------------------------------------------------------------------------------------------------------- overhead


def test_pairs_alternate_and_have_prompts_of_their_own() -> None:
    """Which side begins changes from pair to pair; prompts come round again only when all have been used."""
    from serving_overhead import group, order

    assert [order(pair)[0] for pair in range(4)] == ["bare", "served", "bare", "served"]
    assert [group(pair, 4, 10) for pair in range(3)] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 0, 1)]


def _row(side: str, pair: int, seconds: float, tokens: int = 100, texts: str = "ab") -> dict[str, Any]:
    return {
        "prompts": [pair], "config": f"{side}-plain", "trial": pair, "seconds": seconds, "cpu_seconds": seconds,
        "tokens": tokens, "verified": 3, "texts": list(texts), "load_average": 0.5, "at": "2026-01-01T00:00:00+00:00",
    }  # fmt: skip


def test_overhead_is_the_time_added_for_the_same_tokens() -> None:
    """The median of pairs, each by itself; half a pair does not count; texts that differ are told."""
    from serving_overhead import summarise

    rows = [_row("bare", 0, 10), _row("served", 0, 11), _row("bare", 1, 20), _row("served", 1, 20.2, texts="ax")]
    rows += [_row("bare", 2, 10), _row("served", 2, 10, tokens=80), _row("bare", 3, 10)]
    plain = summarise(rows)["plain"]
    assert plain["pairs"] == 3
    assert plain["overhead"]["median"] == pytest.approx(0.1)
    assert (plain["overhead"]["min"], plain["overhead"]["max"]) == (pytest.approx(0.01), pytest.approx(0.25))
    assert plain["same_texts"] == [5, 6]
    assert plain["verified"] == {"bare": 9, "served": 9}
    assert summarise(rows)["drafted"] is None


@pytest.mark.parametrize(
    ("added", "said"),
    [
        ((0.02, 0.021, 0.019, 0.02), "below the 5 %"),
        ((0.06, 0.061, 0.059, 0.06), "not below the 5 %"),
        ((0.02, 0.02, 0.02, 0.4), "not resolved"),
        ((0.01,), "not resolved"),
    ],
)
def test_what_pairs_cannot_tell_is_no_verdict(added: tuple[float, ...], said: str) -> None:
    """A median below the border is not enough: the bound must be, and one pair has none."""
    from serving_overhead import summarise
    from serving_page import verdict

    rows = [_row(side, i, 10 * (1 + more * (side == "served"))) for i, more in enumerate(added) for side in SIDES]
    assert said in verdict("plain", summarise(rows)["plain"]["overhead"])
    assert ("not below" in said) == ("not below" in verdict("plain", summarise(rows)["plain"]["overhead"]))


def test_an_answer_that_failed_is_no_result() -> None:
    """Only a stream that ended as it should has tokens to count."""
    from serving_overhead import _read

    events = 'data: {"choices": [{"text": "ab"}]}\n\ndata: {"choices": [], "usage": {"completion_tokens": 7}}\n\n'
    assert _read(f"HTTP/1.1 200 OK\r\n\r\n{events}data: [DONE]\n\n".encode()) == ("ab", 7)
    for broken in (f"HTTP/1.1 200 OK\r\n\r\n{events}", "HTTP/1.1 429 Too Many\r\n\r\n{}", ""):
        with pytest.raises(RuntimeError, match="the server answered"):
            _read(broken.encode())


def test_a_key_of_the_user_does_not_shut_the_benchmark_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FORERUN_API_KEY is for servers of theirs; the one that is measured has no key."""
    import serving_process

    seen: list[dict[str, str]] = []

    def started(command: Any, env: dict[str, str] | None = None, **_: Any) -> Any:
        seen.append(dict(os.environ) if env is None else env)
        raise OSError("far enough")

    monkeypatch.setenv("FORERUN_API_KEY", "secret")
    monkeypatch.setattr(serving_process.subprocess, "Popen", started)
    with pytest.raises(OSError, match="far enough"), serving_process.served("embedded", [], tmp_path / "log"):
        pass
    assert "FORERUN_API_KEY" not in seen[0]
    assert "PATH" in seen[0]


@pytest.mark.parametrize(
    ("content", "said"), [("", "holds none"), ('{"turns": ["a"]}\n', "line 1 has no"), (None, "No such file")]
)
def test_prompts_that_are_none_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, said: str
) -> None:
    """By the flag, or by the file that is not there; before anything is loaded."""
    import serving

    path = tmp_path / "prompts.jsonl"
    if content is not None:
        path.write_text(content)
    assert serving.main(["overhead", "--prompts", str(path), "--out", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err


def test_a_trained_drafter_is_known_by_its_run() -> None:
    """Every one of them lies in a folder `best`."""
    from serving import label

    assert label("runs/dspark/best") == "dspark/best"
    assert label("/models/qwen.gguf") == "qwen.gguf"
    assert label("ngram") == "ngram"


# -------------------------------------------------------------------------------------------------------------- whole

STAND_IN = """
import json, sys, urllib.request

backend = json.loads(sys.argv[sys.argv.index("--backend") + 1])
body = {"model": backend["model"], "prompt": "abc", "max_tokens": 20, "ignore_eos": True, **backend["extras"]["body"]}
request = urllib.request.Request(backend["target"] + backend["request_format"], json.dumps(body).encode())
with urllib.request.urlopen(request) as answer:
    tokens = json.load(answer)["usage"]["completion_tokens"]
report = json.loads(REPORT)
report["benchmarks"][0]["metrics"]["output_token_count"]["successful"]["total_sum"] = tokens
place = next(arg for arg in sys.argv if arg.startswith("kind=json,path=")).partition("path=")[2]
open(place, "w").write(json.dumps(report))
"""


@pytest.mark.slow
def test_the_whole_benchmark(tmp_path: Path, tiny_qwen3_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both measurements on a tiny model, a second call that finds nothing left to do, and the page: tokens counted by
    tool and server agree, and both sides of a pair say the same."""
    import serving

    script = tmp_path / "guidellm"
    script.write_text(f"#!{sys.executable}\nREPORT = {json.dumps(_report(0.0))!r}\n{STAND_IN}")
    script.chmod(0o755)
    monkeypatch.setattr(serving, "tool", lambda folder: script)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("ab", "abab", "xyz")))
    out, page = tmp_path / "out", tmp_path / "docs" / "serving.md"
    model = ["--target", str(tiny_qwen3_dir), "--drafter", "ngram", "--threads", "1", "--out", str(out)]
    load = ["load", *model, "--streams", "1", "2", "--requests", "3"]
    pairs = ["overhead", *model, "--prompts", str(prompts), "--concurrency", "2", "--max-tokens", "20", "--pairs", "2"]
    assert serving.main(load) == serving.main(pairs) == 0
    monkeypatch.setattr(serving, "served", lambda *_: pytest.fail("nothing was left to measure"))
    assert serving.main(load) == serving.main(pairs) == 0
    assert serving.main(["report", "--out", str(out), "--page", str(page)]) == 0
    found = json.loads(page.with_suffix(".json").read_text())
    assert [row["counted"]["generation_tokens_total"] for row in found["load"]["rows"]] == [20] * 4
    assert found["overhead"]["plain"]["same_texts"] == found["overhead"]["drafted"]["same_texts"] == [4, 4]
    text = page.read_text()
    assert "20 / 20" in text
    assert "5 % the server is held to" in text
    assert found["overhead"]["drafted"]["verified"]["bare"] == found["overhead"]["drafted"]["verified"]["served"] > 0
    assert str(tmp_path) not in text


def test_a_report_of_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line that says what to run."""
    import serving

    assert serving.main(["report", "--out", str(tmp_path), "--page", str(tmp_path / "page.md")]) == 2
    assert "serving.py load" in capsys.readouterr().err
