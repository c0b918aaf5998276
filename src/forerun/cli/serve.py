"""`forerun serve`: an OpenAI-compatible server."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli.console import notes
from forerun.cli.load import chosen_drafters
from forerun.cli.options import EngineFlags, flags
from forerun.cli.prompts import parse_json, read_text
from forerun.errors import ForerunError, OptionError, not_imported

if TYPE_CHECKING:
    from forerun.drafters.config import SpeculativeConfig
    from forerun.engine import Engine
    from forerun.serve.options import ServeOptions

_SERVER, _REQUESTS, _WATCHING = "Server", "Requests", "Watching"
KEY_VARIABLE = "FORERUN_API_KEY"
"""Holds a key that would otherwise be seen in the list of processes."""


def _flag(text: str, panel: str, *names: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, metavar=metavar, show_default=False)


@dataclass(frozen=True, kw_only=True)
class AddressFlags:
    """Where it listens."""

    host: Annotated[str, _flag("Address; 0.0.0.0 is every network (default: 127.0.0.1).", _SERVER)] = "127.0.0.1"
    port: Annotated[int, _flag("Port; 0: any that is free (default: 8000).", _SERVER)] = 8000


@dataclass(frozen=True, kw_only=True)
class ServeFlags:
    """One flag for each field of `ServeOptions`; None: its default there."""

    served_model_name: Annotated[
        list[str] | None, _flag("Name it answers to instead of the target's; may be repeated.", _SERVER)
    ] = None
    api_key: Annotated[
        list[str] | None, _flag(f"Key clients must send; may be repeated; also {KEY_VARIABLE}.", _SERVER)
    ] = None
    allowed_origins: Annotated[
        str | None, _flag("JSON list of origins browsers may call from; default: none.", _SERVER, metavar="JSON")
    ] = None
    max_queue: Annotated[int | None, _flag("Answers that may wait; beyond: 429 (256).", _SERVER)] = None
    max_body_bytes: Annotated[int | None, _flag("Largest body (8 MiB).", _SERVER)] = None
    request_timeout: Annotated[float | None, _flag("Deadline of every request, in seconds (none).", _SERVER)] = None
    drain_timeout: Annotated[float | None, _flag("Seconds for running requests at a stop (60).", _SERVER)] = None
    write_timeout: Annotated[float | None, _flag("Seconds a client may leave an event unread (60).", _SERVER)] = None
    sse_ping_interval: Annotated[float | None, _flag("Seconds of silence before a ping (15).", _SERVER)] = None
    ignore_unknown_fields: Annotated[
        bool, _flag("Warn about unknown fields instead of refusing them.", _REQUESTS, "--ignore-unknown-fields")
    ] = False
    seed: Annotated[int | None, _flag("Where the seeds of requests without one begin.", _REQUESTS)] = None
    max_logprobs: Annotated[int | None, _flag("Most log-probabilities a request may ask for (20).", _REQUESTS)] = None
    logprobs_mode: Annotated[
        str | None, _flag("raw_logprobs (default), or processed_logprobs: of the law tokens are drawn from.", _REQUESTS)
    ] = None
    generation_config: Annotated[
        str | None, _flag("auto (the model's sampling defaults), vllm (none) or a folder.", _REQUESTS)
    ] = None
    override_generation_config: Annotated[
        str | None, _flag("Sampling defaults: '{\"temperature\": 0.7}'.", _REQUESTS, metavar="JSON")
    ] = None
    tokenizer: Annotated[
        str | None, _flag("Folder of a tokenizer in place of the model's own.", _SERVER, metavar="DIR")
    ] = None
    chat_template: Annotated[
        str | None, _flag("Jinja file or text in place of the model's own template.", _REQUESTS, metavar="FILE")
    ] = None
    trust_request_chat_template: Annotated[
        bool, _flag("Let requests bring a template.", _REQUESTS, "--trust-request-chat-template")
    ] = False
    reasoning_parser: Annotated[
        str | None, _flag("deepseek_r1 or qwen3: <think> becomes reasoning_content.", _REQUESTS)
    ] = None
    tool_call_parser: Annotated[
        str | None, _flag("auto (default: as the template says), hermes, llama3_json, mistral or none.", _REQUESTS)
    ] = None
    salt_cache_per_key: Annotated[
        bool, _flag("Keys find nothing of each other in the prefix cache.", _SERVER, "--salt-cache-per-key")
    ] = False
    metrics_compat: Annotated[str | None, _flag("vllm: its series as well.", _WATCHING)] = None
    per_request_spec_decode_metrics: Annotated[
        str | None, _flag("none, summary (default) or detailed, in each answer.", _WATCHING)
    ] = None
    enable_per_request_metrics: Annotated[
        bool, _flag("Times in each answer's metrics.", _WATCHING, "--enable-per-request-metrics")
    ] = False
    enable_force_include_usage: Annotated[
        bool, _flag("Usage at the end of every stream.", _WATCHING, "--enable-force-include-usage")
    ] = False
    timings: Annotated[bool, _flag("llama.cpp's timings in each answer.", _WATCHING, "--timings")] = False
    disable_log_stats: Annotated[bool, _flag("No lines about throughput.", _WATCHING, "--disable-log-stats")] = False
    log_stats_interval: Annotated[float | None, _flag("Seconds between them (10).", _WATCHING)] = None
    enable_log_requests: Annotated[
        bool, _flag("Log every request with its prompt.", _WATCHING, "--enable-log-requests")
    ] = False
    otlp_traces_endpoint: Annotated[
        str | None, _flag("OpenTelemetry collector; needs the extra otel.", _WATCHING, metavar="URL")
    ] = None

    def options(self) -> ServeOptions:
        """OptionError: a value that cannot be used."""
        from forerun.serve.options import ServeOptions

        given = {f.name: getattr(self, f.name) for f in fields(self)}
        chosen = {name: value for name, value in given.items() if value is not None and value is not False}
        keys = [*(self.api_key or ()), *filter(None, [os.environ.get(KEY_VARIABLE)])]
        # A secret that was read from a file ends in a newline, which no header can hold.
        chosen |= {
            "api_key": tuple(key.strip() for key in keys),
            "served_model_name": tuple(self.served_model_name or ()),
        }
        if self.allowed_origins is not None:
            chosen["allowed_origins"] = tuple(_json("--allowed-origins", self.allowed_origins, list))
        if self.override_generation_config is not None:
            name = "--override-generation-config"
            chosen["override_generation_config"] = _json(name, self.override_generation_config, dict)
        if self.chat_template is not None and "{" not in self.chat_template:
            chosen["chat_template"] = read_text("--chat-template", self.chat_template)
        return ServeOptions(**chosen)


@dataclass(frozen=True, kw_only=True)
class OperatorFlags:
    """Flags of `vllm serve` that ask for what is so in any case; any other value of them is refused."""

    enable_auto_tool_choice: Annotated[
        bool, _flag("Always so; taken from vLLM's command lines.", _REQUESTS, "--enable-auto-tool-choice")
    ] = False
    enable_chunked_prefill: Annotated[
        bool,
        _flag(
            "Always so; taken from vLLM's command lines.",
            _SERVER,
            "--enable-chunked-prefill/--no-enable-chunked-prefill",
        ),
    ] = True
    enforce_eager: Annotated[bool, _flag("Always so; taken from vLLM's command lines.", _SERVER, "--enforce-eager")] = (
        False
    )
    block_size: Annotated[int | None, _flag("Tokens of a KV block: 16, no other.", _SERVER)] = None
    quantization: Annotated[str | None, _flag("Not built; see --dtype.", _SERVER)] = None

    def check(self) -> None:
        """OptionError: something that is asked for is not built."""
        from forerun.target.base import BLOCK_SIZE

        if not self.enable_chunked_prefill:
            raise OptionError("--no-enable-chunked-prefill", "prefills are chunked; see --max-num-batched-tokens")
        if self.quantization is not None:
            raise OptionError(
                "--quantization",
                f"{self.quantization!r} is not built: weights are computed with in --dtype, those of a .gguf file too; "
                "--dtype bfloat16 takes half the memory of float32",
            )
        if self.block_size not in (None, BLOCK_SIZE):
            raise OptionError("--block-size", f"KV blocks have {BLOCK_SIZE} tokens here, got {self.block_size}")


@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """What is served differently than the model alone says."""

    enable_prefix_caching: Annotated[
        bool | None,
        _flag(
            "Keep the KV rows of prompts for those that begin alike (the default).",
            _SERVER,
            "--enable-prefix-caching/--no-enable-prefix-caching",
        ),
    ] = None

    def load(self, flags: EngineFlags, configs: Sequence[SpeculativeConfig]) -> Engine:
        """The engine to serve. ForerunError names the flag it is about."""
        from forerun.cli.load import load_with

        given = self.enable_prefix_caching
        return load_with(flags, configs, **({} if given is None else {"enable_prefix_caching": given}))


@flags
def serve(
    engine: EngineFlags,
    address: AddressFlags,
    options: ServeFlags,
    operator: OperatorFlags,
    models: ModelFlags,
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="As --target.", show_default=False)] = None,
) -> None:
    """Serve a model behind the OpenAI API, drafting ahead: every option works the same with drafters and without.

    forerun serve embedded --drafter small
    """
    operator.check()
    chosen = options.options()
    engine = engine.at(model)
    configs = chosen_drafters(engine)  # what is wrong there is told before anything is loaded
    try:
        from forerun.serve.run import serve as run
    except ImportError as error:
        why = not_imported(error, "serve", "fastapi", "uvicorn", "prometheus_client")
        raise ForerunError(f"forerun serve {why}") from error

    def listening(url: str) -> None:
        _log_to_stderr()
        notes().print(f"listening at {url}, loading {engine.source}")
        if address.host not in ("127.0.0.1", "localhost", "::1") and not chosen.api_key:
            notes().print(f"{address.host} without --api-key: whoever reaches it can use it", style="yellow")

    if run(lambda: models.load(engine, configs), chosen, address.host, address.port, listening):
        sys.stderr.flush()
        os._exit(0)  # told to stop while it loads: the thread that does could take minutes, a download longer


def _json(option: str, text: str, kind: type[Any]) -> Any:
    found = parse_json(option, text)
    if not isinstance(found, kind):
        raise OptionError(option, f"must be a JSON {'list' if kind is list else 'object'}, got {text}")
    return found


def _log_to_stderr() -> None:
    """Lines in vLLM's form: level, date, time, text."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s %(message)s", "%m-%d %H:%M:%S"))
    for name in ("forerun", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.propagate = False
    logging.getLogger("forerun").setLevel(logging.INFO)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
