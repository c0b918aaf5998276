"""`forerun generate`: the same text with any drafter, where it goes, and what the JSON holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.conftest import Run
from forerun.engine import Engine
from forerun.sampling import Sampling

GREEDY = ("--temperature", 0, "--max-tokens", 24)
STATS = {
    "drafter", "rounds", "planned", "drafted", "verified", "accepted", "emitted", "mean_accepted_length",
    "tokens_per_step", "tokens_per_second", "probes", "skipped_steps",
}  # fmt: skip


@pytest.fixture(scope="module")
def plain_text(tiny_qwen3_dir: Path) -> str:
    """What the library gives for `def f`, greedy."""
    with Engine.load(str(tiny_qwen3_dir)) as engine:
        [completion] = engine.generate("def f", Sampling(temperature=0, max_tokens=24))
    return completion.text


def drafters(small: Path) -> list[tuple[object, ...]]:
    """Every way to ask for a drafter."""
    config = json.dumps({"method": "draft_model", "model": str(small), "num_speculative_tokens": 2})
    return [
        ("--drafter", "vanilla"),
        ("--drafter", "ngram"),
        ("--drafter", small),
        ("--drafter", small, "--num-speculative-tokens", 1),
        ("--drafter", "ngram", "--verify-mode", "coupled"),
        ("-sc", config),
        ("--speculative-config", "method: ngram\nprompt_lookup_max: 2"),
        ("--speculative-config.method", "ngram", "--speculative-config.prompt_lookup_max", 3),
        ("--speculative-config.method=small", f"--speculative-config.model={small}"),
        ("--drafter", small, "--speculative-config.draft_sample_method", "greedy"),
    ]


def test_the_same_text_with_any_drafter(run: Run, tiny_qwen3_dir: Path, tiny_small_dir: Path, plain_text: str) -> None:
    """Streamed to stdout and nothing else there; what was measured goes to stderr."""
    for flags in ((), *drafters(tiny_small_dir)):
        ran = run("generate", "--target", tiny_qwen3_dir, "--prompt", "def f", *GREEDY, *flags)
        assert (ran.code, ran.out) == (0, f"{plain_text}\n"), flags
        assert "24 tokens in" in ran.err


def test_a_config_file(run: Run, tiny_qwen3_dir: Path, tiny_small_dir: Path, tmp_path: Path, plain_text: str) -> None:
    """--speculative-config takes a path; a dotted key changes one value of it."""
    file = tmp_path / "spec.yaml"
    file.write_text(f"model: {tiny_small_dir}\nnum_speculative_tokens: 5\n")
    common = ("generate", "--target", tiny_qwen3_dir, "--prompt", "def f", *GREEDY, "--json", "-sc", file)
    ran = run(*common, "--speculative-config.num_speculative_tokens", 0)
    assert (ran.json["text"], ran.json["stats"]["drafted"]) == (plain_text, 0)
    assert run(*common).json["stats"]["drafted"] > 0


def test_several_drafters(run: Run, tiny_qwen3_dir: Path, tiny_small_dir: Path, plain_text: str) -> None:
    """A list of methods loads them all; the first one that proposes drafts."""
    ran = run(
        "generate", "--target", tiny_qwen3_dir, "--prompt", "def f", *GREEDY, "--json", "--drafter", "ngram,vanilla"
    )
    assert (ran.code, ran.json["text"]) == (0, plain_text)


# --------------------------------------------------------------------------------------------------------------- JSON


def test_json_of_one_answer(run: Run, tiny_qwen3_dir: Path, tiny_small_dir: Path, plain_text: str) -> None:
    """One object; the counters balance: 1 + emitted - discarded = tokens, and the rates follow from them."""
    ran = run(
        "generate", "--target", tiny_qwen3_dir, "--prompt", "def f", *GREEDY, "--json", "--drafter", tiny_small_dir
    )
    answer = ran.json
    assert {"text", "token_ids", "finish_reason", "stats"} <= set(answer)
    assert (answer["text"], answer["finish_reason"], len(answer["token_ids"])) == (plain_text, "length", 24)
    stats = answer["stats"]
    assert set(stats) == STATS
    assert stats["drafter"] == "small"
    assert 0 < stats["accepted"] < stats["drafted"]
    assert stats["emitted"] == stats["accepted"] + stats["rounds"]
    assert stats["emitted"] >= 23
    assert stats["tokens_per_step"] == stats["emitted"] / stats["rounds"]
    assert stats["tokens_per_second"] > 0
    assert ran.err == ""


def test_json_of_several_answers(run: Run, tiny_qwen3_dir: Path) -> None:
    """An array in the order of (prompt, sample); a sample's seed reproduces it alone."""
    stdin = b'{"prompt": "one"}\n{"prompt": [1, 2, 3]}\n{"prompt": "not run"}\n'
    flags = ("--target", tiny_qwen3_dir, "--max-tokens", 5, "--json")
    ran = run("generate", *flags, "--prompts", "-", "--limit", 2, "--n", 2, "--seed", 7, stdin=stdin)
    places = [(a["prompt_index"], a["sample_index"]) for a in ran.json]
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1)]
    alone = run("generate", *flags, "--prompt", "one", "--seed", ran.json[1]["seed"])
    assert alone.json["token_ids"] == ran.json[1]["token_ids"]


def test_json_without_drafts(run: Run, tiny_qwen3_dir: Path) -> None:
    """A rate without a denominator is null: the keys are always the same."""
    stats = run("generate", "--target", tiny_qwen3_dir, "--prompt", "x", "--max-tokens", 3, "--json").json["stats"]
    assert set(stats) == STATS
    assert (stats["drafter"], stats["drafted"], stats["mean_accepted_length"]) == ("vanilla", 0, None)


def test_logprobs(run: Run, tiny_qwen3_dir: Path) -> None:
    """One entry per token, with the best ones, best first."""
    ran = run("generate", "--target", tiny_qwen3_dir, "--prompt", "x", *GREEDY, "--logprobs", 2, "--json")
    entries = ran.json["logprobs"]
    assert [entry["token_id"] for entry in entries] == ran.json["token_ids"]
    for entry in entries:
        assert entry["top"][0] == [entry["token_id"], entry["logprob"]]
        assert entry["top"][0][1] >= entry["top"][1][1]


# ----------------------------------------------------------------------------------------------------------- sampling


def test_every_sampling_flag_reaches_the_engine(
    run: Run, tiny_qwen3_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was typed is what `Sampling` holds."""
    seen: list[Sampling] = []
    original = Engine.default_sampling

    def spy(self: Engine, **changes: object) -> Sampling:
        seen.append(original(self, **changes))
        return seen[-1]

    monkeypatch.setattr(Engine, "default_sampling", spy)
    sampling = "--temperature 0.5 --top-k 3 --top-p 0.9 --min-p 0.1 --seed 9 --n 2 --logprobs 1 --ignore-eos"
    penalties = "--repetition-penalty 1.2 --presence-penalty 0.3 --frequency-penalty -0.4 --bad-words C"
    stops = "--min-tokens 2 --max-tokens 4 --stop A --stop B --stop-token-ids 5,6 --stop-token-ids 7"
    flags = f"{sampling} {penalties} {stops} --include-stop-str-in-output".split(" ")
    bias = ("--logit-bias", '{"8": 1.5}', "--allowed-token-ids", ",".join(map(str, range(60))))
    ran = run("generate", "--target", tiny_qwen3_dir, "--prompt", "x", "--json", *flags, *bias)
    assert ran.code == 0, ran.err
    assert seen == [
        Sampling(
            temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, repetition_penalty=1.2, presence_penalty=0.3,
            frequency_penalty=-0.4, min_tokens=2, max_tokens=4, seed=9, n=2, stop=["A", "B"], stop_token_ids=[5, 6, 7],
            bad_words=["C"], ignore_eos=True, logprobs=1, include_stop_str_in_output=True, logit_bias={8: 1.5},
            allowed_token_ids=list(range(60)),
        )
    ]  # fmt: skip


def test_the_models_own_defaults_hold_unless_changed(run: Run, tiny_qwen3_dir: Path, tmp_path: Path) -> None:
    """Given > generation config > library: a model that says top_k = 1 decodes greedily at any temperature."""
    import shutil

    own = Path(shutil.copytree(tiny_qwen3_dir, tmp_path / "own"))
    config = json.loads((own / "generation_config.json").read_text())
    (own / "generation_config.json").write_text(json.dumps(config | {"do_sample": True, "top_k": 1}))
    flags = ("generate", "--prompt", "def f", "--max-tokens", 12, "--json")
    greedy = run(*flags, "--target", tiny_qwen3_dir, "--temperature", 0).json["token_ids"]
    assert run(*flags, "--target", own).json["token_ids"] == greedy
    assert run(*flags, "--target", own, "--top-k", 0, "--seed", 1).json["token_ids"] != greedy


def test_coupled_sampling_is_one_text_per_seed(run: Run, tiny_qwen3_dir: Path, tiny_small_dir: Path) -> None:
    """--verify-mode coupled: the same seed gives the same tokens with a drafter and without one."""
    flags = ("generate", "--target", tiny_qwen3_dir, "--prompt", "def f", "--seed", 3, "--max-tokens", 24, "--json")
    plain = run(*flags, "--verify-mode", "coupled").json
    drafted = run(*flags, "--verify-mode", "coupled", "--drafter", tiny_small_dir).json
    assert plain["token_ids"] == drafted["token_ids"]
    assert drafted["stats"]["accepted"] > 0
    assert plain["token_ids"] != run(*flags, "--verify-mode", "coupled", "--seed", 4).json["token_ids"]


# ------------------------------------------------------------------------------------------------- prompts and output


def test_prompts_from_files_and_standard_input(run: Run, tiny_qwen3_dir: Path, tmp_path: Path, plain_text: str) -> None:
    """@FILE, -, a literal @, a prompt a line, JSONL."""
    file = tmp_path / "prompt.txt"
    file.write_text("def f")
    flags = ("generate", "--target", tiny_qwen3_dir, *GREEDY)
    assert run(*flags, "--prompt", f"@{file}").out == f"{plain_text}\n"
    assert run(*flags, "--prompt", "-", stdin=b"def f").out == f"{plain_text}\n"
    assert run(*flags, "--prompts", "-", stdin=b"\ndef f\n\n").out == f"{plain_text}\n"
    assert run(*flags, "--prompts", "-", stdin=b'{"turns": ["x"]}\n{"prompt": "def f"}').out.endswith(f"{plain_text}\n")
    assert run(*flags, "--prompts", "-", stdin=b"def f\r\n").out == f"{plain_text}\n"
    whole = run(*flags, "--prompts", "-", "--json", stdin="a\x0cb\u2028c\n".encode()).json  # one line, one prompt
    assert whole["text"] == run(*flags, "--prompt", "a\x0cb\u2028c", "--json").json["text"]
    literal = run(*flags, "--prompt", "@@def f", "--json").json["text"]
    assert literal == run(*flags, "--prompt", "-", "--json", stdin=b"@def f").json["text"]


def test_several_answers_as_text_are_headed(run: Run, tiny_qwen3_dir: Path, tmp_path: Path, plain_text: str) -> None:
    """On the screen and in a file alike, in the order of the prompts whichever ends first."""
    flags = ("generate", "--target", tiny_qwen3_dir, *GREEDY, "--prompts", "-")
    ran = run(*flags, stdin=b"other\ndef f\n")
    assert ran.out.startswith("--- prompt 1 ---\n")
    assert ran.out.endswith(f"\n--- prompt 2 ---\n{plain_text}\n")
    file = tmp_path / "answers.txt"
    written = run(*flags, "--output", file, stdin=b"other\ndef f\n")
    assert (written.code, written.out, file.read_bytes().decode()) == (0, "", ran.out)


def test_output_is_written_whole(
    run: Run, tiny_qwen3_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old file stays as it was until the new one is complete; an interrupted run leaves nothing behind."""
    file = tmp_path / "answer.json"
    file.write_text("old")
    flags = ("generate", "--target", tiny_qwen3_dir, "--prompt", "x", *GREEDY, "--json", "--output", file)
    monkeypatch.setattr(Engine, "step", interrupt_after(5))
    assert run(*flags).code == 130
    assert ([*tmp_path.iterdir()], file.read_text()) == ([file], "old")
    monkeypatch.undo()
    assert run(*flags).code == 0
    assert len(json.loads(file.read_text())["token_ids"]) == 24


def test_prediction_is_drafted_from(run: Run, tiny_qwen3_dir: Path, tmp_path: Path, plain_text: str) -> None:
    """The expected text as a corpus of the ngram drafter: the same answer, most of it drafted."""
    file = tmp_path / "expected.txt"
    file.write_text(plain_text)
    flags = ("generate", "--target", tiny_qwen3_dir, "--prompt", "def f", *GREEDY, "--drafter", "ngram", "--json")
    without, ran = run(*flags).json, run(*flags, "--prediction", f"@{file}").json
    assert ran["text"] == plain_text
    assert ran["stats"]["accepted"] > without["stats"]["accepted"]


# ---------------------------------------------------------------------------------------------------------- the screen


def interrupt_after(steps: int):
    """An `Engine.step` that is interrupted by Ctrl-C before that step."""
    original, left = Engine.step, [steps]

    def step(self: Engine) -> bool:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return original(self)

    return step


def test_interrupting_keeps_what_was_printed(
    run: Run, tiny_qwen3_dir: Path, plain_text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C: exit code 130, no traceback, the beginning of the text stays."""
    monkeypatch.setattr(Engine, "step", interrupt_after(8))
    ran = run("generate", "--target", tiny_qwen3_dir, "--prompt", "def f", *GREEDY)
    assert ran.code == 130
    assert len(ran.out) > 1
    assert plain_text.startswith(ran.out)
    assert ran.err.strip() == ""


def test_show_drafts_colours_accepted_tokens(
    run: Run, tiny_qwen3_dir: Path, tiny_small_dir: Path, plain_text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Green where the drafter was right, plain elsewhere; the text itself does not change."""
    import re

    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    flags = ("generate", "--target", tiny_qwen3_dir, "--prompt", "def f", *GREEDY, "--drafter", tiny_small_dir)
    ran = run(*flags, "--show-drafts")
    assert re.findall("\x1b\\[1;32m", ran.out), ran.out
    assert "drafted and accepted" in ran.err

    refused = run(*flags, "--show-rejected")
    assert "\x1b[9;31m" in refused.out
    monkeypatch.setenv("NO_COLOR", "1")
    without = run(*flags, "--show-drafts").out
    assert "\x1b[32m" not in without
    assert "\x1b[1;32m" not in without
    monkeypatch.delenv("FORCE_COLOR")
    assert "\x1b" not in run(*flags, "--show-drafts").out


# ----------------------------------------------------------------------------------------------------- conversations


def test_a_file_of_conversations(run: Run, tiny_qwen3_dir: Path) -> None:
    """Several turns are answered one after another; each answer is part of the next prompt."""
    stdin = b'{"turns": ["a", "b"]}\n{"messages": [{"role": "user", "content": "a"}]}'
    ran = run("generate", "--target", tiny_qwen3_dir, *GREEDY, "--prompts", "-", "--json", stdin=stdin)
    first, second, single = ran.json
    assert [(x["prompt_index"], x["turn_index"]) for x in ran.json] == [(0, 0), (0, 1), (1, 0)]
    assert first["token_ids"] == single["token_ids"]
    history = [("user", "a"), ("assistant", first["text"]), ("user", "b")]
    messages = [{"role": role, "content": content} for role, content in history]
    stdin = json.dumps({"messages": messages}).encode()
    again = run("generate", "--target", tiny_qwen3_dir, *GREEDY, "--prompts", "-", "--json", stdin=stdin)
    assert again.json["token_ids"] == second["token_ids"]


def test_chat_reads_turns_from_a_pipe(run: Run, tiny_qwen3_dir: Path) -> None:
    """Each line is a turn over the same conversation, the same answers as for a file of turns; /exit ends it."""
    flags = ("generate", "--target", tiny_qwen3_dir, *GREEDY)
    turns = run(*flags, "--prompts", "-", "--json", stdin=b'{"turns": ["a", "b"]}').json
    chat = run(*flags, "--chat", "--json", stdin=b"a\n\nb\n/exit\nc\n").json
    assert [answer["token_ids"] for answer in chat] == [answer["token_ids"] for answer in turns]
    shown = run(*flags, "--chat", "--drafter", "ngram", stdin=b"a\nb\n")
    assert shown.out == "".join(f"{answer['text']}\n" for answer in turns)


def test_chat_starts_over_and_takes_a_system_message(run: Run, tiny_qwen3_dir: Path) -> None:
    """/reset forgets the turns, not the system message, which changes the answers."""
    flags = ("generate", "--target", tiny_qwen3_dir, *GREEDY, "--chat", "--json")
    plain, reset = run(*flags, stdin=b"a\n/reset\na\n").json
    assert plain["token_ids"] == reset["token_ids"]
    first, second = run(*flags, "--system", "S", stdin=b"a\n/reset\na\n").json
    assert first["token_ids"] == second["token_ids"] != plain["token_ids"]


def test_apply_chat_template(run: Run, tiny_qwen3_dir: Path) -> None:
    """A raw prompt put as a user message is the conversation of that one message."""
    flags = ("generate", "--target", tiny_qwen3_dir, *GREEDY, "--json")
    asked = run(*flags, "--prompt", "a", "--apply-chat-template").json
    assert run(*flags, "--prompts", "-", "--apply-chat-template", stdin=b"a").json["token_ids"] == asked["token_ids"]
    stdin = b'{"messages": [{"role": "user", "content": "a"}]}'
    assert asked["token_ids"] == run(*flags, "--prompts", "-", stdin=stdin).json["token_ids"]
    assert asked["token_ids"] != run(*flags, "--prompt", "a").json["token_ids"]


def test_the_answer_that_a_chat_ends_with_is_not_read(run: Run, tiny_qwen3_dir: Path) -> None:
    """Training data and regenerated answers serve as prompts: what is decoded is the answer, not one behind it."""
    flags = ("generate", "--target", tiny_qwen3_dir, *GREEDY, "--json", "--prompts", "-")
    asked = [{"role": "user", "content": "a"}]
    answered = [*asked, {"role": "assistant", "content": None, "tool_calls": []}, {"role": "assistant", "content": "b"}]
    plain, again = (run(*flags, stdin=json.dumps({"messages": one}).encode()).json for one in (asked, answered))
    assert plain["token_ids"] == again["token_ids"]
