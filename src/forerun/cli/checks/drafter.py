"""Checks of a drafter against its target: vocabulary, template, window, and what it gets right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from forerun.cli.checks.check import Check
from forerun.cli.checks.prefix_cache import prefix_cache_checks
from forerun.cli.checks.trained import distilled_checks, trained_checks
from forerun.cli.console import progress
from forerun.cli.prompts import embedded_prompts
from forerun.drafters.base import Drafter
from forerun.drafters.card import accepted_lengths
from forerun.drafters.learned import LearnedDrafter
from forerun.engine import Engine, EngineOptions
from forerun.engine.propose import LoadedDrafter
from forerun.engine.stats import DecodingStats, total
from forerun.sampling import Sampling
from forerun.target.base import Target
from forerun.target.dtypes import dtype_name
from forerun.target.fingerprint import PROBE
from forerun.target.hf import HFTarget

PROMPT_TOKENS, NEW_TOKENS = 64, 32
"""Of each prompt of the acceptance probe: short, so that a big model is probed in a minute."""
HOPELESS = 0.1
"""Acceptance of the first draft token below which drafting costs more than it gives on any machine."""


def drafter_checks(target: HFTarget, entry: LoadedDrafter, allowed: bool) -> Iterator[Check]:
    """What can be said of a drafter without running it; `allowed`: it need not be made for this target."""
    drafter, name = entry.drafter, entry.name
    k = entry.config.draft_length(drafter.default_draft, 1)
    limit = "any length" if drafter.max_draft is None else f"at most {drafter.max_draft}"
    yield Check(name, "ok", f"drafts {k} tokens a round ({limit})")
    if drafter.window is not None:
        yield Check.of(
            # After the last position of all nothing is left to draft.
            f"{name} window", drafter.window >= target.window - 1, f"{drafter.window} positions",
            f"{target.window}, the target's", f"nothing is drafted beyond position {drafter.window}",
        )  # fmt: skip
    if isinstance(drafter, LearnedDrafter):
        yield from trained_checks(target, drafter, allowed)
    model = getattr(drafter, "model", None)
    if isinstance(model, Target):
        yield from _model_checks(target, model, name)
        if isinstance(model, HFTarget) and model.model.config.name_or_path:
            yield from distilled_checks(target, name, Path(model.model.config.name_or_path))


def _model_checks(target: Target, model: Target, name: str) -> Iterator[Check]:
    """A drafter with a model of its own: does it read and write the same text?"""
    mine, theirs = target.tokenizer, model.tokenizer
    yield Check(f"{name} vocabulary", "ok", f"{model.vocab_size} logits, {theirs.size} tokens, strings as the target's")
    equal = mine.encode(PROBE) == theirs.encode(PROBE)
    yield Check.of(
        f"{name} tokenizer", equal, "same ids on the probe" if equal else "other ids on the probe",
        "the target's ids", "the pair has different tokenizers; acceptance will be low", "error",
    )  # fmt: skip
    if mine.chat_template is not None and theirs.chat_template is not None:
        same = mine.chat_template == theirs.chat_template
        yield Check.of(
            f"{name} template", same, "the target's" if same else "another one", "the target's",
            "the target's is used for both; a drafter trained on another one accepts less",
        )  # fmt: skip
    yield Check.of(
        f"{name} dtype", model.dtype == target.dtype, dtype_name(model.dtype),
        dtype_name(target.dtype), "--dtype is meant for both",
    )  # fmt: skip


def acceptance_checks(target: Target, loaded: Sequence[LoadedDrafter], count: int) -> Iterator[Check]:
    """Greedy decoding of the package's own prompts with each drafter in turn."""
    engine = Engine(target, loaded, EngineOptions(max_num_seqs=max(1, min(count, 16))))
    most = max(1, min(PROMPT_TOKENS, target.window // 2))
    prompts = [target.tokenizer.encode(text)[-most:] for text in embedded_prompts(count)]
    sampling = Sampling(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    for entry in loaded:
        with progress(f"probing {entry.name}", len(prompts) * NEW_TOKENS) as advance:
            stats = []
            for chunk in engine.stream(prompts, sampling, speculative={"method": entry.name}):
                advance(len(chunk.token_ids))
                if chunk.completion is not None:
                    stats.append(chunk.completion.stats)
        summed = total(stats)
        yield from _faults(entry.name, summed)
        expected = _told(entry.drafter)
        yield _acceptance(entry.name, summed, len(prompts), expected)
    yield from prefix_cache_checks(engine, prompts[0], NEW_TOKENS)
    engine.audit()


def _told(drafter: Drafter) -> float | None:
    """The accepted length that its card tells of greedy decoding."""
    folder = drafter.folder if isinstance(drafter, LearnedDrafter) else None
    return None if folder is None else (accepted_lengths(folder) or {}).get(0.0)


def _faults(name: str, stats: DecodingStats) -> Iterator[Check]:
    """Only where there are some: the engine goes on without these drafts."""
    if stats.drafter_faults or stats.invalid_drafts:
        yield Check(
            f"{name} faults", "error", f"{stats.drafter_faults} failures, {stats.invalid_drafts} drafts without a law",
            "none", "its numbers overflow or it is broken: try --dtype float32; the log has the first failure",
        )  # fmt: skip


def _acceptance(name: str, stats: DecodingStats, prompts: int, told: float | None) -> Check:
    length, by_position = stats.mean_accepted_length, stats.acceptance_by_position
    if length is None:
        return Check(
            f"{name} acceptance", "warning", f"nothing was drafted for {prompts} prompts of Python code", "some drafts",
            "this drafter found nothing to propose; try it on prompts of your own with `forerun generate`",
        )  # fmt: skip
    rates = " ".join("-" if rate is None else f"{rate:.2f}" for rate in by_position)
    found = f"{length:.2f} tokens a drafting round; by position {rates} ({prompts} prompts of Python code, greedy)"
    if told is not None and length < told / 2:
        return Check(
            f"{name} acceptance", "warning", found, f"about the {told:.2f} of its card",
            "these prompts are not like what it learned from, or this is not the target it was trained for",
        )  # fmt: skip
    return Check.of(
        f"{name} acceptance", (by_position[0] or 0.0) >= HOPELESS, found,
        f"at least {HOPELESS} at the first position", "the drafter hardly knows this target: is it the right pair?",
    )  # fmt: skip
