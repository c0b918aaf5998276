"""Answers by our own engine: what it emits, all of it, once, whatever happens in between."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from forerun.engine import Engine
from forerun.errors import OptionError
from forerun.sampling import Sampling
from forerun.target.outline import outline
from forerun.training.data import Dataset
from forerun.training.data.engine_answers import EngineAnswers
from forerun.training.data.jobs import Answer, Job, jobs_of
from forerun.training.data.prepare import Preparation, write
from forerun.training.data.records import ids_hash, read_record
from forerun.training.data.regenerate import AnswerFile, Regeneration
from forerun.training.data.rendering import Rendering
from forerun.training.data.report import Dropped
from forerun.training.data.samples import Choice
from forerun.training.data.sources import Raw, Sources

TURNS = [{"id": f"p{i}", "turns": [f"word {i}"]} for i in range(12)]


@pytest.fixture(scope="module")
def engine(tiny_qwen3_dir: Path) -> Iterator[Engine]:
    with Engine.load(str(tiny_qwen3_dir), max_num_seqs=4) as engine:
        yield engine


def prompts(folder: Path, *records: dict[str, Any]) -> Sources:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return Sources([str(path)], "PROMPTS")


def answerer(engine: Engine, **sampling: Any) -> EngineAnswers:
    rendering = Rendering(engine.target.tokenizer, engine.target.eos_token_ids)
    return EngineAnswers(engine, rendering, Sampling(**{"temperature": 0, "max_tokens": 8, **sampling}))


def regenerate(
    engine: Engine, folder: Path, *records: dict[str, Any], samples: int = 1, **sampling: Any
) -> Regeneration:
    """Answers to records, in `answers.jsonl`."""
    run = Regeneration(prompts(folder, *records), samples)
    by = answerer(engine, **sampling)
    with AnswerFile(folder / "answers.jsonl", by.model, by.sampling) as file:
        run.run(by, file)
    return run


def answers(folder: Path) -> dict[str, dict[str, Any]]:
    """The file by id; no id is there twice."""
    found = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    assert len({one["id"] for one in found}) == len(found)
    return {one["id"]: one for one in found}


# ------------------------------------------------------------------------------------------------------ what is said


def test_da_2_answers_are_the_targets_own_decoded_together(engine: Engine, tmp_path: Path) -> None:
    """DA-2: what plain decoding gives for each prompt alone, in far fewer steps than one after another would take.

    https://github.com/sgl-project/SpecForge/issues/306 https://github.com/sgl-project/SpecForge/issues/192
    https://github.com/vllm-project/speculators/issues/751
    """
    steps = 0
    original = engine.step

    def step() -> bool:
        nonlocal steps
        steps += 1
        return original()

    engine.step = step  # type: ignore[method-assign]
    try:
        run = regenerate(engine, tmp_path, *TURNS)
    finally:
        engine.step = original  # type: ignore[method-assign]
    found = answers(tmp_path)
    assert run.answered == len(found) == 12
    tokenizer = engine.target.tokenizer
    for record in TURNS:
        ids = tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": record["turns"][0]}]), False)
        [alone] = engine.generate([ids], Sampling(temperature=0, max_tokens=8))
        one = found[record["id"]]
        assert one["messages"][1] == {"role": "assistant", "content": alone.text}
        assert (one["token_ids"], one["finish_reason"]) == ([alone.token_ids], alone.finish_reason)
        assert one["prompt_hashes"] == [ids_hash(ids)]
        assert (one["model"], one["sampling"]) == (engine.target.name, {"temperature": 0, "max_tokens": 8})
    assert run.tokens == sum(len(one["token_ids"][0]) for one in found.values())
    assert steps < run.tokens / 2


def test_da_2_prepared_samples_hold_the_emitted_ids(engine: Engine, tiny_qwen3_dir: Path, tmp_path: Path) -> None:
    """DA-2: prompt as serving renders it, then exactly what the target emitted, all of it learned.

    https://github.com/sgl-project/SpecForge/issues/306 https://github.com/sgl-project/SpecForge/issues/192
    https://github.com/vllm-project/speculators/issues/751
    """
    regenerate(engine, tmp_path, *TURNS, {"id": "raw", "prompt": "def f"}, max_tokens=20)
    target = outline(str(tiny_qwen3_dir))
    rendering = Rendering(target.tokenizer, target.eos_token_ids)
    sources = Sources([str(tmp_path / "answers.jsonl")], "DATA")
    write(Preparation(sources, target, rendering, Choice(max_length=256)), tmp_path / "data")
    found = answers(tmp_path)
    data = Dataset(tmp_path / "data")
    assert {sample.id for sample in data} == set(found)
    for sample in data:
        [ids] = found[sample.id]["token_ids"]
        assert sample.token_ids[sample.loss_mask].tolist() == ids
        text = target.tokenizer.decode(sample.token_ids[~sample.loss_mask].tolist(), False)
        asked = found[sample.id].get("prompt") or target.tokenizer.render_chat(found[sample.id]["messages"][:1])
        assert text == asked


def test_drafters_do_not_change_answers(tiny_qwen3_dir: Path, tiny_small_dir: Path, tmp_path: Path) -> None:
    """Any drafter may be used to answer sooner."""
    made = []
    for number, drafter in enumerate((None, "ngram", str(tiny_small_dir))):
        folder = tmp_path / str(number)
        folder.mkdir()
        with Engine.load(str(tiny_qwen3_dir), drafter=drafter, max_num_seqs=4) as engine:
            regenerate(engine, folder, *TURNS[:4])
        made.append(answers(folder))
    assert made[0] == made[1] == made[2]


def test_turns_are_answered_one_after_another(engine: Engine, tmp_path: Path) -> None:
    """Each over the target's own earlier answers; answers that were there are replaced, the system message stays."""
    system = {"role": "system", "content": "s"}
    foreign = [
        system,
        *(m for i in range(2) for m in ({"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": "x"})),
    ]
    regenerate(
        engine, tmp_path, {"id": "a", "turns": ["q0", "q1"]}, {"id": "b", "messages": foreign}, ignore_eos=True,
        stop_token_ids=list(range(97, 123)), max_tokens=64,
    )  # fmt: skip
    tokenizer = engine.target.tokenizer
    for one in answers(tmp_path).values():
        messages = one["messages"]
        assert [m["content"] for m in messages if m["role"] == "user"] == ["q0", "q1"]
        assert len(one["token_ids"]) == len(one["prompt_hashes"]) == 2
        places = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        for place, ids, name in zip(places, one["token_ids"], one["prompt_hashes"], strict=True):
            prompt = tokenizer.encode(tokenizer.render_chat(messages[:place]), False)
            assert ids_hash(prompt) == name
            assert messages[place]["content"] == tokenizer.decode(ids[:-1])
    assert answers(tmp_path)["b"]["messages"][0] == system


def test_a_turn_that_was_cut_is_the_last(engine: Engine, tmp_path: Path) -> None:
    """Nobody would go on from half an answer; what was answered is kept, what was not is told."""
    run = regenerate(engine, tmp_path, {"id": "a", "turns": ["q0", "q1"]}, max_tokens=3, ignore_eos=True)
    one = answers(tmp_path)["a"]
    assert [m["role"] for m in one["messages"]] == ["user", "assistant"]
    assert one["finish_reason"] == "length"
    assert run.cut.as_dict() == {"later turns after finish_reason length": {"count": 1, "example": "a"}}
    assert run.failed.total == 0


def test_several_answers_to_a_prompt(engine: Engine, tmp_path: Path) -> None:
    """Numbered, different, and of one group, so that they are held out together."""
    regenerate(engine, tmp_path, {"id": "a", "turns": ["q"]}, samples=3, temperature=1.0, seed=5)
    found = answers(tmp_path)
    assert set(found) == {"a#1", "a#2", "a#3"}
    assert {one["group"] for one in found.values()} == {"a"}
    assert len({json.dumps(one["token_ids"]) for one in found.values()}) == 3
    record = read_record(Raw("x", found["a#2"]), "DATA")
    assert (record.id, record.group) == ("a#2", "a")


def test_a_seed_gives_the_same_answers_in_any_order(engine: Engine, tiny_qwen3_dir: Path, tmp_path: Path) -> None:
    """A seed per id: neither the order of the prompts nor how many are decoded together changes an answer."""
    (tmp_path / "b").mkdir()
    regenerate(engine, tmp_path, *TURNS[:5], temperature=1.0, seed=3)
    with Engine.load(str(tiny_qwen3_dir), max_num_seqs=1) as single:
        regenerate(single, tmp_path / "b", *TURNS[4::-1], temperature=1.0, seed=3)
    assert answers(tmp_path) == answers(tmp_path / "b")
    assert len({json.dumps(one["token_ids"]) for one in answers(tmp_path).values()}) == 5


def test_prompts_without_an_answer_are_counted_and_the_rest_goes_on(engine: Engine, tmp_path: Path) -> None:
    """Too long for the window."""
    run = regenerate(
        engine, tmp_path, {"id": "long", "turns": ["x" * 300]}, *TURNS[:2], {"id": "l2", "prompt": "y" * 256}
    )
    assert set(answers(tmp_path)) == {"p0", "p1"}
    [(reason, told)] = run.failed.as_dict().items()
    assert reason == "a prompt too long for the window or the KV memory"
    assert told["count"] == 2
    assert "window of 256" in told["example"]


# --------------------------------------------------------------------------------------------------- interruptions


class Stop(Exception):
    pass


class Stopping(AnswerFile):
    """Breaks off before the answer of a number, as a killed process does."""

    def __init__(self, left: int, *args: Any):
        super().__init__(*args)
        self.left = left

    def add(self, record: Any) -> None:
        self.left -= 1
        if self.left < 0:
            raise Stop
        super().add(record)


@pytest.mark.parametrize("cut", [0, 1, 7, -1])
def test_da_2_an_interrupted_run_goes_on_where_it_was(engine: Engine, tmp_path: Path, cut: int) -> None:
    """DA-2: broken off three times after a few answers, the last line cut by so many bytes: in the end every prompt has
    its answer, once, the one of an uninterrupted run; no answer is computed twice but the one that was cut.

    https://github.com/sgl-project/SpecForge/issues/306 https://github.com/sgl-project/SpecForge/issues/192
    https://github.com/vllm-project/speculators/issues/751
    """
    whole = tmp_path / "whole"
    whole.mkdir()
    regenerate(engine, whole, *TURNS)
    path, sources, by = tmp_path / "answers.jsonl", prompts(tmp_path, *TURNS), answerer(engine)
    for count in (1, 4, 2):
        with pytest.raises(Stop), Stopping(count, path, by.model, by.sampling) as file:
            Regeneration(sources).run(by, file)
        if cut:
            path.write_bytes(path.read_bytes()[:-cut] if cut > 0 else path.read_bytes() + b'{"id": "p')
        engine.audit()
    kept = len(path.read_bytes().split(b"\n")) - 1
    run = Regeneration(sources)
    with AnswerFile(path, by.model, by.sampling) as file:
        run.run(by, file)
    assert run.answered == 12 - kept
    assert answers(tmp_path) == answers(whole)


def opened(path: Path, model: str = "m", **sampling: Any) -> AnswerFile:
    return AnswerFile(path, model, {"temperature": 0, **sampling})


def test_answers_of_another_kind_are_not_mixed(tmp_path: Path) -> None:
    """Of another model, or otherwise sampled: the difference is shown and the file stays as it is."""
    path = tmp_path / "answers.jsonl"
    with opened(path, logit_bias={5: 1.0}) as file:
        file.add({"id": "a"})
    before = path.read_bytes()
    with opened(path, logit_bias={5: 1.0}) as file:
        assert file.done == {"a"}
    for model, sampling, differs in (("n", {"logit_bias": {5: 1.0}}, "model"), ("m", {"top_k": 5}, "sampling")):
        with pytest.raises(OptionError, match=rf"--out: .* has answers of another {differs} .*name another file"):
            opened(path, model, **sampling)
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", ['{"id": "a"}\n', "some text", "text\n", "[1]\n", '{"prompt": "x"}'])
def test_a_file_of_something_else_is_not_touched(tmp_path: Path, content: str) -> None:
    """Prompts, or notes, named by mistake: also one without a line end, which looks like a cut line."""
    path = tmp_path / "answers.jsonl"
    path.write_text(content)
    with pytest.raises(OptionError, match=r"--out: .* is not a file of answers"):
        opened(path)
    assert path.read_text() == content


def test_two_processes_do_not_write_one_file(tmp_path: Path) -> None:
    """The second one is refused while the first one writes."""
    path = tmp_path / "answers.jsonl"
    with opened(path), pytest.raises(OptionError, match=r"--out: .* is being written by another process"):
        opened(path)
    with opened(path):
        pass


def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written stays."""
    with opened(tmp_path / "answers.jsonl") as file:
        file.add({"id": "a"})
        monkeypatch.setattr(
            "forerun.journal.Journal.add", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left"))
        )
        with pytest.raises(OptionError, match=r"--out: cannot write .*No space left"):
            file.add({"id": "b"})
    assert set(answers(tmp_path)) == {"a"}


# ---------------------------------------------------------------------------------------------------- what is asked


class Echo:
    """Answers every turn with its number."""

    model = "echo"
    sampling: Mapping[str, Any] = MappingProxyType({})

    def run(self, jobs: Iterator[Job]) -> Generator[Job]:
        for job in jobs:
            while not job.over:
                job.take(Answer({"role": "assistant", "content": f"a{len(job.answers)}"}, "stop", 1))
            yield job


def asked(*records: dict[str, Any]) -> list[dict[str, Any]]:
    """Records of answered jobs, or why nothing is asked."""
    made: list[Any] = []
    for content in records:
        try:
            made += [job.record() for job in Echo().run(iter(jobs_of(read_record(Raw("f", content), "PROMPTS"))))]
        except Dropped as dropped:
            made.append(str(dropped))
    return made


def test_records_that_ask_nothing() -> None:
    """Texts, empty prompts, chats without a user."""
    system = {"role": "system", "content": "s"}
    answer = {"role": "assistant", "content": "x"}
    records = ({"text": "x"}, {"prompt": ""}, {"messages": [system]}, {"messages": [answer]})
    assert asked(*records) == ["no prompt"] * 4


def test_results_of_tools_keep_their_history() -> None:
    """Results belong to the calls that were made: those are context, and only the last answer is written anew."""
    user, result = {"role": "user", "content": "q"}, {"role": "tool", "content": "1"}
    call = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}
    tools = [{"name": "f"}]
    [made] = asked({"id": "a", "messages": [user, call, result, {"role": "assistant", "content": "x"}], "tools": tools})
    answer = {"role": "assistant", "content": "a0"}
    assert made["messages"] == [user, {**call, "weight": 0}, result, answer]
    assert made["tools"] == tools
    record = read_record(Raw("x", made), "DATA")
    assert record.body.answers == [3]  # type: ignore[union-attr]


def test_plain_prompts_get_plain_completions() -> None:
    """Without a template."""
    assert asked({"id": "a", "prompt": "q", "completion": "old"}) == [
        {"id": "a", "prompt": "q", "completion": "a0", "finish_reason": "stop"}
    ]


def test_only_what_is_missing_is_asked(tmp_path: Path) -> None:
    """By id; --limit counts prompts, answered or not; duplicates are asked once."""
    run = Regeneration(prompts(tmp_path, *TURNS[:4], {"id": "again", "turns": TURNS[0]["turns"]}, {"text": "x"}))
    assert [job.id for job in run.jobs({"p1"}, run.left_out)] == ["p0", "p2", "p3"]
    assert {reason: one["count"] for reason, one in run.left_out.as_dict().items()} == {"duplicate": 1, "no prompt": 1}
    run.limit = 2
    assert [job.id for job in run.jobs({"p1"})] == ["p0"]
