"""`forerun serve`: what is wrong with the command line is told before anything is loaded or listened at."""

from __future__ import annotations

import os
import socket

import pytest

from forerun.cli.main import main
from forerun.cli.serve import ServeFlags
from forerun.errors import OptionError


@pytest.mark.parametrize(
    ("flags", "option"),
    [
        (["--max-queue", "-1"], "--max-queue"),
        (["--drain-timeout", "0"], "--drain-timeout"),
        (["--override-generation-config", "{"], "--override-generation-config"),
        (["--override-generation-config", "[1]"], "--override-generation-config"),
        (["--override-generation-config", '{"temprature": 1}'], "--override-generation-config"),
        (["--allowed-origins", '{"a": 1}'], "--allowed-origins"),
        (["--chat-template", "no-such-file"], "--chat-template"),
        (["--reasoning-parser", "other"], "--reasoning-parser"),
        (["--tool-call-parser", "other"], "--tool-call-parser"),
        (["--metrics-compat", "sglang"], "--metrics-compat"),
        (["--per-request-spec-decode-metrics", "all"], "--per-request-spec-decode-metrics"),
        (["--logprobs-mode", "processed_logits"], "--logprobs-mode"),
        (["--salt-cache-per-key"], "--salt-cache-per-key"),
        (["--tokenizer", "no-such-folder"], "--tokenizer"),
        (["--quantization", "awq"], "--quantization"),
        (["--no-enable-chunked-prefill"], "--no-enable-chunked-prefill"),
        (["--block-size", "32"], "--block-size"),
        (["--api-key", ""], "--api-key"),
        (["--drafter", "ngrma"], "--drafter"),
        (["--nothing"], "--nothing"),
        (["embedded-small", "--target", "other"], "--target"),
        (["--override-generation-config", '{"temperature": -1}'], "--override-generation-config"),
        (["--override-generation-config", '{"repetition_penalty": 1e-320}'], "--override-generation-config"),
    ],
    ids=str,
)
def test_a_flag_that_cannot_be_used_is_named(refused, flags, option):
    """One line, exit code 2."""
    assert refused("serve", *flags).startswith(f"{option}: ")


def test_flags_of_vllm_that_ask_for_what_is_so_are_accepted(refused):
    """They are no error: the line is about the port, which comes after all of them."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        flags = [
            "--enable-auto-tool-choice",
            "--enable-chunked-prefill",
            "--enable-prefix-caching",
            "--enforce-eager",
        ]
        assert refused("serve", *flags, "--block-size", "16", "--port", port).startswith("--port: cannot listen at")


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--host", "192.0.2.1"], "--host: cannot listen at 192.0.2.1:0: "),  # an address of no machine (RFC 5737)
        (["--host", "no such host"], "--host: cannot listen at no such host:0: "),
        (["--port", "65536"], "--port: must be in 0 .. 65535, got 65536"),
        (["--port", "-1"], "--port: must be in 0 .. 65535, got -1"),
    ],
    ids=str,
)
def test_an_address_that_cannot_be_used_is_named_by_its_part(refused, flags, line):
    """Which of the two to change."""
    assert refused("serve", "--port", "0", *flags).startswith(line)


@pytest.mark.parametrize("held", ["secret\n", " secret", "secret"])
def test_a_key_read_from_a_file_is_the_key(held, monkeypatch):
    """Mounted secrets end in a newline, which no client sends: with it the server would be closed to everybody."""
    monkeypatch.setenv("FORERUN_API_KEY", held)
    assert ServeFlags().options().api_key == ("secret",)
    assert ServeFlags(api_key=["other"]).options().api_key == ("other", "secret")


def test_a_key_of_blanks_leaves_no_server_open(monkeypatch):
    """Refused, and not taken for none."""
    monkeypatch.setenv("FORERUN_API_KEY", " \n")
    with pytest.raises(OptionError, match="--api-key"):
        ServeFlags().options()
    monkeypatch.setenv("FORERUN_API_KEY", "")
    assert ServeFlags().options().api_key == ()


def test_a_missing_template_file_gets_no_hint_about_prompts(refused):
    """`@@` is a spelling of prompts."""
    assert refused("serve", "--chat-template", "nothing") == (
        "--chat-template: cannot read nothing: No such file or directory"
    )


@pytest.mark.parametrize("loading", [False, True])
def test_a_process_that_was_stopped_while_loading_ends(loading, monkeypatch):
    """At once, and as a stop that was asked for."""
    codes: list[int] = []
    monkeypatch.setattr("forerun.serve.run.serve", lambda *_: loading)
    monkeypatch.setattr(os, "_exit", codes.append)
    assert main(["serve", "embedded"]) == 0
    assert codes == [0] * loading


def test_it_listens_to_this_machine_alone_unless_told_otherwise(monkeypatch):
    """--host is needed for any other address."""
    hosts: list[str] = []
    monkeypatch.setattr("forerun.serve.run.serve", lambda *given: hosts.append(given[2]))
    assert main(["serve", "embedded"]) == main(["serve", "embedded", "--host", "0.0.0.0"]) == 0
    assert hosts == ["127.0.0.1", "0.0.0.0"]


def test_help_is_quick_and_names_the_groups(run):
    """Help needs neither torch nor the web framework."""
    ran = run("serve", "--help")
    assert ran.code == 0
    for word in ("--api-key", "--max-queue", "--served-model-name", "--drafter", "--metrics-compat"):
        assert word in ran.out
    assert main(["serve", "--help"]) == 0
