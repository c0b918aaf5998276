"""How a request is sampled and when it stops: the options, their ranges, and the checks that need the vocabulary."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from numbers import Integral, Real
from typing import TYPE_CHECKING, Literal, cast, get_args

from forerun.errors import ForerunError, ModelError, OptionError

if TYPE_CHECKING:
    from torch import Tensor

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, everywhere: request, drafter, verification and bonus alike."""

HOTTEST = 1e6
"""The highest temperature: far below it every law is flat. One beyond the range of a float would make a masked logit,
-inf over inf, no number."""
REPETITION = (0.01, 100.0)
"""Least and largest repetition penalty, far beyond what is of use; a logit over 1e-320 is no number any more."""
ADDED = 2.0
"""Largest presence and frequency penalty, of either sign, as in OpenAI's API."""
BIAS = 100.0
"""Largest bias of a logit, of either sign, as in OpenAI's API."""

VerifyMode = Literal["rejection", "coupled"]

LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]

LogitsProcessor = Callable[[Sequence[int], "Tensor"], "Tensor"]
"""`processor(tokens, logits [V]) -> logits [V]`: a pure function of all tokens before the position (prompt, output and
drafted prefix) and the logits there. It is called for every row of a verify block, so it must not keep state."""


StopRule = Callable[[Sequence[int]], bool]
"""`rule(tokens) -> bool`: a pure function of all tokens so far, prompt included."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How one request is sampled and when it stops. Names and defaults are those of vLLM's `SamplingParams`.

    A value means the same with and without a drafter. `OptionError` names a value that cannot be used.
    """

    temperature: float = 1.0
    """0 (anything below 1e-5) is greedy; ties go to the lowest token id. 1e6 at most."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 or -1 keeps all. Ties at the border go to the lowest token ids."""
    top_p: float = 1.0
    """Keep the smallest set of most probable tokens whose mass reaches this, in (0, 1]."""
    min_p: float = 0.0
    """Keep tokens with at least this fraction of the top probability, in [0, 1]."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output, in [0.01, 100]; 1 is off."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token already generated, in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted per occurrence among the generated tokens, in [-2, 2]."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Token id -> value in [-100, 100] added to its logit, at every position."""
    min_tokens: int = 0
    """Tokens to generate before an end-of-sequence or stop id may appear. Yields where nothing else is allowed."""
    bad_words: Sequence[str | Sequence[int]] = ()
    """Sequences that must not be produced, as text or as token ids."""
    allowed_token_ids: Sequence[int] | None = None
    """If given, only these ids can be produced."""
    logits_processors: Sequence[LogitsProcessor] = ()
    stop_when: Sequence[StopRule] = ()
    """Rules asked after each token; the first that holds ends the answer behind it, with the reason `stop`."""
    seed: int | None = None
    """Key of all randomness of the request; None draws a fresh one."""
    n: int = 1
    """Samples per prompt, each with a noise stream of its own."""
    max_tokens: int | None = 16
    """Tokens to generate at most; None: as many as the model's window holds."""
    stop: str | Sequence[str] = ()
    """Strings that end the text; the match is cut off unless `include_stop_str_in_output`."""
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    """None: none; 0: of the emitted token; j: also of the j most probable ones."""
    logprobs_mode: LogprobsMode = "raw_logprobs"
    """raw_logprobs: of the target's untouched logits; processed_logprobs: of the law that tokens are drawn from, with
    masks, penalties, temperature and filters, where a greedy token has 0."""

    def __post_init__(self) -> None:
        _check_sampling(self)

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def uses_counts(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @cached_property
    def adjusts(self) -> bool:
        """Whether logits change before the temperature at every position (`min_tokens` does only at first)."""
        allowed = self.allowed_token_ids is not None
        return bool(self.uses_counts or self.logit_bias or self.bad_words or self.logits_processors or allowed)

    @cached_property
    def shaping(self) -> tuple[float, ...]:
        """What of it turns adjusted logits into a law; rows that agree in this are computed together."""
        return () if self.greedy else (self.temperature, self.min_p, max(self.top_k, 0), self.top_p)


def _check_sampling(s: Sampling) -> None:
    def need(ok: bool, option: str, expected: str) -> None:
        if not ok:
            raise OptionError(option, f"must be {expected}, got {getattr(s, option)!r}")

    need(_within(s.temperature, 0, HOTTEST), "temperature", f"in [0, {HOTTEST:g}]")
    need(is_whole(s.top_k) and s.top_k >= -1, "top_k", "an integer >= -1 (0 and -1 are off)")
    need(_within(s.top_p, 0, 1) and s.top_p > 0, "top_p", "in (0, 1]")
    need(_within(s.min_p, 0, 1), "min_p", "in [0, 1]")
    least, largest = REPETITION
    need(_within(s.repetition_penalty, least, largest), "repetition_penalty", f"in [{least:g}, {largest:g}]")
    for option in ("presence_penalty", "frequency_penalty"):
        need(_within(getattr(s, option), -ADDED, ADDED), option, f"in [{-ADDED:g}, {ADDED:g}]")
    need(_bias_ok(s.logit_bias), "logit_bias", f"{{token id: number in [{-BIAS:g}, {BIAS:g}]}}")
    need(is_whole(s.min_tokens) and s.min_tokens >= 0, "min_tokens", "an integer >= 0")
    need(_each(_word_ok, s.bad_words), "bad_words", "a list of non-empty strings or sequences of token ids")
    allowed = s.allowed_token_ids
    need(allowed is None or (_ids_ok(allowed) and len(allowed) > 0), "allowed_token_ids", "None or a list of token ids")
    processors = "a list of functions (tokens, logits) -> logits"
    need(_each(callable, s.logits_processors), "logits_processors", processors)
    need(_each(callable, s.stop_when), "stop_when", "a list of functions tokens -> bool")
    need(s.seed is None or (is_whole(s.seed) and -(2**63) <= s.seed < 2**64), "seed", "None or a 64-bit integer")
    need(is_whole(s.n) and s.n >= 1, "n", "an integer >= 1")
    most = s.max_tokens
    need(most is None or (is_whole(most) and most >= 0), "max_tokens", "None or an integer >= 0")
    need(_text_ok(s.stop) or _each(_text_ok, s.stop), "stop", "a non-empty string or a list of them")
    need(_ids_ok(s.stop_token_ids), "stop_token_ids", "a list of token ids")
    need(s.logprobs is None or (is_whole(s.logprobs) and s.logprobs >= 0), "logprobs", "None or an integer >= 0")
    modes = get_args(LogprobsMode)
    need(s.logprobs_mode in modes, "logprobs_mode", f"one of {', '.join(modes)}")
    if most is not None and s.min_tokens > most:
        raise OptionError("min_tokens", f"{s.min_tokens} is more than max_tokens ({most})")


def is_finite(value: object) -> bool:
    """Whether it is a number that a float holds, numpy's included; a bool is none."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # a whole number beyond every float
        return False


def _within(value: object, least: float, largest: float) -> bool:
    return is_finite(value) and least <= cast(float, value) <= largest


def is_whole(value: object) -> bool:
    """Whether it is an integer, numpy's included; a bool is none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_whole(option: str, value: object) -> None:
    """OptionError names an option that should be a whole number and is none. Ranges are the caller's."""
    if not is_whole(value):
        raise OptionError(option, f"must be a whole number, got {value!r}")


def _each(ok: Callable[[object], bool], values: object) -> bool:
    """A collection of such values. Not a string, whose letters it would ask; nor a generator, which asking empties."""
    return isinstance(values, Collection) and not isinstance(values, (str, bytes, bytearray)) and all(map(ok, values))


def _ids_ok(ids: object) -> bool:
    return _each(_id_ok, ids)


def _id_ok(token: object) -> bool:
    return is_whole(token) and cast(int, token) >= 0


def _bias_ok(bias: object) -> bool:
    in_range = isinstance(bias, Mapping) and _each(lambda value: _within(value, -BIAS, BIAS), bias.values())
    return in_range and _ids_ok(bias)


def _word_ok(word: object) -> bool:
    return _text_ok(word) or (isinstance(word, Sequence) and len(word) > 0 and _ids_ok(word))


def _text_ok(text: object) -> bool:
    return isinstance(text, str) and bool(text)


# ------------------------------------------------------------------------------------- checks that need the vocabulary


def check_ids(sampling: Sampling, vocab_size: int) -> None:
    """Refuses token ids that the target's logits do not have: for the engine, once, when a request is admitted.

    `bad_words` given as text must have been turned into ids. Out-of-range ids would otherwise fail or wrap around in
    the middle of decoding; one in `stop_token_ids` would never stop anything.

    Raises:
        OptionError: it names the option and the ids.
    """
    words = [_ids(word) for word in sampling.bad_words]
    allowed = sampling.allowed_token_ids
    given: dict[str, Iterable[int]] = {
        "logit_bias": sampling.logit_bias,
        "allowed_token_ids": allowed or (),
        "bad_words": chain.from_iterable(words),
        "stop_token_ids": sampling.stop_token_ids,
    }
    for option, ids in given.items():
        outside = sorted({i for i in ids if i >= vocab_size})
        if outside:
            raise OptionError(option, f"token ids must be below {vocab_size}, the vocabulary size; got {outside[:8]}")
    banned = {word[0] for word in words if len(word) == 1}
    if banned.issuperset(range(vocab_size) if allowed is None else allowed):
        raise OptionError("bad_words", "bans every token that could be produced; drop some of it")


def _ids(word: str | Sequence[int]) -> Sequence[int]:
    assert not isinstance(word, str), "bad_words given as text are turned into ids before decoding"
    return word


def undrawable(sampling: Sampling) -> ForerunError:
    """The error of a request whose next token could not be drawn (`NOTHING`): no token is allowed, or NaN logits."""
    masks = ("logits_processors", "bad_words", "allowed_token_ids")
    option = next((name for name in masks if getattr(sampling, name)), None)
    if option is None:
        return ModelError("the model's logits are not finite at this position; try --dtype float32")
    others = " and ".join(name for name in masks if getattr(sampling, name))
    return OptionError(option, f"no token is left at this position by {others}")
