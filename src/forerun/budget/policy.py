"""The two questions about a draft: whether to draft its next slot, and how much of it to verify.

    fixed       all that was drafted, up to the first c_k below a threshold if one is set
    threshold   the same; a threshold is what it is for
    prefix      Algorithm 1 with early stop, on the lower convex envelope of the costs
    delayed     as many tokens as paid best by the confidences of earlier rounds; the best of the current ones
    global      as many as pay best by the current confidences

No token values come in here. Whether x_k is verified may depend on history, on x_<k and on admitted tokens of other
requests, never on x_k itself; c_{k+1} knows x_k, so no rule may look past an undecided position. `global` does, and is
exact only where that tells nothing: coupled rows, point masses, confidences blind to the tokens (methods, 8.3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np

from forerun.budget.curve import FloatArray, free_up_to
from forerun.budget.prefix import best_count, lengths, rank, scan, survivals, throughput
from forerun.errors import OptionError
from forerun.sampling.options import VerifyMode

Policy = Literal["fixed", "threshold", "prefix", "delayed", "global"]
POLICIES: tuple[Policy, ...] = get_args(Policy)


@dataclass(frozen=True, slots=True)
class Exposure:
    """Whether the confidences of a row could tell anything about tokens that are not decided yet."""

    verify_mode: VerifyMode = "rejection"
    point_masses: bool = False
    """The drafts are deterministic: functions of the history."""
    blind: bool = False
    """The drafter declares that its confidences do not depend on any drawn token."""

    @property
    def harmless(self) -> bool:
        """Any choice of the length is exact."""
        return self.verify_mode == "coupled" or self.point_masses or self.blind


class DraftRow(NamedTuple):
    """What the budget may see of one request's draft. Rows without a draft belong to the batch as well."""

    request_id: int
    planned: int
    """K of the plan. The draft may have ended earlier, which may depend on its tokens; the plan does not."""
    confidence: Sequence[float]
    """[drafted] calibrated c_1 .. c_drafted."""
    exposure: Exposure = Exposure()
    threshold: float = 0.0
    """Verify nothing from the first c_k below it on, whatever the policy; 0 is off."""
    whole: bool = False
    """Verify all of it up to the threshold, whatever the policy: a probe. Its cost is part of the step's base."""


def check_policy(policy: str, exposures: Sequence[Exposure] = ()) -> None:
    """Refuses an unknown policy, and `global` where it would bias the output.

    Raises:
        OptionError: naming `policy` and what to use instead.
    """
    if policy not in POLICIES:
        raise OptionError("policy", f"unknown: {policy!r}; known: {', '.join(POLICIES)}")
    if policy == "global" and not all(exposure.harmless for exposure in exposures):
        raise OptionError(
            "policy",
            "'global' would change the output: with verify_mode 'rejection' it looks at confidences that know the "
            "tokens they decide about; use policy 'delayed', verify_mode 'coupled' or draft_sample_method 'greedy'",
        )


def choose(rows: Sequence[DraftRow], seconds: FloatArray, policy: Policy, past: FloatArray | None = None) -> list[int]:
    """How many draft tokens of each row to verify.

    Args:
        rows: one per request of the step, each request once.
        seconds: [N + 1] of the whole step, drafting included, with 0 .. N draft rows on top of the anchors and the
            `whole` rows; N = the planned tokens of all other rows. As measured, never falling.
        policy: see above.
        past: for `delayed`, survivals [M, R, K] of these rows in M earlier rounds, or what the history expects. Without
            any, everything is verified.

    Returns:
        [R] lengths, each at most what was drafted.

    Raises:
        OptionError: `global` on rows it would bias.
    """
    check_policy(policy, [row.exposure for row in rows if row.confidence])
    allowed = [_until_threshold(row) for row in rows]
    if policy in ("fixed", "threshold"):
        return allowed
    candidates = [() if row.whole else row.confidence[:n] for row, n in zip(rows, allowed, strict=True)]
    ranking = rank(survivals(candidates), [row.request_id for row in rows])
    if policy == "prefix":
        count = scan(len(rows), ranking, seconds)
    elif policy == "delayed":
        count = lagged_count(rows, seconds, past)
    else:
        count = best_count(throughput(len(rows), ranking.survival, seconds))
    chosen = lengths(ranking, count, len(rows))
    return [most if row.whole else n for row, most, n in zip(rows, allowed, chosen, strict=True)]


def _until_threshold(row: DraftRow) -> int:
    """Drafted tokens before the first c_k below the threshold."""
    for k, c in enumerate(row.confidence):
        if not c >= row.threshold:  # no NaN is
            return k
    return len(row.confidence)


def lagged_count(rows: Sequence[DraftRow], seconds: FloatArray, past: FloatArray | None) -> int:
    """The number of draft rows that would have paid best in earlier rounds, moved up to a step edge.

    Each earlier round says what its best 0 .. N tokens were worth; these are averaged. For many requests that is the
    value of choosing the best, for a single one (whose length is then fixed) its mean survival by position.
    """
    most = len(seconds) - 1
    if past is None:
        return most
    planned = np.array([0 if row.whole else row.planned for row in rows])
    drafts = np.where(np.arange(past.shape[2]) < planned[:, None], -past, 0.0).reshape(len(past), -1)
    drafts.sort(axis=1)  # negative: best first
    worth = np.add.accumulate(drafts[:, :most], axis=1).sum(axis=0) / -len(drafts)
    theta = (len(rows) + np.concatenate(([0.0], worth))) / seconds[: len(worth) + 1]
    return free_up_to(seconds, best_count(theta))


# ------------------------------------------------------------------------------------------------------ while drafting


class SlotRule(NamedTuple):
    """When a serial drafter goes on with one request: everything it needs, fixed before the round."""

    rate: float
    """Tokens per second that a round is expected to bring; a slot must beat it."""
    drafting: FloatArray
    """[K + 1] this request's share of drafting 0 .. K tokens, in seconds."""
    verifying: FloatArray
    """[K + 1] of the target's pass with so many draft rows."""
    acceptance: FloatArray
    """[K] conditional acceptance by the history, for slots whose confidence is not known yet."""
    threshold: float = 0.0


def keep_drafting(rule: SlotRule, k: int, survival: float, confidence: float) -> bool:
    """Whether slot k (from 1) is worth drafting, given c_k and the survival c_1 * .. * c_{k-1}: known before x_k.

    It is if some length m >= k brings more tokens than the rate would in the seconds that slots k .. m add. The pass
    that gave c_k is made already; rows to verify and the passes behind it are not. Slots behind k are taken as the
    history knows them, so that a dear row at a step edge is crossed where those behind it pay.
    """
    if not confidence >= rule.threshold:
        return False
    later = np.multiply.accumulate(np.concatenate(([survival * confidence], rule.acceptance[k:])))
    spent = rule.drafting[k:] - rule.drafting[k] + rule.verifying[k:] - rule.verifying[k - 1]
    return bool(np.any(np.cumsum(later) > rule.rate * spent))


__all__ = [
    "POLICIES",
    "DraftRow",
    "Exposure",
    "Policy",
    "SlotRule",
    "check_policy",
    "choose",
    "keep_drafting",
    "lagged_count",
]
