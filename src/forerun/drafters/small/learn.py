"""Distilling a small model: it learns the target's own law on the prepared samples, token by token."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

from forerun.drafters.checkpoint import fingerprint_of, put_in_place
from forerun.drafters.learned import DesignPlan, Exercise, Learner, Losses, TrainingBatch, wide
from forerun.drafters.losses import RowLosses, Taught, chunk_rows, compare, in_chunks, weighed
from forerun.drafters.small.config import SmallSettings
from forerun.drafters.small.decode import Small
from forerun.drafters.small.record import write_record
from forerun.drafters.vocabulary import DraftVocabulary
from forerun.errors import ModelError, OptionError
from forerun.target.base import Target
from forerun.target.donor import layers_by_influence
from forerun.target.dtypes import dtype_named
from forerun.target.hf import HFTarget
from forerun.target.student import StudentModel, cut_student, load_student
from forerun.target.tokenizer import HFTokenizer, shared_vocabulary

NEW = ".new"
"""Where a model is written before its files take their places."""


@dataclass(frozen=True)
class Beginning:
    """A model to begin with."""

    network: StudentModel
    tokenizer: HFTokenizer
    name: str
    notes: tuple[str, ...] = ()
    layers: tuple[int, ...] | None = None
    """Of the target, if it was cut from it."""


class SmallLearner(Learner):
    """A small model in training.

    Args:
        begun: what is trained; the tokenizer is saved with it.
        target: the teacher.
        dtype: of the saved weights.
        settings: of the losses.
        chat_template: of the data, as in `DesignPlan`.

    Raises:
        VocabularyMismatch: target and model have different tokenizers.
    """

    name = "small"
    settings_class = SmallSettings
    library = "transformers"
    promise = (
        "The folder is an ordinary model's: transformers loads it, and so does any engine that drafts with a model of "
        "its own (vLLM's `draft_model`), beside any target with this vocabulary."
    )
    taps = ()
    network: StudentModel

    def __init__(
        self,
        begun: Beginning,
        target: Target,
        dtype: torch.dtype,
        settings: SmallSettings,
        chat_template: str | None = None,
    ):
        self.network, self.tokenizer, self.begun = begun.network, begun.tokenizer, begun
        self.target, self.settings, self._dtype = target, settings, dtype
        self._chat_template = chat_template
        known = shared_vocabulary(target.tokenizer, begun.tokenizer)
        self.shared_ids = min(known, begun.network.vocab_size, target.vocab_size)
        whole = self.shared_ids == target.vocab_size
        self.vocabulary = DraftVocabulary(target.vocab_size, None if whole else torch.arange(self.shared_ids))

    @classmethod
    def design(cls, target: Target, settings: SmallSettings, plan: DesignPlan) -> Self:
        """See `Learner.design`. ModelError: the model to begin with cannot be used."""
        begun = (_cut if settings.model is None else _loaded)(target, settings, plan)
        if plan.training_length > begun.network.window:
            raise OptionError(
                "--max-length",
                f"the samples have up to {plan.training_length} tokens, {begun.name} takes {begun.network.window}",
            )
        return cls(begun, target, dtype_named(plan.dtype), settings, plan.chat_template)

    @property
    def base_model(self) -> str:
        return self.begun.name

    @property
    def notes(self) -> tuple[str, ...]:
        return self.begun.notes

    @property
    def saved_dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def made_for(self) -> Mapping[str, str]:
        return fingerprint_of(self.target, self._chat_template)

    @property
    def needs_normalizer(self) -> bool:
        """Nearly all ids are shared, if not all: the whole head is no more work."""
        return False

    @property
    def tables(self) -> tuple[nn.Embedding, nn.Linear]:
        return self.network.tables

    # -------------------------------------------------------------------------------------------------------- training

    def prepare(self, batch: TrainingBatch, generator: torch.Generator) -> Exercise:  # noqa: ARG002 - nothing is drawn
        rows = taught_rows(batch)
        return Exercise(float(len(rows)), {"rows": rows})

    def losses(self, batch: TrainingBatch, exercise: Exercise, progress: float) -> Losses:  # noqa: ARG002
        rows: Tensor = exercise.drawn["rows"]
        # As in decoding: a token it has no row for is replaced by one of its own.
        tokens = batch.tokens.clamp(max=self.network.vocab_size - 1)
        hidden = self.network(tokens, batch.positions, batch.lengths)  # [T, H]
        if len(rows) == 0:
            return Losses(hidden.sum() * 0, {})

        def taught(hidden: Tensor, rows: Tensor) -> Taught:
            logits = wide(self.network.logits(hidden))[:, : self.shared_ids]
            known = None if batch.log_normalizer is None else batch.log_normalizer[rows]
            target_probs = self.target_probs(batch.last[rows], known)
            losses = compare(logits, target_probs, self.vocabulary.to_draft(batch.tokens[rows + 1]))
            return weighed(losses, self.settings.ce, self.settings.ce_weight, self.settings.l1_weight).sum(), losses

        size = chunk_rows(max(self.network.vocab_size, self.target.vocab_size))
        head = self.network.tables[1].parameters()
        total, columns = in_chunks(taught, size, (hidden[rows], rows), parameters=head)
        return Losses(total, _metrics(RowLosses(*columns)))

    # ---------------------------------------------------------------------------------------------------------- saving

    def save(self, folder: Path) -> None:
        """A Hugging Face model folder, and beside it the record of the target."""
        folder.mkdir(parents=True, exist_ok=True)
        new = folder / NEW
        shutil.rmtree(new, ignore_errors=True)
        self.network.save(new, self.tokenizer, self._dtype)
        for path in sorted(new.iterdir(), key=lambda path: path.name == "config.json"):  # the config comes last
            if path.is_dir():  # further chat templates
                shutil.rmtree(folder / path.name, ignore_errors=True)
                path.rename(folder / path.name)
            else:
                shutil.copymode(new / "config.json", path)  # see `save_drafter`
                put_in_place(path, folder / path.name)
        new.rmdir()
        write_record(
            folder,
            {
                "method": self.name,
                "target_name": self.target.name,
                "target_fingerprint": dict(self.made_for),
                "begun_as": {"model": self.begun.name, "layers": self.begun.layers},
                "settings": self.settings.model_dump(mode="json"),
            },
        )

    def for_decoding(self, dtype: torch.dtype) -> Small:
        model = self.network.as_target(self.tokenizer, self._dtype, dtype)
        return Small(model, self.target.vocab_size, self.shared_ids)


def taught_rows(batch: TrainingBatch) -> Tensor:
    """[n] packed rows whose next token is in the same sequence and under the loss mask."""
    taught = batch.loss_mask.roll(-1)
    taught[torch.tensor(batch.lengths, device=taught.device).cumsum(0) - 1] = False
    return taught.nonzero()[:, 0]


def _metrics(losses: RowLosses) -> dict[str, tuple[float, float]]:
    columns = {"ce": losses.ce, "soft_ce": losses.soft_ce, "l1": losses.l1}
    columns["teacher_forced_acceptance@1"] = losses.acceptance
    return {name: (float(column.sum()), float(len(column))) for name, column in columns.items()}


# -------------------------------------------------------------------------------------------------- what it begins as


def _cut(target: Target, settings: SmallSettings, plan: DesignPlan) -> Beginning:
    """The target with some of its layers."""
    if not isinstance(target, HFTarget) or not isinstance(target.tokenizer, HFTokenizer):
        raise OptionError("model", f"{target.name} is no Hugging Face model that could be cut: name one to begin with")
    most = target.num_layers
    count = max(1, round(most / 6)) if settings.layers is None else settings.layers
    if count > most:
        raise OptionError("layers", f"{target.name} has {most}")
    kept = kept_layers(target, count, plan)
    note = f"it begins as layers {', '.join(map(str, kept))} of {most} of {target.name}, those that change the most"
    return Beginning(cut_student(target, kept), target.tokenizer, target.name, (note,), tuple(kept))


def kept_layers(target: HFTarget, count: int, plan: DesignPlan) -> list[int]:
    """The layers, ascending, that change the hidden state the most (ShortGPT's measure, arXiv 2403.03853), tried on
    tokens as frequent as in the training data.

    Measured against fixed choices on the embedded target, acceptance over given text before and after 24 short steps:

    | layers | so chosen | evenly spread | first | last |
    |---|---|---|---|---|
    | 2 | 0.37, 0.49 | 0.32, 0.44 | 0.23, 0.30 | 0.05, 0.11 |
    | 3 | 0.75, 0.81 | 0.36, 0.46 | 0.23, 0.30 | 0.03, 0.08 |

    That target was grown from four layers, which are found. Of Qwen2.5-Coder 0.5B the first ones are chosen: not tried.
    """
    influence = layers_by_influence(target, plan.token_counts, plan.seed)
    best = sorted(range(target.num_layers), key=lambda layer: -influence[layer])
    return sorted(best[:count])


def _loaded(target: Target, settings: SmallSettings, plan: DesignPlan) -> Beginning:
    """The model that was named. ModelError says so of it."""
    assert settings.model is not None
    try:
        network, tokenizer = load_student(
            settings.model, target.device, revision=settings.revision, trust_remote_code=plan.trust_remote_code
        )
    except ModelError as error:
        raise type(error)(f"--draft.model: {str(error).removeprefix('--target: ')}") from error
    return Beginning(network, tokenizer, settings.model)
