"""Copying from the text so far, mixed into the laws of any drafter that drafts token by token.

Answers repeat what was asked: a docstring, names, a sentence to be mended. A small network learns late to look back for
it, where a look-up finds it at once and says nothing about the rest. So the two are mixed, as in a pointer-generator
(See et al. 2017), with nothing to train: where the last tokens were seen before, what followed them gets the share of
the law that such look-ups have earned in this very request. The law reported is the mixed one: verification is exact
whatever it is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from forerun.drafters.base import Accepted, Advance, Draft, Drafter, DraftView, KeepDrafting, draft_serially
from forerun.drafters.lookup import KEYS, Indexes, sizes_of
from forerun.sampling import NOTHING

if TYPE_CHECKING:
    from torch import Tensor


class SerialDrafter(Drafter):
    """A drafter whose tokens are drawn one after the other from logits of its own.

    With `prompt_lookup_max` or `prompt_lookup_min` of the speculative config, prompt lookup is mixed into its laws.
    """

    config_keys = KEYS
    copying: Copying | None = None

    def copy_from_text(self, options: Mapping[str, Any]) -> None:
        """Mixes prompt lookup in, if these options of the speculative config ask for it. OptionError: they contradict
        each other."""
        sizes = sizes_of(options.get("prompt_lookup_max"), options.get("prompt_lookup_min"))
        if sizes is not None:
            self.copying = Copying(sizes)
            self.uses_prediction = True
            self.blind = False  # what is looked up behind a drawn token is known from that token

    def draft(self, views: Sequence[DraftView], keep_drafting: KeepDrafting, advance: Advance) -> list[Draft]:
        """See `draft_serially`."""
        if self.copying is None:
            return draft_serially(views, keep_drafting, advance)
        return self.copying.draft(views, keep_drafting, advance)

    def commit(self, accepted: Sequence[Accepted]) -> None:
        if self.copying is not None:
            self.copying.commit(accepted)

    def release(self, request_id: int) -> None:
        if self.copying is not None:
            self.copying.release(request_id)


class Found(NamedTuple):
    """What a look-up foresees for a row of logits."""

    row: int
    token: int
    chance: float
    """Share of such look-ups that were right, in (0, 1)."""


class Copying(Indexes):
    """Look-ups of every request, in its prediction too, and what they make of a drafter's laws."""

    def draft(self, views: Sequence[DraftView], keep_drafting: KeepDrafting, advance: Advance) -> list[Draft]:
        """`draft_serially` with look-ups mixed in: behind the text and what of the draft was drawn before the slot."""
        indexes = [self.of(view) for view in views]
        said: list[list[int]] = [[] for _ in views]  # of each slot, by the prediction

        def mixed(active: Sequence[int], drafts: Sequence[Draft]) -> tuple[Tensor, list[float]]:
            logits, confidences = advance(active, drafts)
            found = []
            for row, (i, draft) in enumerate(zip(active, drafts, strict=True)):
                match = indexes[i].foresee(draft.tokens)
                said[i].append(match.token if match is not None and match.predicted else NOTHING)
                if match is not None and math.isfinite(confidences[row]):  # without a law there is nothing to mix
                    found.append(Found(row, match.token, indexes[i].confidence(match.n)))
            return mix(logits, confidences, found) if found else (logits, confidences)

        made = draft_serially(views, keep_drafting, mixed)
        for draft, foretold in zip(made, said, strict=True):
            same = (token == expected for token, expected in zip(draft.tokens, foretold, strict=False))
            draft.predicted = sum(itertools.takewhile(bool, same))
        return made


def mix(logits: Tensor, confidences: Sequence[float], found: Sequence[Found]) -> tuple[Tensor, list[float]]:
    """Laws (1 - chance) * q + chance * [token] of the rows that were found, and what is known of their tokens.

    A token outside the drafter's vocabulary (-inf) gets its share too. If the token leads the mixed law, its
    probability there is the confidence: the look-up right, or wrong and the drafter's law right. If not, the drafter's
    own confidence holds where the look-up is wrong.

    Args:
        logits: [R, V] of a slot; not changed.
        confidences: [R] of the drafter for that slot.
        found: at most one for a row, whose law is finite.

    Returns:
        [R, V] in at least float32, and [R] confidences. Neither knows the token that will be drawn from them.
    """
    import torch

    from forerun.drafters.learned.batch import wide

    rows = torch.tensor([one.row for one in found], device=logits.device)
    tokens = torch.tensor([one.token for one in found], device=logits.device)
    odds = [math.log(one.chance) - math.log1p(-one.chance) for one in found]
    out = wide(logits).clone()
    own = out[rows]  # [n, V]
    total = own.logsumexp(-1)
    copied = total + torch.tensor(odds, dtype=out.dtype, device=logits.device)
    mixed = torch.logaddexp(own.gather(-1, tokens[:, None])[:, 0], copied)  # [n]
    leads = (mixed >= own.amax(-1)).tolist()
    probabilities = (mixed - torch.logaddexp(total, copied)).exp().tolist()
    out[rows, tokens] = mixed
    known = list(confidences)
    for one, leading, probability in zip(found, leads, probabilities, strict=True):
        known[one.row] = probability if leading else (1 - one.chance) * known[one.row]
    return out, known
