"""Whether what the prefix cache keeps is as good as what is computed: the same prompt twice, with each drafter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from forerun.cli.checks.check import Check
from forerun.engine import Completion, Engine
from forerun.engine.propose import LoadedDrafter
from forerun.sampling import Sampling
from forerun.target.base import BLOCK_SIZE


def prefix_cache_checks(engine: Engine, prompt: Sequence[int], max_tokens: int) -> Iterator[Check]:
    """One for each drafter, greedily; none where the prompt has no whole block to be found again."""
    if len(prompt) <= BLOCK_SIZE or not engine.core.prefix_cache.enabled:
        return
    sampling = Sampling(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    for entry in engine.core.loaded:
        engine.core.prefix_cache.clear()
        cold, hit = (engine.generate([prompt], sampling, speculative={"method": entry.name})[0] for _ in range(2))
        yield _compared(entry, cold, hit)


def _compared(entry: LoadedDrafter, cold: Completion, hit: Completion) -> Check:
    ids, drafts = cold.token_ids == hit.token_ids, cold.stats.accepted == hit.stats.accepted
    count = f"{hit.stats.cached_tokens} of {len(hit.prompt_token_ids)} prompt tokens found again"
    found = (
        f"{count}; {'the same' if ids else 'other'} tokens, {cold.stats.accepted} drafts accepted in the first run and "
        f"{hit.stats.accepted} in the second"
    )
    if hit.stats.cached_tokens == 0:
        advice = "this drafter keeps nothing with cached blocks, so prompts are computed whole for it"
    else:
        advice = (
            "in low precision a near tie between two tokens may explain it: try --dtype float32; "
            "--no-enable-prefix-caching does without"
        )
    fine = ids and drafts and hit.stats.cached_tokens > 0
    return Check.of(f"{entry.name} prefix cache", fine, found, "the same tokens and drafts both times", advice)
