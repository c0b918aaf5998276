"""The model card beside a trained drafter: what it is for, what it learned from, what that took, how good it is."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import forerun
from forerun.drafters.card import CARD
from forerun.target.dtypes import dtype_name
from forerun.training.checkpoints import Progress
from forerun.training.config import as_yaml
from forerun.training.metrics import POSITIONS

if TYPE_CHECKING:
    from forerun.training.setup import Job


def write_card(folder: Path, job: Job, progress: Progress) -> None:
    """Writes the card of the drafter in a folder."""
    new = folder / f"{CARD}.new"
    new.write_text(card(job, progress), encoding="utf-8")
    new.replace(folder / CARD)


def card(job: Job, progress: Progress) -> str:
    """The page, from what the run knows of itself."""
    parts = [
        _head(job, progress),
        _use(job),
        _results(progress.evaluation, progress.step),
        _target(job),
        _data(job),
        _compute(job, progress),
        f"## Settings\n\n```yaml\n{as_yaml(job.chosen)}```",
    ]
    return "\n\n".join(parts) + "\n"


def _head(job: Job, progress: Progress) -> str:
    kind, target = job.drafter.name, job.target.name
    tags = ["speculative-decoding", "forerun", kind]
    meta = {"library_name": job.drafter.library, "base_model": job.drafter.base_model, "tags": tags}
    lines = "\n".join(f"{name}: {json.dumps(value)}" for name, value in meta.items())
    parameters = sum(p.numel() for p in job.drafter.network.parameters())
    saved = dtype_name(job.drafter.saved_dtype)
    return (
        f"---\n{lines}\n---\n# `{kind}` drafter for {target}\n\n"
        f"A drafter for lossless speculative decoding: it guesses the next tokens, {target} checks them in one pass, "
        "and the text is what the target alone would have written. "
        f"{parameters:,} parameters, saved in {saved}; "
        f"step {progress.step:,} of {job.config.steps:,} of a run of forerun {forerun.__version__}."
    )


def _use(job: Job) -> str:
    config = json.dumps({"method": job.drafter.name, "model": "THIS FOLDER"})
    return (
        "## How to use it\n\n```\n"
        f"forerun generate --target {job.config.target} --speculative-config '{config}' --prompt 'Hello'\n"
        f"```\n\n{job.drafter.promise}"
    )


def _results(evaluation: Mapping[str, Any] | None, step: int) -> str:
    if evaluation is None:
        return "## How good it is\n\nIt was not evaluated: no samples were held out."
    later = "" if evaluation["step"] == step else f" (the evaluation after step {evaluation['step']:,})"
    blocks = [f"## How good it is\n\nOn samples that were never trained on{later}."]
    for one in evaluation["decoding"]:
        blocks.append(_decoding(one))
    forced = evaluation["teacher_forced"]
    if forced.get(POSITIONS):
        rows = [(f"`{POSITIONS}`", forced[POSITIONS])]
        blocks.append("Over the held-out text as given, nothing sampled (1 - TV, no prediction of speed):")
        blocks.append(_by_position(rows))
    others = {name: value for name, value in forced.items() if not isinstance(value, list) and value is not None}
    blocks.append("Held-out losses: " + ", ".join(f"{name} {value:.4f}" for name, value in others.items()) + ".")
    return "\n\n".join(blocks)


def _decoding(one: Mapping[str, Any]) -> str:
    """Real decoding at one temperature; a rate nothing happened for is left out."""
    numbers = [
        f"{name.replace('_', ' ')} {one[name]:.3f}"
        for name in ("mean_accepted_length", "tokens_per_step", "confidence_ece", "confidence_bce")
        if one.get(name) is not None
    ]
    title = f"Decoding at temperature {one['temperature']:g}, {one['prompts']} prompts: {', '.join(numbers)}."
    rows = [(f"`{name}`", one[name]) for name in ("acceptance_by_position", "prefix_survival") if one.get(name)]
    return f"{title}\n\n{_by_position(rows)}" if rows else title


def _by_position(rows: Sequence[tuple[str, Sequence[float | None]]]) -> str:
    """A table with a column per position of the draft."""
    width = max(len(values) for _, values in rows)
    lines = ["| position | " + " | ".join(str(k) for k in range(1, width + 1)) + " |", "|---" * (width + 1) + "|"]
    for name, values in rows:
        cells = ["" if value is None else f"{value:.3f}" for value in values] + [""] * (width - len(values))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _target(job: Job) -> str:
    prints = job.drafter.made_for
    lines = [f"- {part.replace('_', ' ')}: `{value}`" for part, value in prints.items()]
    taps = ", ".join(map(str, job.drafter.taps))
    read = f", hidden states {taps} of {job.target.num_layers}" if taps else ""
    return "\n".join([f"## Target\n\n{job.target.name}{read}. Its fingerprint:\n", *lines])


def _data(job: Job) -> str:
    train, manifest = job.inputs.train, job.inputs.manifest
    lengths = train.lengths
    lines = [
        f"- {len(train):,} samples, {int(lengths.sum()):,} tokens, the longest of {int(lengths.max()):,}",
        f"- {job.inputs.held_out_count:,} samples held out ({job.inputs.reason})",
        f"- digest of the samples: `{job.identity['data']}`",
    ]
    for name in ("target", "tokenizer", "template", "options", "sources", "records", "dropped"):
        if name in manifest:
            lines.append(f"- {name}: `{json.dumps(manifest[name], ensure_ascii=False)}`")
    return "\n".join(["## Data\n", *lines])


def _compute(job: Job, progress: Progress) -> str:
    used = progress.used
    speed = used.tokens / used.seconds if used.seconds else 0.0
    devices = f"{job.accelerator.num_processes} x {job.target.device.type}"
    lines = [
        f"- {progress.step:,} steps, {used.tokens:,} tokens, {devices}",
        f"- {used.seconds:,.0f} s on the wall, evaluations included ({speed:,.0f} tokens/s); "
        f"{used.cpu_seconds:,.0f} CPU seconds, {used.device_seconds:,.0f} GPU seconds",
        f"- peak memory {used.peak_memory / 1e9:.2f} GB",
    ]
    return "\n".join(["## Compute\n", *lines])
