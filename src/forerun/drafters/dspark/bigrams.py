"""A Markov head that begins with the pairs of the text, before the first step of the training.

Its tables are small numbers at the start and a learning rate that suits the layers hardly moves them. Fitting the head
by itself to the pairs takes a minute or two, as nothing but the head is computed, and gives the later positions a
beginning (Qwen2.5-Coder 0.5B, before the first step: acceptance 0.17 to 0.23 at positions 2 to 5, where the backbone
without it has 0.03 to 0.05; docs/benchmarks/qwen-starts.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from forerun.drafters.learned.fitting import steadied
from forerun.drafters.losses import chunk_rows

if TYPE_CHECKING:
    from forerun.drafters.dspark.network import MarkovHead
    from forerun.drafters.learned import Material, Text
    from forerun.drafters.vocabulary import DraftVocabulary

STEPS, EPOCHS = 500, 20
"""At most, both."""
PATIENCE = 2
"""So often in a row it may be judged to be no better before it ends."""
FEWEST_PAIRS, MOST_PAIRS = 64, 2048
"""Of a step; fewer for large vocabularies, as memory bounds the logits."""
RATE = 0.03
"""Of Adam, falling linearly to 0. Two orders above one for layers: an entry of these tables is moved by its own token's
pairs alone, and has to become 0.5 or so."""


def text_pairs(texts: Sequence[Text], vocabulary: DraftVocabulary) -> tuple[Tensor, Tensor]:
    """Neighbouring tokens whose second one is learned and can be drafted: target ids [N], draft ids [N]."""
    before, after = [], []
    for text in texts:
        learned = np.asarray(text.loss_mask[1:])
        before.append(np.asarray(text.token_ids[:-1])[learned])
        after.append(np.asarray(text.token_ids[1:])[learned])
    first, second = (torch.from_numpy(np.concatenate(part).astype(np.int64)) for part in (before, after))
    second = vocabulary.to_draft(second)
    return first[second >= 0], second[second >= 0]


def fit_bigrams(head: MarkovHead, material: Material, vocabulary: DraftVocabulary) -> bool:
    """Trains the head alone to say the next token from the one before it, the hidden state being 0.

    Some of the pairs are kept to judge by, and the weights that say those best stay: few pairs are soon known by heart.
    False, and nothing is changed, if there are too few to keep some.
    """
    before, after = text_pairs(material.texts, vocabulary)
    kept = min(_rows(head), len(before) // 20)
    if not kept:
        return False
    material.say(f"start: fitting the Markov head to {len(before):,} pairs of tokens")
    generator = torch.Generator().manual_seed(material.seed + 2)
    order = torch.randperm(len(before), generator=generator)
    before, after = before[order], after[order]
    _begin(head, after[kept:], generator)
    best: dict[str, Tensor] = {}
    least, worse = math.inf, 0
    for _ in _steps(head, before[kept:], after[kept:], generator):
        with torch.no_grad():
            loss = float(_loss(head, before[:kept], after[:kept]))
        worse = 0 if loss < least else worse + 1
        if not worse:
            best, least = {name: weight.clone() for name, weight in head.state_dict().items()}, loss
        if worse == PATIENCE:
            break
    head.load_state_dict(best)
    for parameter in head.parameters():
        parameter.grad = None
    material.say(f"start: the Markov head says others at {least:.2f} nats")
    return True


def _steps(head: MarkovHead, before: Tensor, after: Tensor, generator: torch.Generator) -> Iterator[None]:
    """Takes them, and comes back to be judged before the first and after every tenth of them."""
    rows = min(_rows(head), max(FEWEST_PAIRS, len(before) // 16))
    steps = min(STEPS, math.ceil(EPOCHS * len(before) / rows))
    optimizer = torch.optim.Adam(head.parameters(), lr=RATE, betas=(0.9, 0.99))
    yield
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = RATE * (1 - step / steps)
        chosen = torch.randint(len(before), (rows,), generator=generator)
        optimizer.zero_grad()
        _loss(head, before[chosen], after[chosen]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if (step + 1) % max(1, steps // 10) == 0:
            yield


def _rows(head: MarkovHead) -> int:
    """Pairs whose logits fit into memory at once."""
    return min(MOST_PAIRS, chunk_rows(head.markov_w2.out_features))


def _loss(head: MarkovHead, before: Tensor, after: Tensor) -> Tensor:
    """Mean cross entropy of target ids [n] before against draft ids [n] after."""
    device = head.markov_w2.weight.device
    nothing = torch.zeros(len(before), 1, head.hidden_size, device=device)
    latent = head.along(before[:, None].to(device), nothing)[:, 0]
    return functional.cross_entropy(head.bias(latent), after.to(device))


@torch.no_grad()
def _begin(head: MarkovHead, after: Tensor, generator: torch.Generator) -> None:
    """Random codes of the tokens before, and one number that is the same for all of them: with it the head says how
    frequent tokens are."""
    first, second = head.markov_w1.weight, head.markov_w2.weight
    first.copy_(torch.randn(first.shape, generator=generator) * 0.1)
    first[:, 0] = 1.0
    often = torch.log(torch.bincount(after, minlength=len(second)) + 0.5)
    second[:, 0] = (often - often.mean()).to(second)


def as_states(head: MarkovHead, rows: Tensor) -> Callable[[Tensor], Tensor]:
    """Target ids [n] -> [n, H] the normed states whose logits are nearest to what the head adds after these tokens.

    Args:
        head: fitted.
        rows: [D, H] of the target's head.
    """
    back = torch.linalg.solve(steadied(rows.T @ rows, 1e-3), rows.T @ head.markov_w2.weight.detach())  # [H, r]
    nothing = torch.zeros(1, 1, head.hidden_size, device=rows.device)

    def said(previous: Tensor) -> Tensor:
        latent = head.along(previous[:, None], nothing.expand(len(previous), 1, -1))[:, 0]
        states: Tensor = latent.detach() @ back.T
        return states

    return said
