"""Training one text by heart: the gate between training and decoding."""

from __future__ import annotations

from pathlib import Path

import torch

from drafters.kinds import learned
from drafters.learning import batch_of, tiny_target
from forerun import Engine, Sampling
from forerun.drafters.base import LoadContext
from forerun.drafters.config import parse_config
from forerun.drafters.learned import Learner
from forerun.engine import EngineOptions
from forerun.engine.propose import LoadedDrafter
from forerun.engine.request import Completion
from forerun.target.base import Target

PROMPT = [10, 20, 30, 40, 50]
SAMPLING = Sampling(temperature=0, max_tokens=26, ignore_eos=True)
STEPS = 200


def learned_by_heart(name: str, folder: Path) -> tuple[Completion, int]:
    """A greedy completion of the text it was trained on, by the drafter as saved and loaded, and its K."""
    target = tiny_target()
    [plain] = Engine(target).generate([PROMPT], SAMPLING)
    options: dict[str, object] = {"draft_vocab_size": 100} if "pruned" in name else {}
    if name.startswith("d"):  # the text itself is what shall be known by heart
        options |= {"ce": "hard", "ce_weight": 1.0, "l1_weight": 0.0, "short_blocks": 0.5}
    if name == "eagle":  # one short text is drowned by noise that is meant for many long ones
        options |= {"feature_noise": 0.0}
    elif name.startswith("eagle3"):
        options |= {"ce": "hard"}
    counts = torch.bincount(torch.tensor(plain.token_ids), minlength=target.vocab_size)
    return taught_and_used(learned(name, target, scale=0.0, counts=counts, **options), PROMPT, plain, folder)


def taught_and_used(drafter: Learner, prompt: list[int], plain: Completion, folder: Path) -> tuple[Completion, int]:
    """The same completion by the target with the drafter, trained on it, saved and loaded; and K."""
    target = drafter.target
    batch = batch_of(target, [[*prompt, *plain.token_ids]], drafter.taps, learned_from=len(prompt))
    optimizer = torch.optim.AdamW(drafter.network.parameters(), lr=5e-3, weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 5e-3 * (1 - step / STEPS)
        exercise = drafter.prepare(batch, generator)
        optimizer.zero_grad()
        (drafter.losses(batch, exercise, step / STEPS).total / exercise.weight).backward()
        optimizer.step()
    drafter.save(folder)
    return used(target, prompt, plain, folder, 4), 4


def used(target: Target, prompt: list[int], plain: Completion, folder: Path, k: int) -> Completion:
    """The completion again, with the saved drafter at this K; it must be the same."""
    config = parse_config({"model": str(folder), "num_speculative_tokens": k})
    loaded = LoadedDrafter(config.build(LoadContext(target)), config)
    # 26 tokens: one after the prefill, then, at K = 4, five rounds of 5, none of them cut short.
    [done] = Engine(target, [loaded], EngineOptions(max_num_seqs=1)).generate([prompt], SAMPLING)
    assert done.token_ids == plain.token_ids
    return done
