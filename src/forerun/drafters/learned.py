"""Drafters that are trained: what they are to the trainer, beside what every `Drafter` is to the engine.

The trainer and its evaluation know a `Learner`, the engine a `Drafter`. A `LearnedDrafter` is one object for both: it
is designed for a target (or loaded for it), computes its losses on packed batches, and drafts with the same network.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from forerun.drafters.base import Drafter, LoadContext
from forerun.errors import OptionError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from forerun.drafters.vocabulary import DraftVocabulary
    from forerun.target.base import Target


# ------------------------------------------------------------------------------------------------------------- training


@dataclass(frozen=True)
class TrainingBatch:
    """Sequences packed one behind the other, without padding, with what the target computed for them."""

    tokens: Tensor
    """[T] int64."""
    lengths: Sequence[int]
    """Tokens of each sequence; they sum to T."""
    loss_mask: Tensor
    """[T] bool: the target wrote this token, so a drafter may learn to predict it."""
    features: Tensor
    """[T, m * H], the drafter's taps in ascending h, as `target.forward` gives them."""
    last: Tensor
    """[T, H], hidden state h = n, before the final norm: the teacher's law at row t is that of token t + 1."""
    log_normalizer: Tensor | None = None
    """[T] log-sum-exp of the teacher's logits, where it is known: a pruned vocabulary then needs no full head."""

    @cached_property
    def starts(self) -> list[int]:
        """Packed row at which each sequence begins."""
        out, at = [], 0
        for length in self.lengths:
            out.append(at)
            at += length
        return out

    @cached_property
    def positions(self) -> Tensor:
        """[T] position of each row within its sequence."""
        import torch

        return torch.cat([torch.arange(length, device=self.tokens.device) for length in self.lengths])


@dataclass(frozen=True)
class Exercise:
    """What is drawn for one batch before anything is computed: anchors, noise. Its weight is known beforehand, so that
    a step is divided by the weight of all its micro-batches, on all devices, and does not depend on how it is split."""

    weight: float
    drawn: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Losses:
    """One micro-batch: the objective, not yet divided by the weight of the step, and what is worth writing down."""

    total: Tensor
    """Scalar with a graph: a weighted sum over rows."""
    metrics: Mapping[str, tuple[float, float]]
    """name -> (sum, weight); their quotient, over any number of micro-batches, is the metric. `name@k` for position k.
    Reserved: `teacher_forced_acceptance@k`, which evaluation prints by position."""


class LearnerSettings(BaseModel):
    """How a drafter is built and taught: the options of `forerun train KIND` that belong to the kind.

    Every kind adds its own. Descriptions are shown by `forerun train KIND --help`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)


class DraftSettings(LearnerSettings):
    """What all drafters that read the target's features let their user choose."""

    layers: int | None = Field(default=None, ge=1, description="Decoder layers of the drafter; default: by kind.")
    taps: tuple[int, ...] | None = Field(
        default=None, description="Target hidden states it reads (h: 0 is the embedding); default: spread by kind."
    )
    intermediate_size: int | None = Field(default=None, ge=1, description="FFN width; default: the target's.")
    draft_vocab_size: int | None = Field(
        default=None, ge=1, description="Keep only so many ids, the most frequent in the training data."
    )
    init: Literal["target", "random"] = Field(
        default="target", description="Start from the target's last layers, or from random weights."
    )


class DraftConfig(BaseModel):
    """The `config.json` of a trained drafter: every convention is written, nothing has a default.

    Names are those of the speculators format where it has them (formats, 3 to 5).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    forerun_format: Literal[1]
    method: str
    target_name: str
    target_fingerprint: dict[str, str]
    """`Fingerprint.to_dict()`: config, weights, tokenizer, chat template, dtype, each by itself."""
    target_hidden_size: int = Field(ge=1)
    target_num_layers: int = Field(ge=1)
    vocab_size: int = Field(ge=1)
    """V, the columns of the target's logits."""
    draft_vocab_size: int = Field(ge=1)
    """D; equal to vocab_size if every id is kept."""
    layer_id_convention: Literal["h"]
    aux_hidden_state_layer_ids: tuple[int, ...]
    """Taps, ascending."""
    training_length: int = Field(ge=1)
    """Tokens of the longest sequence trained on."""
    dtype: Literal["float32", "bfloat16", "float16", "float64"]

    @field_validator("target_fingerprint")
    @classmethod
    def _whole_fingerprint(cls, value: dict[str, str]) -> dict[str, str]:
        from forerun.target.fingerprint import Fingerprint

        odd = Fingerprint.__dataclass_fields__.keys() ^ value.keys()
        if value and odd:  # a target without weights of its own (tables) has none
            raise ValueError(f"has parts missing or left over: {', '.join(sorted(odd))}")
        return value

    # What a validator compares with stands above it in the file; it is absent if it was refused itself.

    @field_validator("draft_vocab_size")
    @classmethod
    def _kept_of_all(cls, value: int, info: ValidationInfo) -> int:
        if value > info.data.get("vocab_size", value):
            raise ValueError(f"{value} is more than vocab_size ({info.data['vocab_size']})")
        return value

    @field_validator("aux_hidden_state_layer_ids")
    @classmethod
    def _ascending_taps(cls, value: tuple[int, ...], info: ValidationInfo) -> tuple[int, ...]:
        num_layers = info.data.get("target_num_layers")
        if num_layers is not None and not taps_fit(value, num_layers):
            raise ValueError(f"must ascend strictly within 1 .. {num_layers}, got {list(value)}")
        return value

    @field_validator("mask_token_id", check_fields=False)  # of the kinds that have one
    @classmethod
    def _known_mask(cls, value: int, info: ValidationInfo) -> int:
        if value >= info.data.get("vocab_size", value + 1):
            raise ValueError(f"{value} is not below vocab_size ({info.data['vocab_size']})")
        return value


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


class LearnedDrafter(Learner, Drafter):
    """A drafter with a network of its own that reads the target's features.

    Args:
        config: what `config.json` says.
        network: its weights; the names of its parameters are those of the checkpoint. The target's embedding and head
            are used in place and no part of it.
        vocabulary: the target ids it can propose.
        target: gives features, embedding, final norm and head.
    """

    settings_class: ClassVar[type[DraftSettings]]
    config_class: ClassVar[type[DraftConfig]]
    config_keys = frozenset({"model", "revision", "allow_target_mismatch", "max_model_len"})
    renamed: ClassVar[Mapping[str, str]] = {}
    """Prefixes of the network's parameter names -> what stands for them in the checkpoint."""

    def __init__(self, config: DraftConfig, network: nn.Module, vocabulary: DraftVocabulary, target: Target):
        self.config = config
        self.network = network
        self.tensor_names = frozenset(network.state_dict())
        """Of the network as it was built: what a checkpoint must hold, whatever becomes of its layers."""
        self.vocabulary = vocabulary
        self.target = target
        self.taps = config.aux_hidden_state_layer_ids
        self.settings: Any = self.settings_class()
        """Of its training; the defaults where it was loaded."""

    @classmethod
    def learner(cls) -> type[Learner]:
        return cls

    @classmethod
    @abstractmethod
    def network_of(cls, config: Any) -> nn.Module:
        """The network that a config describes, with any weights."""

    @classmethod
    def load(cls, options: Mapping[str, Any], context: LoadContext) -> Self:
        """From a folder written by `save`, frozen, in the dtype and on the device of the context.

        Raises:
            OptionError: no folder given. ModelError: it is no drafter of this kind, is incomplete, or was trained for
            another target (the difference is named; `allow_target_mismatch` loads it anyway).
        """
        from forerun.drafters.checkpoint import load_drafter

        return load_drafter(cls, options, context)

    @property
    def saved_dtype(self) -> torch.dtype:
        import torch

        dtype: torch.dtype = getattr(torch, self.config.dtype)
        return dtype

    @property
    def made_for(self) -> Mapping[str, str]:
        return self.config.target_fingerprint

    def save(self, folder: Path) -> None:
        """Writes `config.json` and `model.safetensors`; other files in the folder are kept.

        One that was loaded is saved as it was rounded to the dtype it decodes in.
        """
        from forerun.drafters.checkpoint import save_drafter

        save_drafter(self, folder)

    def for_decoding(self, dtype: torch.dtype) -> Self:
        """See `Learner.for_decoding`."""
        from forerun.drafters.checkpoint import decoding_copy

        return decoding_copy(self, dtype)

    def target_head(self, normed: Tensor) -> Tensor:
        """The target's own head on normed vectors [..., H], at the ids of the draft vocabulary: [..., D]."""
        normed = normed.to(self.target.dtype)
        return self.target.logits(normed) if self.vocabulary.kept is None else self._partial(normed)


def wide(x: Tensor) -> Tensor:
    """In at least float32."""
    import torch

    return x if x.dtype == torch.float64 else x.float()


@dataclass(frozen=True)
class DesignPlan:
    """What the trainer knows and a design needs."""

    training_length: int
    """Tokens of the longest sequence."""
    token_counts: Tensor
    """[V] how often each id occurs under the loss mask: the ids to keep when the vocabulary is pruned."""
    dtype: Literal["float32", "bfloat16", "float16", "float64"]
    """Of the saved weights."""
    seed: int
    trust_remote_code: bool = False
    """Whether code that comes with a model may be run."""
    chat_template: str | None = None
    """`template_hash` of the template that rendered the data; None: the target's own, or none (plain text)."""

    def vocabulary(self, settings: DraftSettings) -> DraftVocabulary:
        """All ids, or the most frequent ones of the data. OptionError if more are asked for than the target has."""
        from forerun.drafters.vocabulary import DraftVocabulary

        size = len(self.token_counts)
        if settings.draft_vocab_size is None:
            return DraftVocabulary(size)
        return DraftVocabulary.most_frequent(self.token_counts, settings.draft_vocab_size)


def config_fields(target: Target, settings: DraftSettings, plan: DesignPlan, taps: Sequence[int]) -> dict[str, Any]:
    """The fields of `DraftConfig` that every kind fills alike (not `method`).

    OptionError: the taps do not fit, or more ids are to be kept than there are.
    """
    from forerun.drafters.checkpoint import fingerprint_of

    draft_size = settings.draft_vocab_size or target.vocab_size
    if draft_size > target.vocab_size:
        raise OptionError("draft_vocab_size", f"must be in 1 .. {target.vocab_size}, got {draft_size}")
    return {
        "forerun_format": 1,
        "target_name": target.name,
        "target_fingerprint": fingerprint_of(target, plan.chat_template),
        "target_hidden_size": target.hidden_size,
        "target_num_layers": target.num_layers,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": draft_size,
        "layer_id_convention": "h",
        "aux_hidden_state_layer_ids": check_taps(taps, target),
        "training_length": plan.training_length,
        "dtype": plan.dtype,
    }


def check_taps(taps: Sequence[int], target: Target) -> tuple[int, ...]:
    """Taps as a tuple. OptionError if they do not ascend strictly within 1 .. n."""
    if not taps_fit(taps, target.num_layers):
        raise OptionError(
            "taps", f"must ascend strictly within 1 .. {target.num_layers} for this target, got {list(taps)}"
        )
    return tuple(taps)


def taps_fit(taps: Sequence[int], num_layers: int) -> bool:
    """Whether they ascend strictly within 1 .. n, and there are any."""
    return len(taps) > 0 and list(taps) == sorted(set(taps)) and taps[0] >= 1 and taps[-1] <= num_layers
