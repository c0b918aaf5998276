"""Input that cannot be used gets exit code 2 and one line that names the option: no traceback, no output file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from forerun.cli.options import EngineFlags
from forerun.errors import OptionError
from tiny import qwen3, save_tokenizer

Refused = Callable[..., str]


@pytest.fixture
def model(tiny_qwen3_dir: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model to damage."""
    return Path(shutil.copytree(tiny_qwen3_dir, tmp_path / "model"))


@pytest.fixture
def denied(refused: Refused, tmp_path: Path) -> Refused:
    """`generate` refused, asked to write a file; the file must not appear, nor anything beside it."""

    def call(*args: object, stdin: bytes = b"") -> str:
        folder = tmp_path / "output"
        folder.mkdir(exist_ok=True)
        line = refused("generate", "--output", folder / "answer.json", "--json", *args, stdin=stdin)
        assert list(folder.iterdir()) == []
        return line

    return call


def test_vanilla_drafts_nothing_either(denied: Refused) -> None:
    """Named or not: a number of tokens to draft is not dropped in silence."""
    line = denied("--prompt", "a", "--drafter", "vanilla", "--num-speculative-tokens", 4)
    assert line.startswith("--num-speculative-tokens: nothing drafts")


def test_an_empty_name_is_said_to_be_empty(denied: Refused) -> None:
    """Not looked for: to the file system it is the working folder."""
    assert denied("--prompt", "@").startswith("--prompt: name a file behind @")
    assert denied("--prompt", "a", "--target", "") == "--target: is empty; name a model"
    for drafter in ("", "ngram,,small"):
        assert denied("--prompt", "a", "--drafter", drafter) == "--drafter: a name is empty"


def test_what_colours_is_refused_by_the_name_that_was_given(refused: Refused) -> None:
    """--show-rejected implies --show-drafts; it is not the one to leave away."""
    for flag in ("--show-drafts", "--show-rejected"):
        assert refused("generate", "--prompt", "a", "--json", flag).startswith(f"{flag}: colours text")


NESTED = '{"prompt": ' + "[" * 100_000
"""Deeper than Python's reader of JSON goes."""
DIGITS = '{"prompt": [' + "9" * 5000 + "]}"
"""JSON, with a number of more digits than Python reads."""

VALUES = [
    (["--temperature", "-1"], "--temperature"),
    (["--temperature", "nan"], "--temperature"),
    (["--temperature", "inf"], "--temperature"),
    (["--temperature", "hot"], "--temperature"),
    (["--temperature", "1e300"], "--temperature"),
    (["--top-p", "0"], "--top-p"),
    (["--top-p", "1.1"], "--top-p"),
    (["--top-p", "nan"], "--top-p"),
    (["--min-p", "nan"], "--min-p"),
    (["--presence-penalty", "nan"], "--presence-penalty"),
    (["--min-predicted-gain", "nan"], "--min-predicted-gain"),
    (
        ["--drafter", "ngram", "--speculative-config.confidence_threshold", ".nan"],
        "--speculative-config.confidence_threshold",
    ),
    (["--min-p", "-0.1"], "--min-p"),
    (["--top-k", "-2"], "--top-k"),
    (["--n", "0"], "--n"),
    (["--max-tokens", "-1"], "--max-tokens"),
    (["--min-tokens", "9", "--max-tokens", "3"], "--min-tokens"),
    (["--repetition-penalty", "0"], "--repetition-penalty"),
    (["--repetition-penalty", "1e-320"], "--repetition-penalty"),
    (["--presence-penalty", "3"], "--presence-penalty"),
    (["--frequency-penalty", "-2.5"], "--frequency-penalty"),
    (["--logit-bias", "{5: 1}"], "--logit-bias"),
    (["--logit-bias", "[1]"], "--logit-bias"),
    (["--logit-bias", NESTED], "--logit-bias"),
    (["--logit-bias", '{"5": 1e999}'], "--logit-bias"),
    (["--logit-bias", '{"5": 1e300}'], "--logit-bias"),
    (["--stop-token-ids", "1,x"], "--stop-token-ids"),
    (["--stop", ""], "--stop"),
    (["--bad-words", ""], "--bad-words"),
    (["--logprobs", "-1"], "--logprobs"),
    (["--seed", "99999999999999999999"], "--seed"),
    (["--num-speculative-tokens", "-1"], "--num-speculative-tokens"),
    (["--num-speculative-tokens", "many"], "--num-speculative-tokens"),
    (["--verify-mode", "lossy"], "--verify-mode"),
    (["--max-num-seqs", "0"], "--max-num-seqs"),
    (["--threads", "0"], "--threads"),
    (["--threads", "100000"], "--threads"),
    (["--device", "tpu"], "--device"),
    (["--dtype", "float8"], "--dtype"),
    (["--max-model-len", "100000"], "--max-model-len"),
    (["--kv-cache-memory-bytes", "1"], "--kv-cache-memory-bytes"),
    (["--limit", "0"], "--limit"),
    (["--system", "Be brief."], "--system"),
    (["--show-drafts"], "--show-drafts"),
    (["--speculative-config", "{"], "--speculative-config"),
    (["--speculative-config", '{"method": "ngram", "modle": 1}'], "--speculative-config.modle"),
    (["--speculative-config", '{"method": "ngram", "num_speculative_tokens": -1}'], "--num-speculative-tokens"),
    (["--speculative-config", '{"method": "ngram", "min_draft": -1}'], "--speculative-config.min_draft"),
    (["--speculative-config", "missing.yaml"], "--speculative-config"),
    (["--speculative-config.method", "mtp"], "--speculative-config.method"),
    (["--speculative-config.method"], "--speculative-config.method"),
    (["--speculative-config.min_draft", "9" * 5000], "--speculative-config.min_draft"),
    (["--speculative-config.min_draft", "[" * 5000], "--speculative-config.min_draft"),
    (["--num-speculative-tokens", "3"], "--num-speculative-tokens"),
    (["--revision", "main"], "--revision"),
    (["--drafter", "mtp"], "--drafter"),
    (["--drafter", "ngram", "--speculative-config", '{"method": "ngram"}'], "--drafter"),
]


@pytest.mark.parametrize(("flags", "named"), VALUES, ids=[" ".join(flags)[:70] for flags, _ in VALUES])
def test_a_value_that_cannot_be_used_names_its_option(
    denied: Refused, tiny_qwen3_dir: Path, flags: list[str], named: str
) -> None:
    """Whether typer, the sampling options, the engine or the drafter's config finds it."""
    line = denied("--target", tiny_qwen3_dir, "--prompt", "hello", *flags)
    assert line.startswith(f"{named}: "), line


def test_the_message_says_what_was_expected(denied: Refused) -> None:
    """The value and its range, before any model is loaded."""
    assert denied("--prompt", "x", "--top-p", "0") == "--top-p: must be in (0, 1], got 0.0"


# ------------------------------------------------------------------------------------------------------------ prompts


def test_a_prompt_is_needed(denied: Refused) -> None:
    """None, or two sources, are refused."""
    assert denied().startswith("--prompt: give one of")
    assert denied("--prompt", "a", "--prompts", "b").startswith("--prompt: give one of")


def test_empty_prompts(denied: Refused, tmp_path: Path) -> None:
    """An empty text, file, standard input or list of prompts."""
    empty = tmp_path / "empty"
    empty.write_text("\n")
    assert denied("--prompt", "").startswith("--prompt: is empty")
    assert denied("--prompt", "-").startswith("--prompt: is empty")
    assert denied("--prompts", empty).startswith("--prompts: ")
    assert "line 1" in denied("--prompts", "-", stdin=b'{"prompt": ""}')


def test_missing_prompt_files(denied: Refused) -> None:
    """A missing file is named; for @FILE the way to write a literal @ is told."""
    assert "nowhere.jsonl" in denied("--prompts", "nowhere.jsonl")
    line = denied("--prompt", "@dataclass")
    assert line.startswith("--prompt: cannot read dataclass")
    assert "@@" in line


def test_invalid_utf8(denied: Refused, tmp_path: Path) -> None:
    """In a file, on standard input and in an argument (which Python hands over with surrogates)."""
    broken = tmp_path / "broken.txt"
    broken.write_bytes(b"ab\xffcd")
    assert denied("--prompts", broken).endswith("is not valid UTF-8 (byte 0xff at 2)")
    assert denied("--prompt", f"@{broken}").startswith("--prompt: ")
    assert denied("--prompt", "-", stdin=b"\xc3").startswith("--prompt: standard input is not valid UTF-8")
    assert denied("--prompt", "ab\udcff").startswith("--prompt: is not valid UTF-8")


@pytest.mark.parametrize(
    "line",
    ['{"prompt": ', '{"promt": "x"}', '{"prompt": "x", "turns": ["y"]}', '{"turns": "x"}', '{"messages": [1]}', "[]"],
)
def test_prompt_lines_that_are_not_understood(denied: Refused, line: str) -> None:
    """The line is numbered."""
    message = denied("--prompts", "-", stdin=b'{"prompt": "fine"}\n' + line.encode())
    assert message.startswith("--prompts: line 2")


@pytest.mark.parametrize(
    ("line", "said"),
    [(NESTED, "is nested too deep"), (DIGITS, "has a number of too many digits")],
    ids=["nested", "digits"],
)
def test_json_that_python_cannot_read_is_told_in_one_line(
    denied: Refused, refused: Refused, tmp_path: Path, line: str, said: str
) -> None:
    """It is no mistake of the grammar: with the number of the line in a file, with the option where it was typed."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(f'{{"prompt": "fine"}}\n{line}\n')
    assert denied("--prompts", prompts) == f"--prompts: line 2 {said}"
    predict = tmp_path / "measured.json"
    predict.write_text(line)
    assert refused("simulate", "--predict", predict).startswith(f"--predict: cannot read {predict}: ")
    assert refused("serve", "embedded", "--override-generation-config", line).endswith(f": {said}")
    out = tmp_path / "out"
    assert refused("data", "prepare", prompts, "--out", out, "--chat-template-kwargs", line) == (
        f"--chat-template-kwargs: {said}"
    )


def test_a_key_without_a_value_is_told_as_that(denied: Refused) -> None:
    """Not as a key that was misspelt."""
    assert denied("--prompts", "-", stdin=b'{"prompt": null}') == "--prompts: line 1: 'prompt' is null"
    assert "has no keys" in denied("--prompts", "-", stdin=b"{}")


def test_standard_input_without_a_prompt(denied: Refused) -> None:
    """By its name, not by the dash that stands for it."""
    assert denied("--prompts", "-") == "--prompts: standard input holds no prompt"


def test_prompt_longer_than_the_window(denied: Refused, tiny_qwen3_dir: Path) -> None:
    """The window and the length are told, and in a file the line."""
    line = denied("--target", tiny_qwen3_dir, "--prompt", "x" * 300)
    assert line.startswith("--prompt: has 300 tokens; the window of 256")
    line = denied("--target", tiny_qwen3_dir, "--prompts", "-", stdin=b"short\n" + b"x" * 300)
    assert line.startswith("--prompts: line 2: has 300 tokens")


def test_conversations_need_a_chat_template(denied: Refused, model: Path) -> None:
    """A model without a template is refused for chats, with what to do."""
    (model / "chat_template.jinja").unlink()
    stdin = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
    assert "no chat template" in denied("--target", model, "--prompts", "-", stdin=stdin)
    assert denied("--target", model, "--chat", stdin=b"hi\n").startswith("--chat: ")
    line = denied("--target", model, "--prompt", "hi", "--apply-chat-template")
    assert line == "--apply-chat-template: the model has no chat template"


def test_a_chat_that_the_template_refuses(denied: Refused, model: Path) -> None:
    """The template's own words, under the flag the chat came by."""
    (model / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    stdin = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
    line = denied("--target", model, "--prompts", "-", stdin=stdin)
    assert line.startswith("--prompts: ")
    assert "roles must alternate" in line


def test_ids_outside_the_vocabulary(denied: Refused, tiny_qwen3_dir: Path) -> None:
    """They would fail or wrap around in the middle of decoding."""
    for flag, value in (("--stop-token-ids", "264"), ("--allowed-token-ids", "9999"), ("--logit-bias", '{"264": 1}')):
        assert denied("--target", tiny_qwen3_dir, "--prompt", "x", flag, value).startswith(f"{flag}: ")


# ------------------------------------------------------------------------------------------------------------- models


def test_missing_target(denied: Refused) -> None:
    """A path that does not exist; what was looked for is told."""
    assert denied("--prompt", "x", "--target", "./no/such/model").startswith("--target: ")
    assert denied("--prompt", "x", "--target", "missing.gguf").startswith("--target: missing.gguf does not exist")


def test_a_revision_is_of_the_hub(denied: Refused, refused: Refused, tiny_qwen3_dir: Path, tmp_path: Path) -> None:
    """What is here has none: it is not left out in silence."""
    assert denied("--prompt", "x", "--revision", "main").startswith("--revision: embedded is no model of the hub")
    prepare = ("data", "prepare", tmp_path, "--out", tmp_path / "out", "--target", tiny_qwen3_dir)
    assert refused(*prepare, "--revision", "main").startswith(f"--revision: {tiny_qwen3_dir} is no model of the hub")


def test_a_length_of_drafts_needs_a_drafter(denied: Refused, refused: Refused) -> None:
    """Before anything is loaded; K = 0 is plain decoding, which it asks for."""
    said = "--num-speculative-tokens: nothing drafts; name a --drafter, or leave it out"
    assert denied("--prompt", "x", "--num-speculative-tokens", "3") == said
    for command in ("serve", "profile", "doctor"):
        assert refused(command, "embedded", "--num-speculative-tokens", "3") == said


def test_more_threads_than_any_machine_has_are_refused_before_any_is_started(refused: Refused) -> None:
    """By every command: a target is not told to be broken because no thread was left to load it."""
    for command in (["generate", "--prompt", "x"], ["doctor"], ["profile", "embedded"]):
        assert refused(*command, "--threads", 100_000) == "--threads: must be in 1 .. 1024, got 100000"


OWN = "--speculative-config.num_speculative_tokens"


def test_a_length_given_twice_is_given_alike(denied: Refused, refused: Refused) -> None:
    """By a flag, and by the keys of every drafter: both are named, before anything is loaded."""
    said = f"--num-speculative-tokens: 4 contradicts {OWN} 2; give one of them"
    assert denied("--prompt", "x", "--drafter", "ngram", "--num-speculative-tokens", 4, OWN, 2) == said
    given = ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}', "--num-speculative-tokens", 4)
    for command in ("serve", "verify", "bench", "doctor"):
        place = ("embedded",) if command in ("serve", "doctor") else ()
        assert refused(command, *place, *given) == said


def test_a_length_is_the_default_of_drafters_that_set_none() -> None:
    """And may be said twice."""
    own, none = '{"method": "ngram", "num_speculative_tokens": 2}', "small"
    for drafter, k in (([own], 2), ([own, none], 4), ([none], 4), ([own], None), (["vanilla"], 0)):
        assert len(EngineFlags(drafter=drafter, num_speculative_tokens=k).drafters()) == len(drafter)
    with pytest.raises(OptionError, match=f"4 contradicts {OWN} 0"):
        EngineFlags(drafter=[own.replace("2", "0"), own.replace("ngram", "small")], num_speculative_tokens=4).drafters()


def test_a_verify_mode_given_twice_is_given_alike(denied: Refused) -> None:
    """It is one for all drafters of an engine, so one that names another contradicts the flag."""
    flags = ("--drafter", "ngram", "--speculative-config.verify_mode", "coupled")
    line = denied("--prompt", "x", *flags, "--verify-mode", "rejection")
    assert line == "--verify-mode: rejection contradicts --speculative-config.verify_mode coupled; give one of them"


def test_measured_costs_are_kept_in_a_folder(denied: Refused, tmp_path: Path) -> None:
    """A file there would never be read."""
    (tmp_path / "costs.json").touch()
    line = denied("--prompt", "x", "--calibration-cache", tmp_path / "costs.json")
    assert line == f"--calibration-cache: {tmp_path / 'costs.json'} is a file; name a folder, or off"


@pytest.mark.parametrize("content", [NESTED, DIGITS], ids=["nested", "digits"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_config_that_python_cannot_read(denied: Refused, model: Path, name: str, content: str) -> None:
    """Its file is named."""
    (model / name).write_text(content)
    assert denied("--prompt", "x", "--target", model).startswith(f"--target: {model / name} is not valid JSON: ")


def test_a_header_that_python_cannot_read(denied: Refused, model: Path) -> None:
    """Of a file of weights."""
    header = NESTED.encode()
    (model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert "is not a safetensors file" in denied("--prompt", "x", "--target", model)


def test_truncated_safetensors(denied: Refused, model: Path) -> None:
    """Half a weight file, and one of a few bytes."""
    weights = model / "model.safetensors"
    for size in (weights.stat().st_size // 2, 5, 0):
        weights.write_bytes(weights.read_bytes()[:size])
        line = denied("--prompt", "x", "--target", model)
        assert line.startswith("--target: ")
        assert "truncated" in line


def test_truncated_gguf(denied: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GGUF file that ends within its header."""
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "half.gguf"
    file.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + (5).to_bytes(8, "little"))
    assert denied("--prompt", "x", "--target", file).startswith("--target: ")


def test_pickled_weights(denied: Refused, model: Path) -> None:
    """Weights that could run code when they are loaded."""
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    line = denied("--prompt", "x", "--target", model)
    assert line.startswith("--target: ")
    assert "pickle" in line


def test_remote_code(denied: Refused, model: Path) -> None:
    """A model with Python of its own needs --trust-remote-code; nothing of it runs."""
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "odd", "auto_map": {"AutoConfig": "odd.C", "AutoModelForCausalLM": "odd.M"}}
    (model / "config.json").write_text(json.dumps(config))
    marker = model / "ran"
    (model / "odd.py").write_text(f"open({str(marker)!r}, 'w')")
    line = denied("--prompt", "x", "--target", model)
    assert line.startswith("--target: ")
    assert "--trust-remote-code" in line
    assert not marker.exists()


def test_damaged_config(denied: Refused, model: Path) -> None:
    """A config that is not JSON."""
    (model / "config.json").write_text("{")
    assert denied("--prompt", "x", "--target", model).startswith("--target: ")


def test_missing_and_truncated_drafters(denied: Refused, tiny_qwen3_dir: Path, model: Path) -> None:
    """What is wrong with a drafter's model is said of --drafter, not of --target."""
    for drafter in ("./no/such/model", model):
        (model / "model.safetensors").write_bytes(b"")
        line = denied("--prompt", "x", "--target", tiny_qwen3_dir, "--drafter", drafter)
        assert line.startswith("--drafter: ")


def test_wrong_vocabulary(denied: Refused, tiny_qwen3_dir: Path, tmp_path: Path) -> None:
    """A drafter whose tokenizer is another one."""
    other = tmp_path / "other"
    qwen3(1).save_pretrained(other)
    save_tokenizer(other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {token: (i + 1) % len(vocabulary) for token, i in vocabulary.items()}
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    line = denied("--prompt", "x", "--target", tiny_qwen3_dir, "--drafter", other)
    assert line.startswith("--drafter: ")
    assert "vocabular" in line


# ------------------------------------------------------------------------------------------------------------- output


def test_output_that_cannot_be_written(refused: Refused, tmp_path: Path) -> None:
    """A folder, and a folder that does not exist: told before a model is loaded."""
    for place in (tmp_path, tmp_path / "missing" / "file"):
        assert refused("generate", "--prompt", "x", "--output", place).startswith("--output: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"forerun_format": 1, "kind": "eagle3"}, "what --drafter"),
        ({"speculators_model_type": "eagle3"}, "an EAGLE-3 drafter in the speculators format of vLLM"),
    ],
)
def test_a_drafter_is_no_target(refused: Refused, tmp_path: Path, config: dict[str, object], what: str) -> None:
    """Taken for a model it would lack a tokenizer, which nobody should add."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    line = refused("generate", "--target", tmp_path, "--prompt", "a")
    assert line.startswith(f"--target: {tmp_path} holds {what}"), line
    assert line.endswith("; the target is the model that it drafts for")
