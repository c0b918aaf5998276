"""What the trainer knows of a kind."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Self

from forerun.drafters.learned.batch import Exercise, Held, Losses, Material, TrainingBatch, wide
from forerun.drafters.learned.config import LearnerSettings
from forerun.drafters.learned.memory import chunk_of_logits, kept_by_linears, linear_numbers

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import Tensor, nn

    from forerun.drafters.base import Drafter
    from forerun.drafters.learned.design import DesignPlan
    from forerun.drafters.vocabulary import DraftVocabulary
    from forerun.target.base import Target


class Learner(ABC):
    """What is trained: a network that learns to predict its target. The trainer knows this of a kind and no more."""

    name: ClassVar[str]
    """Of the kind."""
    settings_class: ClassVar[type[LearnerSettings]]
    library: ClassVar[str] = "forerun"
    """What loads a folder written by `save`, for its card."""
    promise: ClassVar[str] = (
        "It is loaded for this target only: another model, tokenizer or chat template is refused by name."
    )
    """For what it can be loaded, for its card."""

    target: Target
    """Gives embedding, final norm and head, and the law that is learned."""
    network: nn.Module
    """What is trained, in float32."""
    vocabulary: DraftVocabulary
    """The target ids it can propose."""
    taps: tuple[int, ...]
    """Target hidden states it reads, h convention, ascending; none, if it only learns from the law."""
    settings: Any
    """Of its training."""

    @classmethod
    @abstractmethod
    def design(cls, target: Target, settings: Any, plan: DesignPlan) -> Self:
        """A new one for a target, with its starting weights in float32; `settings` are of `settings_class`.

        Raises:
            OptionError: a setting that does not fit the target (taps out of range, a vocabulary larger than V).
        """

    @property
    @abstractmethod
    def saved_dtype(self) -> torch.dtype:
        """Of the weights that `save` writes."""

    @property
    @abstractmethod
    def made_for(self) -> Mapping[str, str]:
        """The fingerprint of its target, part by part; `chat_template` is the one its data was rendered with."""

    @property
    def base_model(self) -> str:
        """The model it is made from, for its card."""
        return self.target.name

    @property
    def notes(self) -> tuple[str, ...]:
        """What was decided in its design, for the user to know."""
        return ()

    @property
    def needs_normalizer(self) -> bool:
        """Whether `log_normalizer` of a batch spares it the teacher's whole head."""
        return self.vocabulary.kept is not None

    @property
    def tables(self) -> tuple[nn.Embedding, nn.Linear] | None:
        """Embedding and head, where the network has its own: a plan counts them apart from its layers."""
        return None

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Writes what a drafter of the kind is loaded from; other files in the folder are kept."""

    @abstractmethod
    def for_decoding(self, dtype: torch.dtype) -> Drafter:
        """A frozen copy in another dtype, as it decodes after saving and loading; the original goes on training."""

    def plan_rows_per_token(self, lengths: Sequence[int]) -> float:  # noqa: ARG002 - for kinds that draw by sequence
        """Positions that its network computes per token of samples of these lengths, for estimates of work."""
        return 1.0

    def plan_memory(self, lengths: Sequence[int], half: bool) -> list[Held]:
        """What a pass over samples of these lengths holds at its height, beside weights, gradients and features: what
        its layers keep for the backward pass, and one chunk of its losses.

        Counted here by the linear layers of any network; a kind that knows its layers counts them.

        Args:
            lengths: tokens of the samples of one pass.
            half: linear layers compute in two bytes.
        """
        rows = math.ceil(sum(lengths) * self.plan_rows_per_token(lengths))
        numbers = linear_numbers(self.network, self.tables or ())
        columns = self.vocabulary.draft_size if self.tables is None else self.tables[1].out_features
        chunk = chunk_of_logits(rows, max(self.target.vocab_size, columns), columns)
        return [kept_by_linears(rows, numbers, half), chunk]

    def plan_start(self) -> Held | None:
        """What `fit_start` holds at its height, beside weights; None: it does nothing."""
        return None

    def fit_start(self, material: Material) -> bool:  # noqa: ARG002 - for kinds that have a start to fit
        """Better starting weights, computed from the data: called once, before the first step of a run that is new.
        False: the weights are as they were, as with most kinds."""
        return False

    @abstractmethod
    def prepare(self, batch: TrainingBatch, generator: torch.Generator) -> Exercise:
        """Draws what this step trains on, one sequence after the other.

        Depends on the (CPU) generator and on tokens, lengths, marks and shapes of the batch, not on the values of its
        features: it is called before the target has run. A step's micro-batches share one generator, so what is drawn
        for a sequence is the same however the step is cut.
        """

    @abstractmethod
    def losses(self, batch: TrainingBatch, exercise: Exercise, progress: float) -> Losses:
        """The objective on a micro-batch.

        Args:
            batch: packed sequences with features of `taps`.
            exercise: what `prepare` drew for it.
            progress: share of the training that is done, 0 .. 1, for loss schedules.
        """

    def teacher_columns(self, normalized: bool) -> int:
        """Logits that `target_probs` computes of a row, with `log_normalizer` or without."""
        pruned = normalized and self.vocabulary.kept is not None
        return self.vocabulary.draft_size if pruned else self.target.vocab_size

    def target_probs(self, last: Tensor, log_normalizer: Tensor | None = None) -> Tensor:
        """The target's law [n, D] at the ids of the draft vocabulary, not renormalised, at temperature 1.

        Args:
            last: [n, H] hidden state before the final norm; its row speaks of the next token.
            log_normalizer: [n], if known; otherwise a pruned vocabulary costs a full head.
        """
        import torch

        with torch.no_grad():
            normed = self.target.final_norm(last.to(self.target.dtype))
            kept = self.vocabulary.kept
            if kept is None:
                return torch.softmax(wide(self.target.logits(normed)), -1)
            if log_normalizer is None:
                logits = wide(self.target.logits(normed))
                return (logits[:, kept] - logits.logsumexp(-1, keepdim=True)).exp()
            return (wide(self._partial(normed)) - log_normalizer[:, None]).exp()

    @cached_property
    def _partial(self) -> Callable[[Tensor], Tensor]:
        assert self.vocabulary.kept is not None
        return self.target.partial_logits(self.vocabulary.kept)
