"""What `forerun serve` can be told beside models and engine limits; every default has its home here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from forerun.errors import OptionError
from forerun.parsing import json_of
from forerun.sampling import LogprobsMode, Sampling

SpecMetrics = Literal["none", "summary", "detailed"]

TOOL_CALL_PARSERS = ("auto", "hermes", "llama3_json", "mistral", "none")

FROM_GENERATION_CONFIG = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
"""Sampling values that a model's generation config may set."""


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Options of the server. Names are vLLM's where vLLM has the option."""

    served_model_name: tuple[str, ...] = ()
    """Names it answers to; none: the target's own."""
    api_key: tuple[str, ...] = ()
    """Keys, any of which opens it; none: open."""
    max_queue: int = 256
    """Samples that may wait beside those that run; more are answered with 429."""
    max_body_bytes: int = 8 * 2**20
    max_logprobs: int = 20
    """Most `logprobs`, `top_logprobs` and `prompt_logprobs` of a request."""
    request_timeout: float | None = None
    """Deadline of every request, in seconds; a request may ask for a shorter one."""
    drain_timeout: float = 60.0
    """Seconds that running requests have to finish after SIGTERM."""
    write_timeout: float = 60.0
    """Seconds a client may leave one event unread."""
    sse_ping_interval: float = 15.0
    ignore_unknown_fields: bool = False
    """Warn once for each unknown field and drop it; else it is refused."""
    seed: int | None = None
    """Where the seeds of requests without one begin; None: they are fresh."""
    generation_config: str = "auto"
    """auto: the model's; vllm: none; else a folder with a generation_config.json."""
    override_generation_config: Mapping[str, Any] = field(default_factory=dict)
    logprobs_mode: LogprobsMode = "raw_logprobs"
    """raw_logprobs: of the target's untouched logits; processed_logprobs: of the law that tokens are drawn from."""
    tokenizer: str | None = None
    """Folder of a tokenizer in place of the model's own."""
    chat_template: str | None = None
    """Template text in place of the model's own."""
    trust_request_chat_template: bool = False
    """Whether a request may bring its own template."""
    reasoning_parser: str | None = None
    """deepseek_r1 or qwen3: what stands between <think> and </think> becomes `reasoning_content`."""
    tool_call_parser: str = "auto"
    """hermes, llama3_json or mistral: how the model writes tool calls; auto: as its template says; none: they stay
    text."""
    salt_cache_per_key: bool = False
    """Requests that came with different keys find nothing of each other in the prefix cache."""
    metrics_compat: str | None = None
    """vllm: publish the series under vLLM's names too."""
    per_request_spec_decode_metrics: SpecMetrics = "summary"
    enable_per_request_metrics: bool = False
    enable_force_include_usage: bool = False
    timings: bool = False
    """llama.cpp's `timings` in every answer; else where a request asks for them."""
    disable_log_stats: bool = False
    log_stats_interval: float = 10.0
    enable_log_requests: bool = False
    """Log each request with its prompt."""
    allowed_origins: tuple[str, ...] = ()
    """Origins a browser may call from (CORS); none: no other page."""
    otlp_traces_endpoint: str | None = None

    def __post_init__(self) -> None:
        _check(self)


def _check(o: ServeOptions) -> None:
    def need(ok: bool, option: str, expected: str) -> None:
        if not ok:
            raise OptionError(f"--{option.replace('_', '-')}", f"must be {expected}, got {getattr(o, option)!r}")

    need(o.max_queue >= 0, "max_queue", "at least 0")
    need(o.max_body_bytes >= 1024, "max_body_bytes", "at least 1024")
    need(o.max_logprobs >= 0, "max_logprobs", "at least 0")
    need(o.request_timeout is None or o.request_timeout > 0, "request_timeout", "a positive number of seconds")
    for option in ("drain_timeout", "write_timeout", "sse_ping_interval", "log_stats_interval"):
        need(getattr(o, option) > 0, option, "a positive number of seconds")
    need(all(key and key.isascii() for key in o.api_key), "api_key", "a non-empty ASCII text")
    need(all(o.served_model_name), "served_model_name", "a non-empty name")
    need(o.reasoning_parser in (None, "deepseek_r1", "qwen3"), "reasoning_parser", "deepseek_r1 or qwen3")
    need(o.tokenizer is None or (o.tokenizer != "" and Path(o.tokenizer).is_dir()), "tokenizer", "a folder")
    need(o.tool_call_parser in TOOL_CALL_PARSERS, "tool_call_parser", f"one of {', '.join(TOOL_CALL_PARSERS)}")
    need(o.metrics_compat in (None, "vllm"), "metrics_compat", "vllm")
    levels = ("none", "summary", "detailed")
    need(o.per_request_spec_decode_metrics in levels, "per_request_spec_decode_metrics", f"one of {', '.join(levels)}")
    modes = get_args(LogprobsMode)
    need(o.logprobs_mode in modes, "logprobs_mode", f"one of {', '.join(modes)}")
    if o.salt_cache_per_key and not o.api_key:
        raise OptionError("--salt-cache-per-key", "needs --api-key: without keys there is nobody to tell apart")
    for name in o.override_generation_config:
        if name not in FROM_GENERATION_CONFIG:
            known = ", ".join(FROM_GENERATION_CONFIG)
            raise OptionError("--override-generation-config", f"{name!r} is no sampling value; known: {known}")
    _check_sampling("--override-generation-config", o.override_generation_config)


def _check_sampling(option: str, values: Mapping[str, Any]) -> None:
    """OptionError names the option that the values came by, which none of them is a flag of."""
    try:
        Sampling(**values)
    except OptionError as error:
        raise OptionError(option, str(error)) from None


def sampling_defaults(options: ServeOptions, of_model: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling values of a request that gives none: override > generation config > the library's own.

    Raises:
        OptionError: the folder of `generation_config` holds none, or a value no request could have.
    """
    kind = options.generation_config
    config = of_model if kind == "auto" else {} if kind == "vllm" else _read(Path(kind))
    chosen = {name: value for name, value in config.items() if name in FROM_GENERATION_CONFIG and value is not None}
    _check_sampling("--generation-config", chosen)
    return chosen | dict(options.override_generation_config)


def _read(folder: Path) -> dict[str, Any]:
    path = folder / "generation_config.json"
    try:
        found = json_of(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OptionError("--generation-config", f"cannot read {path}: {error}") from None
    if not isinstance(found, dict):
        raise OptionError("--generation-config", f"{path} is no JSON object")
    return found
