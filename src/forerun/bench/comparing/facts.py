"""What a drafter is and takes, read off the loaded object: passes for a draft, parameters, memory."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from forerun.bench.profiling.profiler import longest_draft
from forerun.bench.provenance import model
from forerun.drafters.base import Drafter
from forerun.drafters.checkpoint import WEIGHTS
from forerun.engine.propose import LoadedDrafter
from forerun.target.base import BLOCK_SIZE, Target
from forerun.target.packed import weights_of


@dataclass(frozen=True)
class Facts:
    """Of one drafter at one K."""

    kind: str
    draft_tokens: int
    """K."""
    draft_passes: int
    """Passes of its network for a draft of K tokens."""
    head_steps: int
    """Tiny steps behind that pass that chain the tokens of a block."""
    parameters: int
    """Of its own; embedding and head of the target, where it uses them, are not counted again."""
    weight_bytes: int
    """What they take in memory as it decodes."""
    kv_bytes_per_token: int
    """What it keeps of every token of every request, beside the target's."""

    def memory(self, requests: int, context: float) -> float:
        """Bytes on top of the target while so many requests hold so many tokens each."""
        return self.weight_bytes + requests * context * self.kv_bytes_per_token

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def facts_of(entry: LoadedDrafter) -> Facts:
    """As it is loaded and configured."""
    drafter, k = entry.drafter, longest_draft(entry)
    passes, steps = _passes(drafter, k)
    network = _module(drafter)
    parameters, _, size = (0, 0, 0) if network is None else weights_of(network)
    return Facts(entry.name, k, passes, steps, parameters, size, drafter.block_bytes // BLOCK_SIZE)


def _passes(drafter: Drafter, k: int) -> tuple[int, int]:
    """(passes of a network, steps of a head) for K tokens.

    By the contract of `Drafter` only what drafts a whole trained block at once has a longest draft; a Markov head,
    where its network has one, then chains the tokens. What has no network looks tokens up.
    """
    network = _network(drafter)
    if k == 0 or network is None:
        return 0, 0
    if drafter.max_draft is None:
        return k, 0
    return 1, 0 if getattr(network, "markov_head", None) is None else k


def _network(drafter: Drafter) -> Any:
    """What it computes with: a network of its own, or a model loaded like a target."""
    found = getattr(drafter, "network", None)
    own = getattr(drafter, "model", None)
    return own if found is None and isinstance(own, Target) else found


def _module(drafter: Drafter) -> nn.Module | None:
    network = _network(drafter)
    inner = network if isinstance(network, nn.Module) else getattr(network, "model", None)
    return inner if isinstance(inner, nn.Module) else None


# ------------------------------------------------------------------------------------------------------------ identity


def origin(entry: LoadedDrafter) -> dict[str, Any]:
    """Which very drafter it is, as JSON types: its options, and hashes of its weights."""
    drafter = entry.drafter
    folder, inner = getattr(drafter, "folder", None), getattr(drafter, "model", None)
    return {
        "name": entry.name,
        "config": entry.config.model_dump(exclude_unset=True, mode="json"),
        "weights": None if folder is None else _sum_of(Path(folder) / WEIGHTS),
        "model": model(inner) if isinstance(inner, Target) else None,
    }


def _sum_of(file: Path) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


__all__ = ["Facts", "facts_of", "origin"]
