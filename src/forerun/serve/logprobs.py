"""Log-probabilities in the shapes of the two endpoints. Their source is always the target's row of the position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from forerun.sampling import TokenLogprob
from forerun.serve.tokens import TokenText

LEAST = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


def of_chat(entries: Sequence[TokenLogprob], tokens: TokenText) -> dict[str, Any]:
    """`choices[].logprobs` of a chat."""
    return {"content": [_entry(one, tokens) for one in entries], "refusal": None}


def _entry(one: TokenLogprob, tokens: TokenText) -> dict[str, Any]:
    top = [_token(token, value, tokens) for token, value in one.top]
    return _token(one.token_id, one.logprob, tokens) | {"top_logprobs": top}


def _token(token: int, value: float, tokens: TokenText) -> dict[str, Any]:
    content = tokens.bytes_of(token)
    return {"token": content.decode(errors="replace"), "logprob": finite(value), "bytes": list(content)}


def of_completion(entries: Sequence[TokenLogprob | int], tokens: TokenText, offset: int = 0) -> dict[str, Any]:
    """`choices[].logprobs` of a completion. A bare id has no log-probability: it is the first of the text."""
    found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for one in entries:
        text = tokens.text_of(one if isinstance(one, int) else one.token_id)
        found["tokens"].append(text)
        found["text_offset"].append(offset)
        offset += len(text)
        if isinstance(one, int):
            found["token_logprobs"].append(None)
            found["top_logprobs"].append(None)
            continue
        found["token_logprobs"].append(finite(one.logprob))
        found["top_logprobs"].append(_top(one, tokens))
    return found


def _top(one: TokenLogprob, tokens: TokenText) -> dict[str, float]:
    """Text -> value; of two ids with one text the more probable stays."""
    found: dict[str, float] = {}
    for token, value in one.top or [(one.token_id, one.logprob)]:
        found.setdefault(tokens.text_of(token), finite(value))
    return found


def of_prompt(ids: Sequence[int], entries: Sequence[TokenLogprob], tokens: TokenText) -> list[Any]:
    """vLLM's `prompt_logprobs`: for each token {id: {logprob, decoded_token}}, the best first; null for the first."""
    found: list[Any] = [None] if ids else []
    for one in entries:
        ranked = one.top or [(one.token_id, one.logprob)]
        found.append({str(t): {"logprob": finite(v), "decoded_token": tokens.text_of(t)} for t, v in ranked})
    return found


def finite(value: float) -> float:
    return max(value, LEAST)
