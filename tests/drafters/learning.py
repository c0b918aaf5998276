"""A tiny target, batches of its features, and drafters with telling weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forerun import Sampling
from forerun.drafters.base import Accepted, DraftView
from forerun.drafters.learned import DesignPlan, LearnedDrafter, TrainingBatch
from forerun.sampling import Noise
from forerun.target.base import Batch, Segment, Target
from forerun.target.blocks import blocks_for
from forerun.target.hf import HFTarget
from forerun.target.table import ByteTokenizer

VOCAB = 264


def tiny_target(layers: int = 4, seed: int = 0, dtype: torch.dtype = torch.float32) -> HFTarget:
    """A random Qwen3 of 32 columns and 264 ids."""
    from transformers import Qwen3ForCausalLM

    from tiny import qwen3_config

    torch.manual_seed(seed)
    target = HFTarget(Qwen3ForCausalLM(qwen3_config(layers)).to(dtype), ByteTokenizer())
    target.allocate(64)
    return target


def texts(lengths: Sequence[int], seed: int = 0, vocab: int = VOCAB) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, min(vocab, 250), (n,), generator=generator).tolist() for n in lengths]


def features_of(target: Target, tokens: Sequence[int], taps: Sequence[int]) -> torch.Tensor:
    """[S, m * H] of one text, in one pass."""
    target.allocate(64)
    out = target.forward(Batch([Segment(tokens, 0, list(range(blocks_for(len(tokens)))), 0)]), tuple(taps))
    return out.features


def batch_of(
    target: Target, sequences: Sequence[Sequence[int]], taps: Sequence[int], learned_from: int = 0
) -> TrainingBatch:
    """Packed sequences with their features; tokens from `learned_from` on are under the loss mask."""
    n = target.num_layers
    columns = sorted({*taps, n})
    rows = torch.cat([features_of(target, tokens, columns) for tokens in sequences])
    size = target.hidden_size
    return TrainingBatch(
        tokens=torch.tensor([t for tokens in sequences for t in tokens]),
        lengths=[len(tokens) for tokens in sequences],
        loss_mask=torch.cat([torch.arange(len(tokens)) >= learned_from for tokens in sequences]),
        features=rows[:, : len(taps) * size],
        last=rows[:, -size:],
    )


def plan_for(target: Target, seed: int = 0, counts: torch.Tensor | None = None) -> DesignPlan:
    counts = torch.arange(target.vocab_size) if counts is None else counts
    return DesignPlan(training_length=64, token_counts=counts, dtype="float32", seed=seed)


def shaken(drafter: LearnedDrafter, scale: float = 0.3, seed: int = 1) -> LearnedDrafter:
    """The drafter with weights moved so far that every part of the network matters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.network.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
    return drafter


def decoding(drafter: LearnedDrafter, blocks: int = 64) -> LearnedDrafter:
    """A frozen copy with storage."""
    copy = drafter.for_decoding(drafter.target.dtype)
    copy.allocate(blocks)
    return copy


def view_of(tokens: Sequence[int], k: int, request_id: int = 1, **options: object) -> DraftView:
    fields = {
        "prompt_length": 1, "sampling": Sampling(temperature=0), "end_ids": frozenset(),
        "noise": Noise.of(request_id), "verify_mode": "rejection",
    }  # fmt: skip
    return DraftView(request_id=request_id, tokens=tokens, k=k, **{**fields, **options})


def always(view: DraftView, k: int, confidence: float) -> bool:
    return True


def give(drafter: LearnedDrafter, tokens: Sequence[int], start: int, end: int, request_id: int = 1) -> None:
    """Commits rows start .. end - 1 of a text to a drafter, as the engine does after a step."""
    features = features_of(drafter.target, tokens[:end], drafter.taps)[start:]
    drafter.commit([Accepted(request_id, start, end, features)])
