"""Which tokens are learned, under templates of several families: marks made by hand, and what has to be refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import data_chats as chats
import pytest
from data_chats import CHATML, GEMMA, MISTRAL, THINKING, ids_of, tokenizer

from forerun.errors import ModelError, OptionError
from forerun.training.data.dataset import Sample
from forerun.training.data.records import ids_hash, read_record
from forerun.training.data.rendering import Rendering
from forerun.training.data.report import Dropped
from forerun.training.data.samples import Choice, Samples
from forerun.training.data.sources import Raw

ENDS = {
    "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "</s>", "<|end|>",
}  # fmt: skip


def message(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


USER, ANSWER = message("user", "hi"), message("assistant", "Hello.")
TWO = [USER, ANSWER, message("user", "bye"), message("assistant", "Bye!")]


def samples(
    content: dict[str, Any],
    template: str | None,
    options: dict[str, Any] | None = None,
    merges: Any = (),
    **choice: Any,
) -> list[Sample | tuple[str, Dropped]]:
    """What becomes of one record."""
    own = tokenizer(template, merges)
    rendering = Rendering(own, ids_of(own, *ENDS), options)
    record = read_record(Raw("chats line 3", {"id": "x", **content}), "DATA")
    return list(Samples(rendering, Choice(**{"max_length": 4096, **choice})).of(record))


def marked(sample: Sample | tuple[str, Dropped]) -> str:
    """A sample as text, learned tokens in guillemets."""
    assert isinstance(sample, Sample), sample
    own = tokenizer(None)
    text, inside = "", False
    for token, learned in zip(sample.token_ids.tolist(), sample.loss_mask.tolist(), strict=True):
        text += "«" if learned and not inside else "»" if inside and not learned else ""
        text += own.decode([token], skip_special_tokens=False)
        inside = learned
    return text + "»" * inside


def mark(messages: Sequence[dict[str, Any]], template: str, **more: Any) -> str:
    [sample] = samples({"messages": list(messages), **more.pop("record", {})}, template, **more)
    return marked(sample)


def reason(*args: Any, **more: Any) -> str:
    """Why the only sample was left out."""
    [(_, dropped)] = samples(*args, **more)
    return str(dropped)


# ------------------------------------------------------------------------------------------------------ golden chats

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
TOOL_CHAT = [USER, message("assistant", "", tool_calls=[CALL]), message("tool", "1"), message("assistant", "It is 1.")]
THOUGHT = message("assistant", "Hello.", reasoning_content="Greet.")

GOLDEN = {
    "ChatML": (
        CHATML, TWO,
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        "«Hello.<|im_end|>»\n<|im_start|>user\nbye<|im_end|>\n<|im_start|>assistant\n«Bye!<|im_end|>»",
    ),
    "ChatML with a system message": (
        CHATML, [message("system", "Be brief."), USER, ANSWER],
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        "«Hello.<|im_end|>»",
    ),
    "Llama": (
        chats.LLAMA, TWO,
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n«Hello.<|eot_id|>»"
        "<|start_header_id|>user<|end_header_id|>\n\nbye<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n«Bye!<|eot_id|>»",
    ),
    "Llama with a tool": (
        chats.LLAMA, [*TOOL_CHAT[:2], message("tool", "1"), TOOL_CHAT[3]],
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"
        '<|start_header_id|>assistant<|end_header_id|>\n\n«{"name": "add", "arguments": {"a": 1}}<|eom_id|>»'
        "<|start_header_id|>tool<|end_header_id|>\n\n1<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n«It is 1.<|eot_id|>»",
    ),
    "Gemma": (
        GEMMA, [USER, message("assistant", " Hello. \n"), *TWO[2:]],
        "<bos><start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n«Hello.<end_of_turn>»\n"
        "<start_of_turn>user\nbye<end_of_turn>\n<start_of_turn>model\n«Bye!<end_of_turn>»",
    ),
    "Mistral": (
        MISTRAL, [message("system", "Be brief."), *TWO],
        "<s>[INST] Be brief.\n\nhi [/INST]« Hello.</s>»[INST] bye [/INST]« Bye!</s>»",
    ),
    "Phi": (
        chats.PHI, TWO,
        "<|user|>\nhi<|end|>\n<|assistant|>\n«Hello.<|end|>»\n<|user|>\nbye<|end|>\n<|assistant|>\n«Bye!<|end|>»",
    ),
    "thinking": (
        THINKING, [USER, THOUGHT],
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n«<think>\nGreet.\n</think>\n\nHello.<|im_end|>»",
    ),
    "marked by the template": (
        chats.MARKED, [*TWO[:3], message("assistant", "Bye!", reasoning_content="Part.")],
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n«Hello.<|im_end|>»\n<|im_start|>user\nbye<|im_end|>\n"
        "<|im_start|>assistant\n<think>Part.</think>«Bye!<|im_end|>»",
    ),
    "characters of several bytes": (
        CHATML, [message("system", "ß"), message("user", "日本"), message("assistant", "🙂é")],
        "<|im_start|>system\nß<|im_end|>\n<|im_start|>user\n日本<|im_end|>\n<|im_start|>assistant\n«🙂é<|im_end|>»",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GOLDEN)
def test_da_1_the_mask_equals_the_mark(name: str) -> None:
    """DA-1: the answers and the token that ends each of them, nothing before and nothing behind.

    https://github.com/sgl-project/SpecForge/issues/885 https://github.com/vllm-project/speculators/issues/794
    """
    template, messages, expected = GOLDEN[name]
    text = mark(messages, template)
    if "日" in expected:  # bytes of one character have no text of their own
        [sample] = samples({"messages": messages}, template)
        assert isinstance(sample, Sample)
        own = tokenizer(None)
        text = own.decode(sample.token_ids[~sample.loss_mask].tolist(), False) + "«"
        text += own.decode(sample.token_ids[sample.loss_mask].tolist(), False) + "»"
    assert text == expected


def test_da_1_tools() -> None:
    """DA-1: the tools are in the prompt, a call is learned with its arguments as an object, a result is not learned."""
    [sample] = samples({"messages": TOOL_CHAT, "tools": TOOLS}, CHATML)
    assert marked(sample) == (
        '<|im_start|>system\nBe kind.\n<tools>\n{"type": "function", "function": {"name": "add", "parameters": {}}}\n'
        "</tools><|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        '«<tool_call>add {"a": 1}</tool_call><|im_end|>»\n<|im_start|>user\n<result>1</result><|im_end|>\n'
        "<|im_start|>assistant\n«It is 1.<|im_end|>»"
    )


@pytest.mark.parametrize("merges", [(), [("Ċ", "Ċ")], [("Ċ", "H"), ("l", "l")]])
def test_the_ids_are_those_that_serving_has(merges: Any) -> None:
    """Up to each answer the sample has the ids of the prompt that serving renders, whatever the tokenizer merges."""
    own = tokenizer(CHATML, merges)
    rendering = Rendering(own, ids_of(own, "<|im_end|>"))
    for content in ("Hello.", "\nHello.", "\n\nll"):
        messages = [USER, message("assistant", content)]
        [sample] = samples({"messages": messages}, CHATML, merges=merges)
        assert isinstance(sample, Sample)
        prompt = rendering.prompt(messages[:1])
        start = sample.loss_mask.tolist().index(True)
        assert sample.token_ids[:start].tolist() == prompt
        assert own.decode(sample.token_ids[start:].tolist(), False) == f"{content}<|im_end|>"


# ------------------------------------------------------------------------------------------------ templates refused


def test_da_1_a_template_that_changes_earlier_turns_is_an_error() -> None:
    """DA-1: thoughts that are forgotten, tools that move on: the message shows where the two renderings part, and what
    to do. One answer at a time is rendered as serving does.

    https://github.com/sgl-project/SpecForge/issues/885 https://github.com/vllm-project/speculators/issues/794
    """
    chat = [USER, THOUGHT, *TWO[2:3], message("assistant", "Bye!", reasoning_content="Part.")]
    with pytest.raises(OptionError, match=r"--turns: .*chats line 3.*<think>.*then 'Hello\..*'split'") as caught:
        mark(chat, THINKING)
    assert caught.value.option == "--turns"
    with pytest.raises(OptionError, match=r"--turns: .*<tools>"):
        mark(TWO, chats.MISTRAL_TOOLS, record={"tools": TOOLS})
    assert mark(chat, THINKING, turns="last") == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n<|im_start|>user\nbye<|im_end|>\n"
        "<|im_start|>assistant\n«<think>\nPart.\n</think>\n\nBye!<|im_end|>»"
    )
    first, second = samples({"messages": chat}, THINKING, turns="split")
    assert marked(first) == mark([USER, THOUGHT], THINKING)
    assert marked(second) == mark(chat, THINKING, turns="last")
    assert [first[0], second[0]] == ["x#1", "x#2"]


def test_ts_9_an_empty_thought_of_the_prompt_is_not_learned() -> None:
    """TS-9: with thinking off the template's empty thought belongs to the prompt, with thinking on to the answer.

    https://github.com/z-lab/dflash/issues/133 https://github.com/SafeAILab/EAGLE/issues/227
    """
    head = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert mark([USER, ANSWER], THINKING) == f"{head}«<think>\n\n</think>\n\nHello.<|im_end|>»"
    off = {"enable_thinking": False}
    assert mark([USER, ANSWER], THINKING, options=off) == f"{head}<think>\n\n</think>\n\n«Hello.<|im_end|>»"


def test_a_prompt_that_no_answered_chat_begins_with_is_an_error() -> None:
    """The two renderings and where they part."""
    with pytest.raises(OptionError, match=r"--chat-template: where an answer begins .*<think>.*Hello"):
        mark([USER, ANSWER], chats.FORCED)


def test_an_answer_without_an_end_is_an_error() -> None:
    """The target would never stop there: its ends are named."""
    with pytest.raises(OptionError, match=r"--chat-template: where an answer ends .*'Hello\.\\n'.*<\|im_end\|>"):
        mark([USER, ANSWER], "{% for m in messages %}{{ m.role + ':' + m.content + '\n' }}{% endfor %}"
             "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}")  # fmt: skip


def test_no_template_at_all() -> None:
    """A chat needs one; text does not."""
    with pytest.raises(ModelError, match="--chat-template: the tokenizer has no chat template"):
        samples({"messages": TWO}, None)
    [sample] = samples({"prompt": "a", "completion": "b"}, None)
    assert marked(sample) == "a«b»"


def test_reserved_template_options_are_refused() -> None:
    """What the rendering itself sets."""
    for name in ("add_generation_prompt", "tools"):
        with pytest.raises(OptionError, match=f"--chat-template-kwargs: '{name}'"):
            samples({"messages": TWO}, CHATML, options={name: True})


# -------------------------------------------------------------------------------------------------- records left out


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ({"messages": [USER]}, "no assistant turn"),
        ({"turns": ["hi", "ho"]}, "no assistant turn"),
        ({"messages": [ANSWER]}, "an answer to nothing: the assistant speaks first"),
        ({"messages": [USER, message("assistant", " \n")]}, "empty answer"),
        ({"messages": [USER, message("assistant", "a<|im_end|>b")]}, "an end of sequence within an answer"),
        ({"messages": [USER, message("assistant", "\ud83d")]}, "invalid UTF-8"),
        ({"messages": [USER, {**ANSWER, "weight": 0}]}, "no assistant turn"),
        ({"prompt": "x"}, "no answer"),
        ({"text": ""}, "no text"),
        ({"messages": [USER, message("assistant", "x" * 5000)]}, "longer than --max-length"),
    ],
)
def test_records_left_out(content: dict[str, Any], why: str) -> None:
    """Each for its own reason."""
    assert reason(content, CHATML) == why


def test_a_template_that_refuses_is_a_reason() -> None:
    """With its words as the detail."""
    [(where, dropped)] = samples({"messages": [message("system", "x"), *TWO]}, GEMMA)
    assert (where, str(dropped), dropped.detail.split(": ")[-1]) == (
        "chats line 3, id x", "the template refuses it", "System role not supported",
    )  # fmt: skip


def test_messages_of_no_weight_are_context() -> None:
    """OpenAI's `weight`: 0 keeps an answer from being learned."""
    chat = [USER, {**ANSWER, "weight": 0}, *TWO[2:]]
    assert mark(chat, MISTRAL) == "<s>[INST] hi [/INST] Hello.</s>[INST] bye [/INST]« Bye!</s>»"


def test_overlong_samples() -> None:
    """Skipped, or cut behind the last learned token that fits; left out if none does."""
    assert "longer" in reason({"messages": TWO}, MISTRAL, max_length=20)
    assert mark(TWO, MISTRAL, max_length=20, overlong="truncate") == "<s>[INST] hi [/INST]« Hello.</s>»"
    assert mark(TWO, MISTRAL, max_length=10, overlong="truncate") == "<s>[INST] hi [/INST]« He»"
    assert "before its first answer" in reason({"messages": TWO}, MISTRAL, max_length=5, overlong="truncate")


def test_unfinished_answers_are_kept_without_an_end_or_dropped() -> None:
    """The target did not end them, so the end that the template writes is not learned."""
    record = {"finish_reason": "length"}
    assert mark(TWO, MISTRAL, record=record).endswith("« Hello.</s>»[INST] bye [/INST]« Bye!»")
    assert "length limit" in reason({"messages": TWO, **record}, MISTRAL, unfinished="drop")


# ------------------------------------------------------------------------------------------------------- plain text


def test_plain_text_needs_no_template() -> None:
    """A completion is learned, its prompt is not; all of a text is."""
    assert marked(samples({"prompt": "def f", "completion": "(x):"}, CHATML)[0]) == "def f«(x):»"
    assert marked(samples({"text": "a text"}, CHATML)[0]) == "«a text»"


def test_a_completion_is_encoded_apart_where_it_would_merge() -> None:
    """Serving gives the target the prompt's ids, and no emitted token reaches back into them."""
    own = tokenizer(None, [("e", "x")])
    [sample] = samples({"prompt": "te", "completion": "xt ex"}, None, merges=[("e", "x")])
    assert isinstance(sample, Sample)
    assert sample.token_ids.tolist() == own.encode("te") + own.encode("xt ex")
    assert sample.loss_mask.tolist() == [False] * 2 + [True] * 4


# ------------------------------------------------------------------------------------------------------- emitted ids


def emitted(messages: Sequence[dict[str, Any]], template: str, *ids: list[int]) -> dict[str, Any]:
    """A record as `regenerate` writes it."""
    own = tokenizer(template)
    rendering = Rendering(own, frozenset())
    places = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    hashes = [ids_hash(rendering.prompt(messages[:place])) for place in places]
    return {"messages": list(messages), "token_ids": list(ids), "prompt_hashes": hashes, "finish_reason": "stop"}


def test_emitted_ids_are_learned_as_they_are() -> None:
    """Ids that the text would not be encoded to, in a conversation and alone; what the target ended the template does
    not end once more."""
    own = tokenizer(MISTRAL)
    [end] = ids_of(own, "</s>")
    odd = [*own.encode(" Hel"), *own.encode("<bos>"), *own.encode("lo."), end]  # a special token has no text
    record = emitted(TWO, MISTRAL, odd, [*own.encode(" Bye!"), end])
    [sample] = samples(record, MISTRAL)
    assert marked(sample) == "<s>[INST] hi [/INST]« Hel<bos>lo.</s>»[INST] bye [/INST]« Bye!</s>»"
    [single] = samples(emitted(TWO[:2], MISTRAL, odd), MISTRAL)
    assert marked(single) == "<s>[INST] hi [/INST]« Hel<bos>lo.</s>»"
    assert marked(samples(record, MISTRAL, retokenize=True)[0]) == mark(TWO, MISTRAL)


def test_emitted_ids_without_an_end() -> None:
    """An answer cut by its length, or by a stop string: the template's end is context between turns, and left away
    behind the last one."""
    own = tokenizer(MISTRAL)
    record = emitted(TWO, MISTRAL, own.encode(" Hel"), own.encode(" By"))
    [sample] = samples(record, MISTRAL)
    assert marked(sample) == "<s>[INST] hi [/INST]« Hel»</s>[INST] bye [/INST]« By»"


def test_emitted_ids_serve_where_text_cannot() -> None:
    """A template whose answered chats differ from its prompts: the ids that followed the prompt need no rendering."""
    own = tokenizer(chats.FORCED)
    ids = [*own.encode("Greet.</think>Hello."), *ids_of(own, "<|endoftext|>")]
    [sample] = samples(emitted([USER, ANSWER], chats.FORCED, ids), chats.FORCED)
    assert marked(sample) == "<|user|>hi<|assistant|><think>\n«Greet.</think>Hello.<|endoftext|>»"


def test_ts_9_ids_emitted_under_another_template_are_refused() -> None:
    """TS-9: answered with thinking on, prepared with thinking off.

    https://github.com/z-lab/dflash/issues/133 https://github.com/SafeAILab/EAGLE/issues/227
    """
    record = emitted([USER, ANSWER], THINKING, [1, 2])
    assert isinstance(samples(record, THINKING)[0], Sample)
    with pytest.raises(OptionError, match="--chat-template: chats line 3 was answered to other prompt ids"):
        samples(record, THINKING, options={"enable_thinking": False})
    retokenized = samples(record, THINKING, options={"enable_thinking": False}, retokenize=True)
    assert isinstance(retokenized[0], Sample)
