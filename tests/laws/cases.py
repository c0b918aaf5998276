"""The factors of the proofs: targets, drafters, sampling options and budgets, each under a name."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Mapping, Sequence

import torch

from forerun.sampling import Row, Sampling, distribution
from forerun.verify import Draft
from laws.kit import Carry, Drafting, Lengths, Logits, Model, Slot, Tokens, all_of_it, serial

Case = dict[str, Hashable]

PROMPT = (1, 0)
END = 2
"""The id that `min_tokens` forbids."""

FACTORS: dict[str, Sequence[Hashable]] = {
    "drafter": ("sampled", "filtered", "argmax", "lookup", "reduced", "markov", "same"),
    "k": (1, 2, 3),
    "temperature": (0.0, 0.5, 1.0, 1.7),
    "filters": ("none", "top_k", "top_p", "min_p", "all"),
    "adjust": ("none", "penalties", "bias", "bad_words", "min_tokens"),
    "lengths": ("all", "none", "one", "confident", "history"),
    "target": ("table", "position", "history", "tied"),
}

FILTERS: dict[Hashable, dict[str, float]] = {
    "none": {},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.75},
    "min_p": {"min_p": 0.3},
    "all": {"top_k": 2, "top_p": 0.9, "min_p": 0.1},
}

ADJUST: dict[Hashable, dict[str, object]] = {
    "none": {},
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.4},
    "bias": {"logit_bias": {0: 0.6, 2: -0.5}, "allowed_token_ids": (0, 1, 2)},
    "bad_words": {"bad_words": ([1, 0], [2, 2])},
    "min_tokens": {"min_tokens": 3},
}


def random_logits(key: Sequence[Hashable], vocab_size: int) -> list[float]:
    """[V] a function of the key alone, the same in every process."""
    source = random.Random(repr(key))
    return [source.uniform(-1.5, 1.5) for _ in range(vocab_size)]


def logits_of(kind: Hashable, salt: str, vocab_size: int) -> Logits:
    def table(prefix: Sequence[int]) -> list[float]:
        return random_logits((salt, prefix[-1]), vocab_size)

    def position(prefix: Sequence[int]) -> list[float]:
        return random_logits((salt, len(prefix)), vocab_size)

    def history(prefix: Sequence[int]) -> list[float]:
        return random_logits((salt, *prefix), vocab_size)

    def tied(prefix: Sequence[int]) -> list[float]:
        """Two or three equal largest logits at every state (EQ-1)."""
        return [max(0.0, round(x)) for x in table(prefix)]

    return {"table": table, "position": position, "history": history, "tied": tied}[str(kind)]


def target_of(case: Mapping[str, Hashable], vocab_size: int) -> Model:
    options: dict[str, object] = {**FILTERS[case["filters"]], **ADJUST[case["adjust"]]}
    sampling = Sampling(temperature=case["temperature"], **options)  # type: ignore[arg-type]
    return Model(logits_of(case["target"], "target", vocab_size), sampling, len(PROMPT), frozenset({END}))


def drafting_of(case: Mapping[str, Hashable], target: Model, vocab_size: int) -> Drafting:
    k = int(str(case["k"]))
    return serial(DRAFTERS[str(case["drafter"])](target, vocab_size), k)


SlotOf = Callable[[Tokens, Tokens], Slot]


def _drawn(logits: Sequence[float], row: Row) -> Slot:
    """Drawn from what it reports; c_k is the largest probability: known before the token is drawn."""
    law = distribution(torch.tensor([logits], dtype=torch.float64), [row])[0]
    return Slot(law, law, float(law.max()))


def sampled(target: Model, vocab_size: int) -> SlotOf:
    """A small model under the request's own options."""
    logits = logits_of("table", "draft", vocab_size)
    return lambda prefix, drafted: _drawn(logits([*prefix, *drafted]), target.row(prefix, drafted))


def filtered(target: Model, vocab_size: int) -> SlotOf:
    """Filters and temperature of its own, no penalties; the narrowed law is what it reports."""
    logits, own = logits_of("table", "draft", vocab_size), Sampling(temperature=0.8, top_k=2)
    return lambda prefix, drafted: _drawn(logits([*prefix, *drafted]), Row(own, prefix, len(PROMPT), drafted))


def argmax(target: Model, vocab_size: int) -> SlotOf:
    """The most probable token as a point mass, at any temperature."""
    inner = sampled(target, vocab_size)

    def slot(prefix: Tokens, drafted: Tokens) -> Slot:
        law = inner(prefix, drafted).drawn
        return Slot(torch.nn.functional.one_hot(law.argmax(), vocab_size).double(), None, float(law.max()))

    return slot


def lookup(target: Model, vocab_size: int) -> SlotOf:
    """A function of the history, like n-grams; it proposes tokens the target cannot produce as well."""

    def slot(prefix: Tokens, drafted: Tokens) -> Slot:
        token = (3 * len(prefix) + 2 * len(drafted) + prefix[-1]) % vocab_size
        return Slot(torch.nn.functional.one_hot(torch.tensor(token), vocab_size).double(), None, 0.5)

    return slot


def reduced(target: Model, vocab_size: int) -> SlotOf:
    """A draft vocabulary without id 0: its column is minus infinity before the softmax."""
    logits = logits_of("history", "draft", vocab_size)

    def slot(prefix: Tokens, drafted: Tokens) -> Slot:
        row = logits([*prefix, *drafted])
        return _drawn([float("-inf"), *row[1:]], Row(Sampling(temperature=0.9), prefix, len(PROMPT), drafted))

    return slot


def markov(target: Model, vocab_size: int) -> SlotOf:
    """A block drafter: logits of the slot, plus a bias by the token before; blind to everything else in the block."""

    def slot(prefix: Tokens, drafted: Tokens) -> Slot:
        base = random_logits(("block", prefix, len(drafted)), vocab_size)
        bias = random_logits(("bias", [*prefix, *drafted][-1]), vocab_size)
        return _drawn([x + b for x, b in zip(base, bias, strict=True)], target.row(prefix, drafted))

    return slot


def same(target: Model, vocab_size: int) -> SlotOf:
    """The target itself: everything is accepted and every residual is empty."""
    return lambda prefix, drafted: _drawn(target.logits([*prefix, *drafted]), target.row(prefix, drafted))


DRAFTERS = {f.__name__: f for f in (sampled, filtered, argmax, lookup, reduced, markov, same)}


def confident(draft: Draft, prefix: Tokens, carry: Carry) -> int:
    """Cut before the first k with c_k below a threshold: looks at x_<k only."""
    return next((k for k, c in enumerate(draft.confidence) if c < 0.5), len(draft.tokens))


LENGTHS: dict[Hashable, Lengths] = {
    "all": all_of_it,
    "none": lambda draft, prefix, carry: 0,
    "one": lambda draft, prefix, carry: 1,
    "confident": confident,
    "history": lambda draft, prefix, carry: (sum(prefix) + len(prefix)) % (len(draft.tokens) + 1),
}
