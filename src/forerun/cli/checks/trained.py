"""Checks of a trained drafter: is this the target it learned from, is its folder all there, what can it propose?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from forerun.budget.stored import CALIBRATION, CALIBRATION_OF_COPIES, read_calibration
from forerun.cli.checks.check import Check, Status
from forerun.cli.prompts import embedded_prompts
from forerun.drafters.card import CARD, accepted_lengths
from forerun.drafters.checkpoint import WEIGHTS, unpacked
from forerun.drafters.learned import DraftConfig, LearnedDrafter
from forerun.drafters.small.record import made_from
from forerun.errors import OptionError
from forerun.target.dtypes import dtype_name
from forerun.target.fingerprint import Fingerprint, differences, fingerprint
from forerun.target.hf import HFTarget

COVERED = 0.8
"""Share of a text's tokens below which a pruned vocabulary is too small for it: no draft survives them."""
TEXTS = 16
"""Of the package's own prompts, that the coverage is counted on."""
OWN_LINES = {"transformer_layer_config", *DraftConfig.model_fields}
"""Fields of a config that are not shown as its conventions: they have lines of their own, or say nothing to a user."""


def trained_checks(target: HFTarget, drafter: LearnedDrafter, allowed: bool) -> Iterator[Check]:
    """Everything but what it gets right.

    Args:
        target: at hand.
        drafter: loaded for it, whatever it was trained for.
        allowed: whether the user has said that it need not be the target it was trained for.
    """
    yield from _made_for(target, drafter, "warning" if allowed else "error")
    yield _lengths(drafter)
    yield _taps(drafter)
    yield _conventions(drafter)
    yield _coverage(target, drafter)
    yield from _weights(target, drafter)
    if drafter.folder is not None:
        yield _card(drafter.name, drafter.folder)
        own = CALIBRATION if drafter.copying is None else CALIBRATION_OF_COPIES
        yield _calibration(drafter.name, drafter.folder, own)


def distilled_checks(target: HFTarget, name: str, folder: Path) -> Iterator[Check]:
    """Of a model that was distilled here: whose law it learned, and how well. It drafts for any target with its
    vocabulary, so that another one is no error."""
    found = made_from(folder, target)
    if found is None:
        return
    teacher, parts = found
    differ = f", {', '.join(parts)} differ" if parts else ""
    yield Check.of(
        f"{name} fingerprint", not parts, f"distilled from {teacher}{differ}",
        "this target", "it learned another law and accepts less; distil it from this target",
    )  # fmt: skip
    yield _card(name, folder)


# ---------------------------------------------------------------------------------------------------------- the target


def _made_for(target: HFTarget, drafter: LearnedDrafter, otherwise: Status) -> Iterator[Check]:
    """Its record of the target against this one; the chat template by itself, since data may have had another."""
    name, trained_for = drafter.name, drafter.config.target_name
    if not drafter.made_for:
        yield Check(
            f"{name} fingerprint", otherwise, "empty: it does not say which target it was trained for",
            "the fingerprint of this target", "train it anew, or give allow_target_mismatch",
        )  # fmt: skip
        return
    made_for, found = Fingerprint.from_dict(drafter.made_for), fingerprint(target)
    parts = differences(made_for, found)
    model = [part for part in parts if part != "chat_template"]
    yield Check.of(
        f"{name} fingerprint", not model,
        _compared(made_for, found, model) if model else "config, weights and tokenizer are the target's",
        f"those of this target (it was trained for {trained_for})",
        "use it with the target it was trained for; allow_target_mismatch drafts with it anyway, and accepts less",
        otherwise,
    )  # fmt: skip
    same = "chat_template" not in parts
    yield Check.of(
        f"{name} template", same,
        "the target's" if same else _compared(made_for, found, ["chat_template"]), "the target's",
        "prepare its data with the template that is served; allow_target_mismatch drafts anyway, and accepts less",
        otherwise,
    )  # fmt: skip
    yield Check.of(
        f"{name} features", made_for.dtype == found.dtype, f"learned in {made_for.dtype}", found.dtype,
        f"--dtype {made_for.dtype}, or accept a little less",
    )  # fmt: skip


def _compared(made_for: Fingerprint, found: Fingerprint, parts: list[str]) -> str:
    return ", ".join(f"{p} {getattr(made_for, p)[:8]}, this target has {getattr(found, p)[:8]}" for p in parts)


# --------------------------------------------------------------------------------------------------------- the drafter


def _lengths(drafter: LearnedDrafter) -> Check:
    found = f"trained on samples of up to {drafter.config.training_length} tokens"
    return Check(f"{drafter.name} lengths", "ok", f"{found}; beyond that it drafts what it has not been tried on")


def _taps(drafter: LearnedDrafter) -> Check:
    """In range, or the config would not have been read."""
    taps = ", ".join(map(str, drafter.taps))
    layers = drafter.config.target_num_layers
    return Check(f"{drafter.name} taps", "ok", f"h = {taps} of {layers} (0 is the embedding; before the final norm)")


def _conventions(drafter: LearnedDrafter) -> Check:
    """What its config says beyond what all drafters have: none of it has a default."""
    own = drafter.config.model_dump(mode="json", exclude=OWN_LINES)
    shown = [f"{name} {str(value).lower() if isinstance(value, bool) else value}" for name, value in own.items()]
    return Check(f"{drafter.name} conventions", "ok", ", ".join(shown) or "none of its own")


def _coverage(target: HFTarget, drafter: LearnedDrafter) -> Check:
    """How much of a text it could propose at all."""
    name, kept = drafter.name, drafter.vocabulary.kept
    if kept is None:
        return Check(f"{name} vocabulary", "ok", f"all {drafter.vocabulary.size} ids of the target")
    ids = [token for text in embedded_prompts(TEXTS) for token in target.tokenizer.encode(text)]
    share = float(torch.isin(torch.tensor(ids), kept.cpu()).double().mean())
    found = f"{len(kept)} of {drafter.vocabulary.size} ids, {share:.1%} of the tokens of {TEXTS} texts of Python code"
    return Check.of(
        f"{name} vocabulary", share >= COVERED, found, f"at least {COVERED:.0%}",
        "what it cannot propose ends a draft: train it with a larger --draft.draft-vocab-size, or on text like yours",
    )  # fmt: skip


def _weights(target: HFTarget, drafter: LearnedDrafter) -> Iterator[Check]:
    """As they are used: finite in the file, they may not be so in a narrower dtype."""
    state = unpacked(drafter.network).state_dict()
    broken = [name for name, tensor in state.items() if not bool(tensor.isfinite().all())]
    used, stored = dtype_name(target.dtype), drafter.config.dtype
    size = sum(tensor.numel() for tensor in state.values())
    bad = f"{len(broken)} tensors are not finite in {used}: {', '.join(broken[:3])}"
    yield Check.of(
        f"{drafter.name} weights", not broken, bad if broken else f"{size:,} parameters, finite", "finite numbers",
        f"--dtype {stored}, which they were saved in", "error",
    )  # fmt: skip
    yield Check.of(
        f"{drafter.name} dtype", used == stored, f"saved in {stored}, used in {used}", used,
        f"--dtype {stored} for both; rounding costs a little acceptance",
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- its folder


def _card(name: str, folder: Path) -> Check:
    lengths = accepted_lengths(folder)
    if lengths:
        shown = ", ".join(f"{length:.2f} at T = {temperature:g}" for temperature, length in lengths.items())
        return Check(f"{name} card", "ok", f"accepted length on its held-out samples: {shown}")
    return Check(
        f"{name} card", "warning", f"no {CARD}" if lengths is None else "says of no decoding how good it was",
        f"{CARD} with the numbers of an evaluation",
        "keep it beside the weights, and hold samples out of training: nothing else says what to expect",
    )  # fmt: skip


def _calibration(name: str, folder: Path, own: str) -> Check:
    """None is no fault: confidences decide how much is drafted, never what is written."""
    file = folder / own
    try:
        calibration = read_calibration(file)
    except OptionError as error:
        return Check(f"{name} calibration", "warning", str(error), "a file of `forerun calibrate`", "run it again")
    if calibration is None:
        return Check(f"{name} calibration", "ok", "none: confidences are taken as they come (`forerun calibrate`)")
    fresh = file.stat().st_mtime >= (folder / WEIGHTS).stat().st_mtime
    measured = "; ".join(map(str, calibration.keys)) or "nothing"
    return Check.of(
        f"{name} calibration", fresh, measured if fresh else f"older than {WEIGHTS}: measured on other weights",
        f"a {own} made after the weights", "run `forerun calibrate` again",
    )  # fmt: skip
