"""How large a DSpark drafter will be, before anything is trained: the arithmetic, part by part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

BFLOAT16 = 2

SHRINK = {
    "feed-forward": "draft.intermediate-size",
    "attention": "draft.layers",
    "fusion of the taps": "draft.taps",
    "Markov head": "draft.markov-rank",
    "vocabulary maps": "draft.draft-vocab-size",
}
"""Part -> the setting that makes it smaller; the others are small."""


@dataclass(frozen=True)
class Measures:
    """Of a target, as its drafter's layers have them."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    vocab: int

    @classmethod
    def of(cls, config: Any) -> Measures:
        """From a transformers config."""
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            config.hidden_size, config.num_attention_heads, config.num_key_value_heads, head_dim,
            config.intermediate_size, config.vocab_size,
        )  # fmt: skip


def dspark_bytes(target: Measures, settings: Mapping[str, Any]) -> dict[str, int]:
    """Bytes of each part of a DSpark drafter's weights in bfloat16, and of its vocabulary maps.

    Args:
        target: its measures.
        settings: `draft.*` of `forerun train dspark`; these must be said: layers, taps, markov-rank.
    """
    layers, taps, rank = (settings[f"draft.{name}"] for name in ("layers", "taps", "markov-rank"))
    wide = int(settings.get("draft.intermediate-size", target.feed_forward))
    kept = int(settings.get("draft.draft-vocab-size", target.vocab))
    h, layers, rank, taps = target.hidden, int(layers), int(rank), len(str(taps).split(","))
    attention = 2 * h * target.head_dim * (target.heads + target.kv_heads)  # q and o, k and v
    norms = 2 * h + layers * (2 * h + 2 * target.head_dim)
    numbers = {
        "fusion of the taps": taps * h * h,
        "attention": layers * attention,
        "feed-forward": layers * 3 * h * wide,
        "Markov head": rank * (target.vocab + kept) + _gates(str(settings.get("draft.markov-head-type")), rank, h),
        "norms and confidence": norms + h + rank + 1,
    }
    parts = {name: BFLOAT16 * count for name, count in numbers.items()}
    return parts | {"vocabulary maps": 8 * kept + target.vocab if kept < target.vocab else 0}


def _gates(kind: str, rank: int, hidden: int) -> int:
    """Numbers of a Markov head beyond its two tables, where it has any."""
    if rank == 0 or kind not in ("gated", "rnn"):
        return 0
    return (hidden + rank + 1) * rank if kind == "gated" else (2 * rank + hidden + 1) * 3 * rank


def check_size(target: Measures, settings: Mapping[str, Any], limit: float) -> int:
    """Bytes of the drafter. ValueError, if that is more than `limit` bytes, says what could be smaller, and how."""
    parts = dspark_bytes(target, settings)
    size = sum(parts.values())
    if size > limit:
        large = sorted((name for name in parts if name in SHRINK), key=lambda name: -parts[name])[:3]
        advice = ", ".join(f"{name} {parts[name] / 1e6:.1f} MB (lower {SHRINK[name]})" for name in large)
        raise ValueError(
            f"the DSpark drafter would take {size / 1e6:.1f} MB, --limit-mb allows {limit / 1e6:g}; largest: {advice}"
        )
    return size
