"""One object for both: a drafter to the engine, a learner to the trainer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from forerun.drafters.base import LoadContext
from forerun.drafters.copying import SerialDrafter
from forerun.drafters.learned.config import DraftConfig, DraftSettings
from forerun.drafters.learned.learner import Learner
from forerun.drafters.learned.memory import fit_of_states
from forerun.target.dtypes import dtype_named

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from forerun.drafters.learned.batch import Held, Material
    from forerun.drafters.vocabulary import DraftVocabulary
    from forerun.target.base import Target


class LearnedDrafter(Learner, SerialDrafter):
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
    config_keys = SerialDrafter.config_keys | {"model", "revision", "allow_target_mismatch", "max_model_len"}
    renamed: ClassVar[Mapping[str, str]] = {}
    """Prefixes of the network's parameter names -> what stands for them in the checkpoint."""
    folder: Path | None = None
    """Where it was loaded from; None: it was made here."""

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

        drafter = load_drafter(cls, options, context)
        drafter.copy_from_text(options)
        return drafter

    @property
    def known_size(self) -> int:
        """Numbers that its fitted start regresses the target's states on."""
        return len(self.taps) * self.target.hidden_size

    def plan_start(self) -> Held | None:
        if self.settings.init != "fitted":
            return None
        return fit_of_states(self.known_size, self.target.hidden_size, self.vocabulary.draft_size)

    def fit_start(self, material: Material) -> bool:
        """See `Learner.fit_start`; only where its settings say so."""
        return self.settings.init == "fitted" and self.fit(material)

    def fit(self, material: Material) -> bool:  # noqa: ARG002 - for kinds that have a start to fit
        """Writes the kind's fitted start into the network; False: there was nothing to fit it to."""
        return False

    @property
    def saved_dtype(self) -> torch.dtype:
        return dtype_named(self.config.dtype)

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
