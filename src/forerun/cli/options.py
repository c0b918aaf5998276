"""Options that commands share, as dataclasses: each field is one flag.

    @flags
    def command(engine: EngineFlags, sampling: SamplingFlags, json_: Annotated[bool, typer.Option("--json")] = False):
        with engine.load() as loaded: ...

A default of None means "not given": the value then comes from where it has its home (`EngineOptions`, `Sampling`, the
model's generation config). Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeVar, get_type_hints

import typer

from forerun.errors import OptionError
from forerun.parsing import json_of, yaml_of

if TYPE_CHECKING:
    from forerun.drafters.config import SpeculativeConfig
    from forerun.engine import Engine
    from forerun.sampling import Sampling

EMBEDDED = "embedded"
"""The package's own model: the target where none is named."""
DOTTED = "--speculative-config.KEY"
DRAFT = "--draft."
"""Before the settings of a drafter that is trained; each is a flag of its own."""

_Function = TypeVar("_Function", bound=Callable[..., Any])


def flags(function: _Function) -> _Function:
    """Lets a command take dataclasses: their fields become its options, and it gets the dataclasses back."""
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(function).parameters.values():
        kind = hints[parameter.name]
        if dataclasses.is_dataclass(kind):
            groups[parameter.name] = kind
            parameters += _parameters(kind)
        else:
            named = inspect.Parameter.KEYWORD_ONLY
            parameters.append(parameter.replace(annotation=kind, kind=named))

    @functools.wraps(function)
    def command(**given: Any) -> Any:
        made = {name: kind(**{f.name: given.pop(f.name) for f in fields(kind)}) for name, kind in groups.items()}
        return function(**made, **given)

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command  # type: ignore[return-value]


def _parameters(kind: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    named = inspect.Parameter.KEYWORD_ONLY
    return [
        inspect.Parameter(f.name, named, default=_default(f), annotation=hints[f.name])
        for f in dataclasses.fields(kind)
    ]


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _flag(text: str, *names: str, panel: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, metavar=metavar, show_default=False)


_MODELS, _LIMITS, _SAMPLING, _PROMPTS = "Models", "Engine limits", "Sampling", "Prompts"
_engine = functools.partial(_flag, panel=_MODELS)
_limit = functools.partial(_flag, panel=_LIMITS)
_sampling = functools.partial(_flag, panel=_SAMPLING)
_prompt = functools.partial(_flag, panel=_PROMPTS)


# ------------------------------------------------------------------------------------------------------------ models


@dataclass(frozen=True, kw_only=True)
class EngineFlags:
    """The target, its drafters and the engine's limits."""

    target: Annotated[
        str | None, _engine("Directory, .gguf file, hub id, or 'embedded' (the default).", "--target", "--model")
    ] = None
    drafter: Annotated[
        list[str] | None,
        _engine(
            "vanilla, ngram, small, a model, a trained drafter's folder or module:Class; several: repeated, or "
            "'ngram,small'. Default: none to generate and serve; other commands choose, and say which."
        ),
    ] = None
    num_speculative_tokens: Annotated[
        int | None, _engine("K, the most tokens drafted per round. Default: the drafter's own.")
    ] = None
    speculative_config: Annotated[
        str | None,
        _engine("JSON, YAML or a file of them; keys as in vLLM.", "--speculative-config", "-sc", metavar="CONFIG"),
    ] = None
    speculative_config_key: Annotated[
        list[str] | None,
        _engine("One key of it: --speculative-config.prompt_lookup_max 4.", DOTTED, metavar="VALUE"),
    ] = None
    verify_mode: Annotated[str | None, _engine("rejection (default) or coupled: one seed, one text.")] = None
    policy: Annotated[
        str | None,
        _engine("How much to draft and verify: delayed (default where profiled), fixed, threshold, prefix, global."),
    ] = None
    min_predicted_gain: Annotated[float | None, _engine("Gain below which nothing is drafted; default 0.005.")] = None
    calibration_cache: Annotated[
        str | None,
        _engine("Where measured costs are kept; off: not used. Default: under FORERUN_CACHE.", metavar="DIR|off"),
    ] = None
    dtype: Annotated[str | None, _engine("auto (default), float32, bfloat16, float16 or float64.")] = None
    device: Annotated[str | None, _engine("auto (default), cpu, cuda or mps.")] = None
    threads: Annotated[int | None, _engine("CPU threads. Default: torch's choice.")] = None
    revision: Annotated[str | None, _engine("Branch, tag or commit of a hub model.")] = None
    trust_remote_code: Annotated[bool, _engine("Run Python that comes with a model.", "--trust-remote-code")] = False
    max_model_len: Annotated[int | None, _limit("Window, if shorter than the model's.")] = None
    max_num_seqs: Annotated[int | None, _limit("Requests decoded at once. Default: 64.")] = None
    max_num_batched_tokens: Annotated[int | None, _limit("Rows of one step. Default: 1024.")] = None
    kv_cache_memory_bytes: Annotated[
        int | None, _limit("Memory of all KV storage. Default: a full batch, within a quarter of what is free.")
    ] = None

    def __post_init__(self) -> None:
        if self.target == "":  # to the file system it is the working folder
            raise OptionError("--target", "is empty; name a model")

    @property
    def source(self) -> str:
        """The target: what was given, else the model of the package."""
        return EMBEDDED if self.target is None else self.target

    @property
    def embedded(self) -> bool:
        """Whether that is the package's own."""
        return self.source == EMBEDDED

    def at(self, place: str | None) -> Self:
        """The flags with a command's argument TARGET in place, which is a shorter spelling of --target.

        Raises:
            OptionError: both are given.
        """
        if place is None:
            return self
        if self.target is not None:
            raise OptionError("--target", f"is given twice: {place} and {self.target}")
        return dataclasses.replace(self, target=place)

    def options(self) -> dict[str, Any]:
        """What was given, with the names of `EngineOptions`."""
        mine = ("target", "drafter", "speculative_config", "speculative_config_key")
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in mine}
        return {name: value for name, value in given.items() if value is not None and value is not False}

    def drafters(self) -> list[SpeculativeConfig]:
        """The drafters asked for, checked before any model is loaded; empty: plain decoding.

        Raises:
            OptionError: an unknown key or value, two flags that name a drafter, or keys that contradict a flag.
        """
        configs = self._configs()
        lengths = [config.num_speculative_tokens for config in configs]
        # The flag is the default of drafters that set none; where all of them do, it would be dropped in silence.
        self._check_agrees("num_speculative_tokens", lengths if None not in lengths else [])
        self._check_agrees("verify_mode", [config.verify_mode for config in configs if config.verify_mode is not None])
        return configs

    def _check_agrees(self, key: str, own: Sequence[Any]) -> None:
        given = getattr(self, key)
        other = [value for value in own if value != given]
        if given is not None and other:
            dotted = DOTTED.replace("KEY", key)
            raise OptionError(
                f"--{key.replace('_', '-')}", f"{given} contradicts {dotted} {other[0]}; give one of them"
            )

    def _configs(self) -> list[SpeculativeConfig]:
        from forerun.drafters.config import parse_configs

        if self.drafter and self.speculative_config is not None:
            raise OptionError("--drafter", "give either this or --speculative-config")
        if any(not name.strip() for one in self.drafter or () for name in one.split(",")):
            raise OptionError("--drafter", "a name is empty")
        dotted = dict(_dotted_item(item) for item in self.speculative_config_key or ())
        named: Sequence[str | None] = self.drafter or [self.speculative_config]
        configs = [config for one in named for config in parse_configs(one)]
        if not dotted:
            return configs
        if len(configs) > 1:
            raise OptionError(DOTTED.removesuffix(".KEY"), "dotted keys belong to one drafter; several are given")
        base = configs[0].model_dump(exclude_unset=True) if configs else {}
        return parse_configs({**base, **dotted})

    def load(self, up_to: int | None = None) -> Engine:
        """Loads target and drafters; `up_to` is K of those that set none. An error names the flag it is about."""
        from forerun.cli.load import load_engine

        return load_engine(self, up_to)


def _dotted_item(item: str) -> tuple[str, Any]:
    key, _, value = item.partition("=")
    try:
        return key.replace("-", "_"), yaml_of(value)
    except ValueError as error:
        raise OptionError(DOTTED.replace("KEY", key), f"neither JSON nor YAML: {error}") from None


def fold_dotted(args: Sequence[str]) -> list[str]:
    """`--speculative-config.method ngram` (or `=ngram`, or `-sc.method`) as `--speculative-config.KEY method=ngram`,
    and `--draft.block_size` as `--draft.block-size`."""
    folded: list[str] = []
    rest = iter(args)
    for arg in rest:
        if arg.startswith(DRAFT):
            name, equals, value = arg.partition("=")
            folded.append(f"{name.replace('_', '-')}{equals}{value}")
            continue
        start = next((p for p in ("--speculative-config.", "-sc.") if arg.startswith(p)), None)
        if start is None:
            folded.append(arg)
            continue
        key, equals, value = arg.removeprefix(start).partition("=")
        following = value if equals else next(rest, None)
        if following is None:
            raise OptionError(arg, "needs a value")
        folded += [DOTTED, f"{key}={following}"]
    return folded


# ---------------------------------------------------------------------------------------------------------- sampling


@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """How a request is sampled and when it stops. What is not given comes from the model's generation config."""

    temperature: Annotated[
        float | None, _sampling("0 is greedy. Default, as of filters and penalties: the model's generation config.")
    ] = None
    max_tokens: Annotated[
        int | None, _sampling("Tokens to generate at most. Default: 128; a chat: what fits; data regenerate: 2048.")
    ] = None
    seed: Annotated[int | None, _sampling("Key of all randomness; fresh if not given.")] = None
    n: Annotated[int | None, _sampling("Samples per prompt. Default: 1.", "--n", "-n")] = None
    top_k: Annotated[int | None, _sampling("Keep the k most probable tokens; 0 or -1 keeps all.")] = None
    top_p: Annotated[float | None, _sampling("Keep the most probable tokens up to this mass, in (0, 1].")] = None
    min_p: Annotated[float | None, _sampling("Keep tokens of at least this share of the top probability.")] = None
    repetition_penalty: Annotated[float | None, _sampling("Of tokens in prompt or output; 1 is off.")] = None
    presence_penalty: Annotated[float | None, _sampling("Of tokens already generated; 0 is off.")] = None
    frequency_penalty: Annotated[float | None, _sampling("Per occurrence among generated tokens.")] = None
    logit_bias: Annotated[str | None, _sampling("Added to logits.", metavar="'{\"ID\": BIAS}'")] = None
    min_tokens: Annotated[int | None, _sampling("Tokens before an end or stop may appear.")] = None
    stop: Annotated[list[str] | None, _sampling("Text that ends the output; may be repeated.")] = None
    stop_token_ids: Annotated[
        list[str] | None, _sampling("Ids that end the output: repeated or 1,2,3.", metavar="IDS")
    ] = None
    bad_words: Annotated[list[str] | None, _sampling("Text that must not be produced; may be repeated.")] = None
    allowed_token_ids: Annotated[
        list[str] | None, _sampling("The only ids that can be produced: repeated or 1,2,3.", metavar="IDS")
    ] = None
    ignore_eos: Annotated[bool, _sampling("End-of-sequence is an ordinary token.", "--ignore-eos")] = False
    include_stop_str_in_output: Annotated[
        bool, _sampling("Keep the matched stop text.", "--include-stop-str-in-output")
    ] = False
    logprobs: Annotated[int | None, _sampling("Log-probabilities of each token and of this many best ones.")] = None

    def given(self, **defaults: Any) -> dict[str, Any]:
        """What was given, over `defaults`, with the names and types of `Sampling`.

        Raises:
            OptionError: a value that no model can use; checked here so that nothing is loaded for it.
        """
        from forerun.sampling import Sampling

        values = {f.name: getattr(self, f.name) for f in fields(self)}
        chosen = {**defaults, **{k: v for k, v in values.items() if v is not None and v is not False}}
        for name in ("stop_token_ids", "allowed_token_ids"):
            if name in chosen:
                chosen[name] = _ids(name, chosen[name])
        if "logit_bias" in chosen:
            chosen["logit_bias"] = _bias(chosen["logit_bias"])
        Sampling(**chosen)
        return chosen

    def sampling(self, engine: Engine, **defaults: Any) -> Sampling:
        """The options for a loaded model: given > defaults > the model's generation config."""
        return engine.default_sampling(**self.given(**defaults))


def _ids(option: str, items: Sequence[str]) -> list[int]:
    try:
        return [int(one) for item in items for one in item.split(",")]
    except ValueError:
        raise OptionError(option, f"must be token ids, like 1,2,3; got {','.join(items)!r}") from None


def _bias(text: str) -> dict[int, float]:
    try:
        return {int(token): float(bias) for token, bias in json_of(text).items()}
    except (ValueError, TypeError, AttributeError, OverflowError):  # not JSON, or of another shape
        raise OptionError(
            "logit_bias", f'must be JSON of token ids and numbers, like {{"5": -2}}; got {text!r:.80}'
        ) from None


# ----------------------------------------------------------------------------------------------------------- prompts


@dataclass(frozen=True, kw_only=True)
class PromptFlags:
    """Where the prompts come from; see `forerun.cli.prompts`."""

    prompt: Annotated[
        str | None,
        _flag(
            "The prompt; @FILE reads it from a file, - from stdin, @@ is a literal @.", "--prompt", "-p", panel=_PROMPTS
        ),
    ] = None
    prompts: Annotated[
        str | None,
        _flag(
            'JSONL of "prompt", "turns" or "messages", or text of one prompt a line; -: stdin.',
            panel=_PROMPTS,
            metavar="FILE",
        ),
    ] = None
    limit: Annotated[int | None, _prompt("Only the first N of --prompts.")] = None
    apply_chat_template: Annotated[
        bool, _prompt("Put each raw prompt as a user's message.", "--apply-chat-template")
    ] = False


# ------------------------------------------------------------------------------------------------------------ output

JsonFlag = Annotated[bool, typer.Option("--json", help="One JSON document on stdout instead of text.")]
OutputFlag = Annotated[
    str | None, typer.Option("--output", "-o", metavar="FILE", help="Write there, whole or not at all, not to stdout.")
]

__all__ = ["DOTTED", "EngineFlags", "JsonFlag", "OutputFlag", "PromptFlags", "SamplingFlags", "flags", "fold_dotted"]
