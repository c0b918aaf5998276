"""Equal ids where logits are equal: greedy and coupled decoding on exact targets, and one law test of the noise.

The targets are hashes of the whole history, or of the position, in float64: their logits do not depend on how rows are
batched, so the ids must be those of plain decoding, whatever drafts, in whatever company, through any preemption.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from forerun.bench.chisquare import Tested, chi_square
from forerun.drafters.base import Drafter
from forerun.drafters.config import SpeculativeConfig
from forerun.drafters.ngram import Ngram
from forerun.drafters.small import Small
from forerun.engine import Engine, EngineOptions
from forerun.engine.propose import LoadedDrafter
from forerun.engine.reference import decode
from forerun.sampling import ACCEPT, DRAFT, FINAL, Noise, Sampling, VerifyMode, draw_coupled
from forerun.target.base import Target
from forerun.target.table import history_model, position_model

VOCAB, WINDOW = 7, 256
PROMPTS = ((1, 2, 3), (4,), (0, 5, 5, 2, 1, 6, 3, 3, 2, 1, 0, 4, 4, 5, 6, 1, 2, 3, 0), (6, 6), (2, 2, 2, 2, 2))
TOKENS = 20

SAMPLINGS: dict[str, tuple[Sampling, VerifyMode]] = {
    "greedy": (Sampling(temperature=0, max_tokens=TOKENS), "rejection"),
    "coupled": (Sampling(temperature=0.9, max_tokens=TOKENS, seed=11), "coupled"),
    "coupled, filters": (Sampling(temperature=1.3, top_k=5, top_p=0.9, max_tokens=TOKENS, seed=12), "coupled"),
}


@dataclass(frozen=True)
class Tally:
    """How many outputs were compared with plain decoding, and what the runs went through."""

    runs: int = 0
    different: int = 0
    accepted: int = 0
    rejected: int = 0
    preemptions: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.runs + other.runs,
            self.different + other.different,
            self.accepted + other.accepted,
            self.rejected + other.rejected,
            self.preemptions + other.preemptions,
        )


def drafters(target: Target) -> dict[str, Callable[[], Drafter]]:
    """A drafter that is always right, one that hardly ever is, and one that copies."""
    return {
        "the target itself": lambda: Small(_twin(target), VOCAB),
        "an unrelated model": lambda: Small(position_model(VOCAB, seed=99, window=WINDOW), VOCAB),
        "ngram": lambda: Ngram(prompt_lookup_max=3, prompt_lookup_min=1),
    }


def _twin(target: Target) -> Target:
    return TARGETS[target.name]()


TARGETS: dict[str, Callable[[], Target]] = {
    "history": lambda: history_model(VOCAB, seed=3, window=WINDOW, name="history"),
    "position": lambda: position_model(VOCAB, seed=5, window=WINDOW, name="position"),
}

PAIRS = (("history", "greedy"), ("history", "coupled"), ("history", "coupled, filters"), ("position", "greedy"))
"""A history model finds stale and missing rows under any sampling; a position model is for wrong positions."""


def exact_agreement(lengths: Sequence[int] = (1, 5)) -> Tally:
    """Every target, sampling, drafter, K and way of batching against plain decoding without cache or drafts."""
    parts = [
        _tally(TARGETS[target], *SAMPLINGS[sampling], kind, k)
        for target, sampling in PAIRS
        for kind in drafters(TARGETS[target]())
        for k in lengths
    ]
    return sum(parts, Tally())


def _tally(make: Callable[[], Target], sampling: Sampling, mode: VerifyMode, kind: str, k: int) -> Tally:
    total = Tally()
    known = plain(make(), sampling, mode)
    config = SpeculativeConfig(num_speculative_tokens=k)
    per_block = make().block_bytes + drafters(make())[kind]().block_bytes
    for options, batches in ways(per_block):
        target = make()
        engine = Engine(target, [LoadedDrafter(drafters(target)[kind](), config)], options)
        for batch in batches:
            total += _compare(engine, batch, sampling, mode, known)
        engine.audit()
    return total


def ways(block_bytes: int) -> Iterator[tuple[EngineOptions, list[list[tuple[int, ...]]]]]:
    """All together; one by one; in reverse with too little memory for all, so that some are preempted."""
    yield EngineOptions(max_num_seqs=8, max_num_batched_tokens=64), [list(PROMPTS)]
    yield EngineOptions(max_num_seqs=1, max_num_batched_tokens=16), [[prompt] for prompt in PROMPTS]
    # All prompts with their outputs need 11 blocks.
    tight = EngineOptions(max_num_seqs=8, max_num_batched_tokens=48, kv_cache_memory_bytes=6 * block_bytes)
    yield tight, [list(reversed(PROMPTS))]


def plain(target: Target, sampling: Sampling, mode: VerifyMode) -> dict[tuple[int, ...], list[int]]:
    target.allocate(WINDOW)
    return {p: decode(target, p, sampling, Noise.of(sampling.seed or 0), mode) for p in PROMPTS}


def _compare(
    engine: Engine,
    batch: Sequence[tuple[int, ...]],
    sampling: Sampling,
    mode: VerifyMode,
    known: dict[tuple[int, ...], list[int]],
) -> Tally:
    total = Tally()
    for completion in engine.generate([list(p) for p in batch], sampling, speculative={"verify_mode": mode}):
        stats = completion.stats
        different = completion.token_ids != known[tuple(completion.prompt_token_ids)]
        rejected = stats.verified - stats.accepted
        total += Tally(1, int(different), stats.accepted, rejected, stats.preemptions)
    return total


# ------------------------------------------------------------------------------------------------------------- noise

LAW = (0.5, 0.25, 0.15, 0.07, 0.03)


def coupled_noise(draws: int = 20_000, seed: int = 7) -> Tested:
    """argmax(log p + g) over many positions and seeds against p: the noise makes exact draws."""
    law = torch.tensor([LAW], dtype=torch.float64)
    places = [(Noise.of(seed, sample), position) for sample in range(20) for position in range(draws // 20)]
    gumbel = torch.stack([torch.from_numpy(noise.gumbel(position, len(LAW))) for noise, position in places])
    counts = Counter(draw_coupled(law.expand(draws, -1), gumbel).tolist())
    return chi_square([(counts, dict(enumerate(LAW)))])


def uniform_noise(anchors: int = 5_000, seed: int = 7) -> Tested:
    """Pairs of numbers of one round, of different purposes and neighbouring anchors: uniform on the square."""
    noise, pairs = Noise.of(seed), Counter[tuple[int, int, int]]()
    for anchor in range(anchors):
        draft, accept = noise.uniforms(anchor, DRAFT, 1)[0], noise.uniforms(anchor, ACCEPT, 1)[0]
        final, after = noise.uniforms(anchor, FINAL, 1)[0], noise.uniforms(anchor + 1, DRAFT, 1)[0]
        for test, (x, y) in enumerate([(draft, accept), (accept, final), (draft, after)]):
            pairs[test, int(x * 5), int(y * 5)] += 1
    square = {(x, y): 1 / 25 for x in range(5) for y in range(5)}
    return chi_square([({(x, y): pairs[test, x, y] for x, y in square}, square) for test in range(3)])
