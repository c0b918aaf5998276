"""From what a caller asks to requests the loop can run: everything is checked here, before anything is computed."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

from forerun.drafters import canonical
from forerun.engine.propose import LoadedDrafter
from forerun.engine.request import Request, SpeculativeOption
from forerun.engine.text import TextStream
from forerun.errors import OptionError, PromptError
from forerun.sampling import Noise, Sampling, VerifyMode, check_ids
from forerun.sampling.options import is_finite, is_whole
from forerun.target.base import BLOCK_SIZE, Target
from forerun.target.blocks import blocks_for

Prompt = str | Sequence[int]
"""Text, or token ids."""

Speculative = bool | Mapping[str, Any] | None
"""Per request. None or True: as loaded; False: plain; else any of the keys method, max_draft, verify_mode and
confidence_threshold."""


MOST_STOP_CHARACTERS = 4096
"""Of all stop strings of a request together."""
MOST_WORDS = 1024
"""Bad words, or stop ids, of a request."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What the caller wants of all prompts of one call."""

    speculative: Speculative = None
    prediction: str | None = None
    priority: int = 0
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        if self.prediction is not None and not isinstance(self.prediction, str):
            raise OptionError("prediction", f"must be a text, got {self.prediction!r:.80}")
        if self.cache_salt is not None and not (isinstance(self.cache_salt, str) and self.cache_salt):
            raise OptionError("cache_salt", f"must be a text that is not empty, got {self.cache_salt!r}")


class Intake:
    """Makes requests for one engine, in any thread. It numbers them; it does not queue them.

    `exposed` are drafters whose sampled drafts the engine's policy would bias in rejection mode.
    """

    def __init__(
        self,
        target: Target,
        loaded: Sequence[LoadedDrafter],
        num_blocks: int,
        verify_mode: VerifyMode,
        exposed: Collection[str] = (),
    ):
        self._target = target
        self._names = [entry.name for entry in loaded]
        self._predicting = {entry.name for entry in loaded if entry.drafter.uses_prediction}
        self._num_blocks = num_blocks
        self._exposed = exposed
        self._mode = default_mode(loaded, verify_mode)
        self._ids = itertools.count(1)

    def new_id(self) -> int:
        return next(self._ids)

    def requests(
        self, prompts: Prompt | Sequence[Prompt], sampling: Sampling | Sequence[Sampling] | None, ask: Ask
    ) -> list[Request]:
        """All samples of all prompts, in the order of (prompt, sample). PromptError or OptionError if one is wrong."""
        many = as_prompts(prompts)
        if sampling is None or isinstance(sampling, Sampling):
            sampling = [sampling or self.default_sampling()] * len(many)
        _check_samplings(sampling)
        if len(sampling) != len(many):
            raise OptionError("sampling", f"{len(sampling)} given for {len(many)} prompts")
        pairs = enumerate(zip(many, sampling, strict=True))
        return [request for index, (prompt, one) in pairs for request in self._samples(index, prompt, one, ask)]

    def default_sampling(self, **changes: Any) -> Sampling:
        """The model's own sampling defaults (its generation config) with changes."""
        return Sampling(**{**self._target.sampling_defaults, **changes})

    def _samples(self, index: int, prompt: Prompt, sampling: Sampling, ask: Ask) -> Iterator[Request]:
        ids = self._prompt_ids(prompt)
        ready = self._resolve(sampling)
        limit = self._limit(ids, ready)
        option, mode = self._speculative(ask.speculative)
        self._check_policy(option, mode, ready)
        predicted = self._predicted(ask.prediction, option, sampling) if ask.prediction else ()
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        first: Request | None = None
        for sample in range(sampling.n):
            request = Request(
                id=self.new_id(),
                tokens=list(ids),
                prompt_length=len(ids),
                sampling=ready,
                noise=Noise.of(seed, sample),
                verify_mode=mode,
                limit=limit,
                text=self._text(ready),
                eos_ids=self._target.eos_token_ids,
                speculative=option,
                prediction=predicted,
                prompt_index=index,
                sample_index=sample,
                priority=ask.priority,
                cache_salt=ask.cache_salt,
                first_sample=first,
            )
            first = first or request
            yield request

    def _check_policy(self, option: SpeculativeOption, mode: VerifyMode, sampling: Sampling) -> None:
        """Policy `global` has been checked for the engine's own mode; a request may have chosen the other one."""
        biased = [name for name in self._exposed if option.methods is None or name in option.methods]
        if mode == "rejection" and biased and not sampling.greedy and option.max_draft != 0:
            raise OptionError(
                "speculative.verify_mode",
                f"'rejection' with policy 'global' would change the output of {biased[0]!r}; use 'coupled', or "
                "temperature 0, or another policy",
            )

    def _predicted(self, text: str, option: SpeculativeOption, sampling: Sampling) -> list[int]:
        """Ids of a predicted text, if something will read them."""
        if sampling.n > 1:
            raise OptionError("prediction", "cannot be combined with n > 1")
        if option.max_draft == 0:
            raise OptionError("prediction", "has no effect with speculative.max_draft 0: nothing is drafted")
        if not self._predicting:
            raise OptionError("prediction", "no loaded drafter reads it; load `ngram`, or let one copy (`+lookup`)")
        if option.methods is not None and not self._predicting & set(option.methods):
            raise OptionError(
                "prediction", f"only {', '.join(sorted(self._predicting))} reads it, which `speculative` leaves out"
            )
        ids = self._target.tokenizer.encode(text, False)
        if len(ids) > self._target.window:
            raise OptionError(
                "prediction", f"has {len(ids)} tokens; the window is {self._target.window}, so no answer is as long"
            )
        return ids

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        window, vocab = self._target.window, self._target.vocab_size
        ids = self._target.tokenizer.encode(prompt) if isinstance(prompt, str) else _as_ids(prompt)
        if not ids:
            raise PromptError("prompt", "is empty; give at least one token")
        if len(ids) >= window:
            raise PromptError("prompt", f"has {len(ids)} tokens; the window of {window} leaves room for {window - 1}")
        outside = [token for token in ids if not 0 <= token < vocab]
        if outside:
            raise PromptError("prompt", f"token {outside[0]} is outside the vocabulary of {vocab}")
        return ids

    def _limit(self, prompt: Sequence[int], sampling: Sampling) -> int:
        """Most tokens the request may hold. Without max_tokens it ends where the window or all the KV memory ends."""
        window, rows = self._target.window, self._num_blocks * BLOCK_SIZE
        asked = window if sampling.max_tokens is None else len(prompt) + sampling.max_tokens
        limit = min(asked, window)
        if sampling.max_tokens is None and len(prompt) <= rows:
            return min(limit, rows + 1)
        if blocks_for(limit - 1) > self._num_blocks:
            new = "" if sampling.max_tokens is None else f" and {sampling.max_tokens} new ones"
            option = "prompt" if sampling.max_tokens is None else "max_tokens"
            raise PromptError(
                option,
                f"{len(prompt)} prompt tokens{new} need {limit - 1} KV rows, there are {rows}; shorten it or raise "
                "kv_cache_memory_bytes",
            )
        return limit

    def _resolve(self, sampling: Sampling) -> Sampling:
        """Text in `bad_words` becomes ids, at the start of a word and inside one; every id is checked."""
        _check_sizes(sampling, self._target.vocab_size)
        words: list[Sequence[int]] = []
        for word in sampling.bad_words:
            if isinstance(word, str):
                forms = {tuple(self._target.tokenizer.encode(form, False)) for form in (word, " " + word.lstrip())}
                words += [form for form in sorted(forms) if form]
            else:
                words.append(tuple(word))
        ready = replace(sampling, bad_words=tuple(words)) if sampling.bad_words else sampling
        check_ids(ready, self._target.vocab_size)
        return ready

    def _text(self, sampling: Sampling) -> TextStream:
        tokenizer, skip = self._target.tokenizer, sampling.skip_special_tokens
        return TextStream(
            lambda ids: tokenizer.decode(ids, skip), sampling.stop_strings, sampling.include_stop_str_in_output
        )

    def _speculative(self, asked: Speculative) -> tuple[SpeculativeOption, VerifyMode]:
        if asked is False:
            return SpeculativeOption(methods=()), self._mode
        if not (asked is None or asked is True or isinstance(asked, Mapping)):
            raise OptionError("speculative", f"must be true, false or a mapping, got {asked!r}")
        given = dict(asked) if isinstance(asked, Mapping) else {}
        method, most = given.pop("method", None), given.pop("max_draft", None)
        mode, threshold = given.pop("verify_mode", self._mode), given.pop("confidence_threshold", None)
        if given:
            known = "method, max_draft, verify_mode, confidence_threshold"
            raise OptionError(f"speculative.{next(iter(given))}", f"unknown; known: {known}")
        if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 0):
            raise OptionError("speculative.max_draft", f"must be an integer >= 0, got {most!r}")
        if mode not in ("rejection", "coupled"):
            raise OptionError("speculative.verify_mode", f"must be 'rejection' or 'coupled', got {mode!r}")
        if threshold is not None and not (is_finite(threshold) and 0 <= threshold <= 1):
            raise OptionError("speculative.confidence_threshold", f"must lie in [0, 1], got {threshold!r}")
        return SpeculativeOption(self._methods(method), most, threshold), mode

    def _methods(self, asked: str | Sequence[str] | None) -> tuple[str, ...] | None:
        """Names of loaded drafters, in any spelling that loads them."""
        if asked is None:
            return None
        names = [asked] if isinstance(asked, str) else asked
        if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
            raise OptionError("speculative.method", f"must be a name or a list of names, got {asked!r}")
        for name in names:
            if not {name, canonical(name)} & {*self._names, "vanilla"}:
                known = ", ".join(self._names) or "none"
                raise OptionError("speculative.method", f"{name!r} is not loaded; loaded: {known}")
        return tuple(name if name in self._names else canonical(name) for name in names)


def default_mode(loaded: Sequence[LoadedDrafter], verify_mode: VerifyMode) -> VerifyMode:
    """Of requests that choose none: a drafter's configuration, else the engine's."""
    return next((entry.config.verify_mode for entry in loaded if entry.config.verify_mode), verify_mode)


def _check_sizes(sampling: Sampling, vocab_size: int) -> None:
    """OptionError: more of something that is gone through at every token than a request may make its batch-mates pay
    for."""
    stops = sum(map(len, sampling.stop_strings))
    if stops > MOST_STOP_CHARACTERS:
        raise OptionError("stop", f"has {stops} characters in all; at most {MOST_STOP_CHARACTERS}")
    bounds = {"bad_words": MOST_WORDS, "stop_token_ids": MOST_WORDS, "allowed_token_ids": vocab_size}
    for option, most in bounds.items():
        count = len(getattr(sampling, option) or ())
        if count > most:
            size = ", the vocabulary" if option == "allowed_token_ids" else ""
            raise OptionError(option, f"has {count} of them; at most {most}{size}")


def _check_samplings(given: Any) -> None:
    """OptionError: not a list of `Sampling`s; for options in a mapping, which other engines take, it says the call."""
    several = isinstance(given, Sequence) and not isinstance(given, (str, bytes))
    for one in given if several else [given]:
        if isinstance(one, Mapping):
            call = ", ".join(f"{name}={value!r}" for name, value in one.items())
            raise OptionError("sampling", f"must not be a mapping; pass forerun.Sampling({call:.200})")
        if not isinstance(one, Sampling):
            raise OptionError("sampling", f"must be a forerun.Sampling or a list of them, got {one!r:.80}")


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt (a string, or a sequence of ids) or several, as a list."""
    if isinstance(prompts, str):
        return [prompts]
    items = _as_list(prompts)
    if not items:
        raise PromptError("prompt", "is empty; give at least one prompt")
    return [items] if all(isinstance(item, Integral) for item in items) else items


def _as_ids(prompt: Sequence[int]) -> list[int]:
    ids = _as_list(prompt)
    if not all(map(is_whole, ids)):
        raise PromptError("prompt", f"token ids must be integers, got {ids!r:.80}")
    return [int(token) for token in ids]


def _as_list(values: Any) -> list[Any]:
    """Any sequence, array or tensor. PromptError if it is none, or one of something else: bytes, keys."""
    if not isinstance(values, (bytes, bytearray, memoryview, Mapping)):
        with suppress(TypeError):
            return list(values.tolist() if hasattr(values, "tolist") else values)
    raise PromptError("prompt", f"must be text, token ids or a list of these, got {values!r:.80}")
