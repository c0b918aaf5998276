"""Prompts of the commands that measure: files of a newcomer's own, put the way they are served."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from forerun.cli.bench_load import _domains
from forerun.cli.options import PromptFlags
from forerun.cli.prompts import named_prompts, prompt_ids
from forerun.target.load import load_target

ASKED = {"role": "user", "content": "a"}
ANSWER = {"role": "assistant", "content": "b"}


def test_plain_prompts_are_measured_as_chats(tiny_qwen3_dir: Path, tmp_path: Path) -> None:
    """With --apply-chat-template a prompt is a user's message, in the file of a domain too; a chat is one as it is."""
    tokenizer = load_target(str(tiny_qwen3_dir)).tokenizer
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a", "response": "b"}\n' + json.dumps({"messages": [ASKED]}))
    chat = tokenizer.encode(tokenizer.render_chat([ASKED]), False)
    put = PromptFlags(prompts=str(file), apply_chat_template=True)
    assert prompt_ids(named_prompts(put), tokenizer, 1) == [chat, chat]
    assert prompt_ids(named_prompts(PromptFlags(prompts=str(file))), tokenizer, 1) == [tokenizer.encode("a"), chat]
    [(name, records)] = _domains([f"d={file}"], PromptFlags(apply_chat_template=True))
    assert (name, prompt_ids(records, tokenizer, 0)) == ("d", [chat, chat])


COMMANDS = [["bench"], ["bench", "load"], ["calibrate"], ["compare"], ["verify"], ["recommend"], ["profile"]]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_the_packages_own_prompts_are_no_chats(refused: Callable[..., str], command: list[str]) -> None:
    """They are code to be completed, which a template would change in silence; told before anything is loaded."""
    line = refused(*command, "--target", "does-not-exist-anywhere", "--drafter", "ngram", "--apply-chat-template")
    assert line.startswith("--apply-chat-template: belongs to --prompts and --prompt"), line


@pytest.mark.parametrize("before", [[], [{"role": "system", "content": "Be brief."}]])
def test_a_chat_of_answers_alone_asks_for_nothing(
    refused: Callable[..., str], tmp_path: Path, before: list[dict[str, str]]
) -> None:
    """Its answers are not read; then nobody is left who asks."""
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"messages": [*before, ANSWER]}))
    line = refused("generate", "--target", "does-not-exist-anywhere", "--prompts", file)
    assert line.startswith("--prompts: line 1: 'messages' has only answers"), line
