"""`forerun data`: from a user's files to a dataset, and to answers; what cannot be used is refused in one line."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from cli.conftest import Run
from forerun.target.fingerprint import template_hash
from forerun.target.outline import outline
from forerun.training.data import Dataset, open_split
from forerun.training.data.samples import MAX_LENGTH
from tiny import TEMPLATE

Refused = Callable[..., str]

CHAT = {"id": "c", "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello."}]}
TEXT = {"id": "t", "text": "a text"}
GREEDY = ("--temperature", 0, "--max-tokens", 8)


def jsonl(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return jsonl(tmp_path / "data.jsonl", CHAT, TEXT)


# ------------------------------------------------------------------------------------------------------------ prepare


def test_prepare_writes_a_dataset(run: Run, tiny_qwen3_dir: Path, data: Path, tmp_path: Path) -> None:
    """Samples, an account of them on stdout, and a manifest that says what a drafter's card has to say of its data."""
    jsonl(data, CHAT, TEXT, {"messages": CHAT["messages"]}, {"prompt": "x"})
    ran = run("data", "prepare", data, "--target", tiny_qwen3_dir, "--out", tmp_path / "out")
    assert ran.code == 0, ran.err
    found = Dataset(tmp_path / "out")
    assert [sample.id for sample in found] == ["c", "t"]
    first, second, *left_out = ran.out.splitlines()
    counts = found.manifest["counts"]
    assert first.endswith(f"2 samples, {counts['tokens']} tokens (13 learned), longest {counts['longest']}")
    assert second == "left out of 4 records:"
    assert re.fullmatch(r" +1 duplicate \(as .*data\.jsonl line 3\)", left_out[0])
    assert re.fullmatch(r" +1 no answer \(as .*data\.jsonl line 4, id \w{16}\)", left_out[1])
    found.check_target(outline(str(tiny_qwen3_dir)).tokenizer)
    assert found.manifest["target"] == str(tiny_qwen3_dir)
    assert found.manifest["template"]["options"] == {}
    assert found.manifest["template"]["rendered"] == 1
    assert found.chat_template == template_hash(outline(str(tiny_qwen3_dir)).tokenizer)
    assert found.manifest["options"]["max_length"] == 256
    assert found.manifest["records"] == 4


def test_text_by_somebody_else_is_told(run: Run, tiny_qwen3_dir: Path, data: Path, tmp_path: Path) -> None:
    """A drafter learns from the target's own answers first of all; those that a target wrote say how they ended."""
    jsonl(data, CHAT, TEXT, {"id": "own", "text": "its own", "finish_reason": "stop"})
    prepare = ("data", "prepare", data, "--target", tiny_qwen3_dir, "--overwrite", "--out", tmp_path / "out")
    assert "2 samples are not answers of `forerun data regenerate`" in " ".join(run(*prepare).err.split())
    jsonl(data, {**CHAT, "finish_reason": "stop"})
    assert run(*prepare).err == ""


def test_the_same_input_gives_the_same_bytes(run: Run, tiny_qwen3_dir: Path, data: Path, tmp_path: Path) -> None:
    """No time, no order of a set: a dataset can be compared by its manifest."""
    for name in ("a", "b"):
        assert run("data", "prepare", data, "--target", tiny_qwen3_dir, "--out", tmp_path / name).code == 0
    files = [path.name for path in (tmp_path / "a").iterdir()]
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in files)


def test_json_is_the_manifest(run: Run, tiny_qwen3_dir: Path, data: Path, tmp_path: Path) -> None:
    """Of both parts where something is held out."""
    jsonl(data, *({"id": i, "text": f"t {i}"} for i in range(30)))
    common = ("data", "prepare", data, "--target", tiny_qwen3_dir, "--json", "--out")
    assert run(*common, tmp_path / "a").json == Dataset(tmp_path / "a").manifest
    parts = run(*common, tmp_path / "b", "--held-out", 0.3).json["splits"]
    train, held = open_split(tmp_path / "b")
    assert held is not None
    assert parts == {"train": train.manifest, "held_out": held.manifest}
    assert len(train) + len(held) == 30


def test_show_says_why_there_is_nothing_to_show(refused, tiny_qwen3_dir: Path, tmp_path: Path):
    """Prompts without answers: told like --out tells it, not an empty screen."""
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"prompt": "a"}\n')
    line = refused("data", "prepare", data, "--target", tiny_qwen3_dir, "--show", 1)
    assert line.startswith("DATA: no sample to show: 1 no answer (as ")


def test_show_marks_what_is_learned(
    run: Run, tiny_qwen3_dir: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In brackets, or in colours where there are some; nothing is written without --out."""
    monkeypatch.chdir(tmp_path)
    show = ("data", "prepare", data, "--target", tiny_qwen3_dir, "--show")
    marked = "<|start|>user\nhi<|end|>\n<|start|>assistant\n[[Hello.<|end|>]]\n"
    ran = run(*show, 5)
    assert ran.out == f"--- c: 28 tokens, 7 learned ---\n{marked}--- t: 6 tokens, 6 learned ---\n[[a text]]\n"
    assert run(*show, 1).out == f"--- c: 28 tokens, 7 learned ---\n{marked}"
    assert [path.name for path in tmp_path.iterdir()] == ["data.jsonl"]
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[1;32mHello.<|end|>\x1b[0m" in run(*show, 1).out
    both = run(*show, 1, "--out", tmp_path / "out")
    assert both.out.startswith("--- c")
    assert len(Dataset(tmp_path / "out")) == 2


def test_ts_9_template_and_options_are_the_users_and_are_recorded(
    run: Run, tiny_qwen3_dir: Path, data: Path, tmp_path: Path
) -> None:
    """TS-9: a template of one's own (a file, or text) with options renders the samples; hash and options are in the
    manifest, so that a drafter's card can be compared with what a server renders.

    https://github.com/z-lab/dflash/issues/133 https://github.com/SafeAILab/EAGLE/issues/227
    """
    template = "{{ mood | default('') }}" + TEMPLATE
    (tmp_path / "own.jinja").write_text(template)
    hashes = []
    for given in (None, template, tmp_path / "own.jinja"):
        flags = ("--chat-template-kwargs", '{"mood": "glad"}', *(() if given is None else ("--chat-template", given)))
        out = tmp_path / str(len(hashes))
        ran = run("data", "prepare", data, "--target", tiny_qwen3_dir, "--out", out, "--show", 1, *flags)
        assert ("glad<|start|>user" in ran.out) == (given is not None)
        assert Dataset(out).manifest["template"]["options"] == {"mood": "glad"}
        hashes.append(Dataset(out).manifest["template"]["hash"])
    assert hashes[0] != hashes[1] == hashes[2]


def test_ts_9_plain_text_remembers_no_template(run: Run, tiny_qwen3_dir: Path, data: Path, tmp_path: Path) -> None:
    """TS-9: a template that had no part in the samples is not theirs, whatever the tokenizer has; in data of an earlier
    version, which do not say, it may have had one.

    https://github.com/z-lab/dflash/issues/133 https://github.com/SafeAILab/EAGLE/issues/227
    """
    jsonl(data, TEXT, {"prompt": "hi", "completion": "Hello."})
    ran = run("data", "prepare", data, "--target", tiny_qwen3_dir, "--out", tmp_path / "out", "--show", 1)
    assert ran.code == 0, ran.err
    found = Dataset(tmp_path / "out")
    assert found.manifest["template"]["rendered"] == 0
    assert found.chat_template is None
    manifest = tmp_path / "out" / "manifest.json"
    content = json.loads(manifest.read_text())
    del content["template"]["rendered"]
    manifest.write_text(json.dumps(content))
    assert Dataset(tmp_path / "out").chat_template == content["template"]["hash"]


def test_plain_prompts_as_chats(run: Run, tiny_qwen3_dir: Path, tmp_path: Path) -> None:
    """--apply-chat-template, as for `generate`."""
    data = jsonl(tmp_path / "data.jsonl", {"prompt": "hi", "completion": "Hello."})
    show = ("data", "prepare", data, "--target", tiny_qwen3_dir, "--show", 1)
    assert run(*show).out.endswith("\nhi[[Hello.]]\n")
    assert run(*show, "--apply-chat-template").out.endswith("<|start|>assistant\n[[Hello.<|end|>]]\n")


# ---------------------------------------------------------------------------------------------------------- bad input

WRONG = [
    ([], "--out: is required"),
    (["--show", "0"], "--show: must be at least 1"),
    (["--show", "1", "--json"], "--json: "),
    (["--out", "x", "--held-out", "1"], "--held-out: must be a share"),
    (["--out", "x", "--held-out", "nan"], "--held-out: must be a share"),
    (["--out", "no/x"], "--out: "),
    (["--out", "x", "--max-length", "1"], "--max-length: must be in 2 .. 256"),
    (["--out", "x", "--max-length", "257"], "--max-length: must be in 2 .. 256, the target's window"),
    (["--out", "x", "--overlong", "cut"], "--overlong: must be one of skip, truncate, got 'cut'"),
    (["--out", "x", "--turns", "first"], "--turns: must be one of all, last, split"),
    (["--out", "x", "--unfinished", "maybe"], "--unfinished: must be one of"),
    (["--out", "x", "--chat-template-kwargs", "{"], "--chat-template-kwargs: is not JSON"),
    (["--out", "x", "--chat-template-kwargs", "[1]"], "--chat-template-kwargs: must be a JSON object"),
    (["--out", "x", "--chat-template-kwargs", '{"messages": 1}'], "--chat-template-kwargs: 'messages'"),
    (["--out", "x", "--chat-template", "no.jinja"], "--chat-template: cannot read no.jinja"),
    (["--out", "x", "--chat-template", "{{ oops"], "--chat-template: "),
    (["--out", "x", "--chat-template", "{{ messages[0].content }}"], "--chat-template: where an answer ends"),
    (["--out", "x", "--target", "no/such/model"], "--target: no/such/model does not exist"),
    (["--out", "x", "--taget", "y"], "--taget: unknown option; did you mean '--target'?"),
]


@pytest.mark.parametrize(("flags", "says"), WRONG, ids=[" ".join(flags) or "none" for flags, _ in WRONG])
def test_what_cannot_be_used_is_refused(
    refused: Refused, tiny_qwen3_dir: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    flags: list[str], says: str,
) -> None:  # fmt: skip
    """One line that names the option; nothing is left behind."""
    monkeypatch.chdir(tmp_path)
    target = [] if "--target" in flags else ["--target", tiny_qwen3_dir]
    assert refused("data", "prepare", data, *target, *flags).startswith(says)
    assert [path.name for path in tmp_path.iterdir()] == ["data.jsonl"]


def test_data_that_cannot_be_used(refused: Refused, tiny_qwen3_dir: Path, data: Path, tmp_path: Path) -> None:
    """Missing, of unknown shape, or with nothing to learn: the place and the reason."""
    rest = ("--target", tiny_qwen3_dir, "--out", tmp_path / "out")
    assert refused("data", "prepare", *rest) == "DATA: is required"
    assert refused("data", "prepare", "no.jsonl", *rest).startswith("DATA: no.jsonl does not exist")
    jsonl(data, CHAT, {"promt": "x"})
    assert re.search(r"^DATA: .*data\.jsonl line 2: .*keys: promt", refused("data", "prepare", data, *rest))
    jsonl(data, {"prompt": "x"})
    line = refused("data", "prepare", data, *rest)
    assert line.startswith("DATA: nothing is left to learn from: 1 no answer (as ")
    jsonl(data, CHAT)
    assert refused("data", "prepare", data, *rest, "--held-out", 0.0001).startswith("--held-out: ")
    assert [path.name for path in tmp_path.iterdir()] == ["data.jsonl"]


def test_an_existing_dataset_is_kept(
    run: Run, refused: Refused, tiny_qwen3_dir: Path, data: Path, tmp_path: Path
) -> None:
    """Unless --overwrite."""
    flags = ("data", "prepare", data, "--target", tiny_qwen3_dir, "--out", tmp_path / "out")
    assert run(*flags).code == 0
    assert "--overwrite" in refused(*flags)
    jsonl(data, TEXT)
    assert run(*flags, "--overwrite").code == 0
    assert len(Dataset(tmp_path / "out")) == 1


def test_the_commands_of_data(refused: Refused, run: Run) -> None:
    """Without one, or with a misspelt one, they are named."""
    assert refused("data") == "data: name one of prepare, regenerate"
    assert refused("data", "prepar") == "no command is called data 'prepar'; did you mean 'prepare'?"
    assert "prepare" in run("data", "--help").out
    shown = run("data", "prepare", "--help").out
    assert "--held-out" in shown
    assert str(MAX_LENGTH) in shown


# --------------------------------------------------------------------------------------------------------- regenerate


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return jsonl(tmp_path / "prompts.jsonl", {"id": "a", "turns": ["hi"]}, {"id": "b", "prompt": "def f"}, TEXT)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_regenerate_then_prepare(run: Run, tiny_qwen3_dir: Path, prompts: Path, tmp_path: Path) -> None:
    """The answers of `generate`, in a file that `prepare` takes; a second run finds nothing left to do."""
    common = ("data", "regenerate", prompts, "--target", tiny_qwen3_dir, *GREEDY, "--out", tmp_path / "answers.jsonl")
    ran = run(*common, "--drafter", "ngram")
    assert (ran.code, ran.out) == (0, "")
    assert "2 answers, 16 tokens in" in ran.err
    assert "1 no prompt" in ran.err
    same = b'{"turns": ["hi"]}\n{"prompt": "def f"}'
    generated = run("generate", "--target", tiny_qwen3_dir, *GREEDY, "--prompts", "-", "--json", stdin=same).json
    found = {one["id"]: one for one in lines(tmp_path / "answers.jsonl")}
    assert [found["a"]["token_ids"], found["b"]["token_ids"]] == [[one["token_ids"]] for one in generated]
    assert found["b"]["completion"] == generated[1]["text"]
    again = run(*common)
    assert (again.code, len(lines(tmp_path / "answers.jsonl"))) == (0, 2)
    assert "has 2 of 2 answers; 0 are left" in again.err
    out = tmp_path / "data"
    assert run("data", "prepare", tmp_path / "answers.jsonl", "--target", tiny_qwen3_dir, "--out", out).code == 0
    assert Dataset(out).manifest["counts"]["learned"] == 16


def test_regenerate_json(run: Run, tiny_qwen3_dir: Path, prompts: Path, tmp_path: Path) -> None:
    """What was answered and what was not, and exit code 1 if a prompt has no answer."""
    flags = ("--target", tiny_qwen3_dir, *GREEDY, "--json")
    report = run("data", "regenerate", prompts, *flags, "--out", tmp_path / "a").json
    assert (report["answered"], report["tokens"], report["failed"], report["cut_short"]) == (2, 16, {}, {})
    assert report["left_out"]["no prompt"]["count"] == 1
    jsonl(prompts, {"id": "a", "turns": ["hi"]}, {"id": "long", "turns": ["x" * 300]})
    ran = run("data", "regenerate", prompts, *flags, "--out", tmp_path / "b")
    assert (ran.code, ran.json["answered"]) == (1, 1)
    assert ran.json["failed"]["a prompt too long for the window or the KV memory"]["example"].startswith("long: ")


def test_ts_9_answers_remember_their_template(
    run: Run, refused: Refused, tiny_qwen3_dir: Path, prompts: Path, tmp_path: Path
) -> None:
    """TS-9: answered with an option of the template, they are prepared with the same one or not at all.

    https://github.com/z-lab/dflash/issues/133 https://github.com/SafeAILab/EAGLE/issues/227
    """
    flags = ("--chat-template", "{{ mood }}" + TEMPLATE, "--target", tiny_qwen3_dir)
    glad, sad = (("--chat-template-kwargs", json.dumps({"mood": mood})) for mood in ("glad", "sad"))
    answers = tmp_path / "answers.jsonl"
    assert run("data", "regenerate", prompts, *flags, *glad, *GREEDY, "--out", answers).code == 0
    prepare = ("data", "prepare", answers, *flags, "--out", tmp_path / "data")
    assert "was answered to other prompt ids" in refused(*prepare, *sad)
    assert run(*prepare, *glad).code == 0


class Upper(BaseHTTPRequestHandler):
    """A server whose model answers in capitals."""

    keys: list[str | None] = []  # noqa: RUF012 - shared on purpose

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._reply({"data": [{"id": "upper"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.keys.append(self.headers["Authorization"])
        text = body["messages"][-1]["content"].upper() if "messages" in body else body["prompt"].upper()
        choice = {"text": text, "message": {"content": text}, "finish_reason": "stop"}
        self._reply({"choices": [choice], "usage": {"completion_tokens": 1}})

    def _reply(self, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def test_regenerate_by_a_server(run: Run, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No model is loaded here; the key comes from the environment and is written nowhere."""
    monkeypatch.setenv("OPENAI_API_KEY", "s3cret")
    server = HTTPServer(("127.0.0.1", 0), Upper)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/v1"
        ran = run(
            "data", "regenerate", prompts, "--url", url, "--out", tmp_path / "answers.jsonl", "--temperature", 0.7
        )
    finally:
        server.shutdown()
        server.server_close()
    assert ran.code == 0, ran.err
    first, second = sorted(lines(tmp_path / "answers.jsonl"), key=lambda one: one["id"])
    assert first["messages"] == [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "HI"}]
    assert (second["prompt"], second["completion"]) == ("def f", "DEF F")
    assert first["model"] == "upper"
    assert first["sampling"] == {"max_tokens": 2048, "temperature": 0.7}
    assert set(Upper.keys) == {"Bearer s3cret"}
    assert not any("s3cret" in path.read_text() for path in tmp_path.iterdir())
    assert "s3cret" not in ran.err + ran.out


WRONG_REGENERATE = [
    (["--out", "no/a.jsonl"], "--out: the folder"),
    (["--out", "."], "--out: . is a folder"),
    (["--out", "prompts.jsonl/answers"], "--out: the folder"),
    ([], "--out: is required"),
    (["--out", "a", "--limit", "0"], "--limit: must be at least 1"),
    (["--out", "a", "--temperature", "-1"], "--temperature: "),
    (["--out", "a", "--max-tokens", "0"], "--max-tokens: must be at least 1, got 0"),
    (["--out", "a", "--concurrency", "0"], "--concurrency: must be at least 1"),
    (["--out", "a", "--retries", "-1"], "--retries: must be at least 0"),
    (["--out", "a", "--timeout", "nan"], "--timeout: must be at least"),
    (["--out", "a", "--return-token-ids"], "--return-token-ids: belongs to --url"),
    (["--out", "a", "--url", "localhost:80"], "--url: must be like http://HOST:PORT/v1"),
    (["--out", "a", "--url", "http://127.0.0.1:9"], "--url: http://127.0.0.1:9: "),
    (["--out", "a", "--url", "http://127.0.0.1:9", "--drafter", "ngram"], "--drafter: belongs to decoding here"),
    (["--out", "a", "--url", "http://127.0.0.1:9", "--max-num-seqs", "2"], "--max-num-seqs: belongs to decoding here"),
    (["--out", "a", "--url", "http://127.0.0.1:9", "--chat-template", "{{ 1 }}"], "--chat-template: belongs to"),
    (["--out", "a", "--url", "http://127.0.0.1:9", "--logprobs", "1"], "--logprobs: "),
    (["--out", "a", "--target", "no/such/model"], "--target: no/such/model does not exist"),
    (["--out", "prompts.jsonl", "--target", "TINY"], "--out: prompts.jsonl is not a file of answers"),
    (["--out", "a", "--target", "TINY", "--stop-token-ids", "9999"], "--stop-token-ids: "),
]


@pytest.mark.parametrize(
    ("flags", "says"), WRONG_REGENERATE, ids=[" ".join(flags) or "none" for flags, _ in WRONG_REGENERATE]
)
def test_what_cannot_be_used_is_refused_before_anything_is_answered(
    refused: Refused, tiny_qwen3_dir: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    flags: list[str], says: str,
) -> None:  # fmt: skip
    """One line that names the option."""
    monkeypatch.chdir(tmp_path)
    before = prompts.read_text()
    filled = [str(tiny_qwen3_dir) if flag == "TINY" else flag for flag in flags]
    assert refused("data", "regenerate", prompts, *filled).startswith(says)
    assert prompts.read_text() == before
    assert not (tmp_path / "a").exists() or (tmp_path / "a").read_bytes() == b""


def test_prompts_are_looked_at_before_a_model_is_loaded(refused: Refused, prompts: Path, tmp_path: Path) -> None:
    """The last line is wrong: told at once, not after hours; and where nothing is asked, why."""
    flags = ("--target", "no/such/model", "--out", tmp_path / "a")
    jsonl(prompts, {"turns": ["hi"]}, {"turn": ["x"]})
    assert re.search(r"^PROMPTS: .*line 2: .*keys: turn\)", refused("data", "regenerate", prompts, *flags))
    jsonl(prompts, TEXT)
    line = refused("data", "regenerate", prompts, *flags)
    assert line.startswith("PROMPTS: there is nothing to answer: 1 no prompt")
    assert refused("data", "regenerate", *flags) == "PROMPTS: is required"


def test_conversations_need_a_chat_template(
    refused: Refused, tiny_qwen3_dir: Path, prompts: Path, tmp_path: Path
) -> None:
    """A model without one is refused for chats, with what to do."""
    model = Path(shutil.copytree(tiny_qwen3_dir, tmp_path / "model"))
    (model / "chat_template.jinja").unlink()
    line = refused("data", "regenerate", prompts, "--target", model, "--out", tmp_path / "a")
    assert line.startswith("--chat-template: ")
