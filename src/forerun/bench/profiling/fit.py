"""From measured points to what planning reads.

A step of R requests with N rows behind c tokens costs tokens(N) + R * request(c) + N * row(c). What one more request
costs at the same number of rows shows where plain steps (a row each) and verify steps (several rows each) of equal
size differ; it is taken out of `tokens` and booked as the cost of any context.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from forerun.bench.profiling.grid import Call, DrafterGrid, Step, TargetGrid
from forerun.budget.costs import ContextCost, DraftCost, VerifyCost
from forerun.budget.curve import CostCurve

Measured = Mapping[Step, Sequence[float]]

FOLLOWS_FREE = 0.005
"""Following a request for one token is free if it costs less than this share of a plain step: a drafter's state is then
never dropped. Python's own overhead is of this size on tiny models."""


def verify_cost(found: Measured, grid: TargetGrid) -> VerifyCost:
    """Of a target, from the points of its grid that were measured and any further step of `grid.of_rows`."""
    request = per_request(found, grid)
    tokens = {
        step.rows: [max(0.0, seconds - step.requests * request) for seconds in values]
        for step, values in found.items()
        if step == grid.of_rows(step.rows)
    }
    return VerifyCost(CostCurve.measured(tokens), _context(found, grid, request))


def per_request(found: Measured, grid: TargetGrid) -> float:
    """Seconds that one more request adds to a step of as many rows, by least squares; not negative."""
    above = below = 0.0
    for step in grid.by_requests:
        joint = grid.of_rows(step.rows)
        more = step.requests - joint.requests
        if more > 0 and step in found and joint in found:
            above += more * (median(found[step]) - median(found[joint]))
            below += more * more
    return max(0.0, above / below) if below else 0.0


def _context(found: Measured, grid: TargetGrid, request: float) -> ContextCost:
    """With the cost of a request that has any context at all, and what longer contexts add."""
    excess: dict[int, dict[int, float]] = {}
    for step in grid.by_context:
        base = step._replace(context=grid.contexts[0])
        if step in found and base in found:
            seconds = (median(found[step]) - median(found[base])) / step.requests
            excess.setdefault(step.context, {})[step.rows // step.requests] = seconds
    longer = ContextCost.measured(excess) if excess else ContextCost()
    # The last two are level where no longer context was measured: beyond them the cost goes on as it rose.
    knots = {0: (0.0, 0.0), 1: (request, 0.0), max(2, grid.contexts[0]): (request, 0.0)}
    for context, own, row in zip(longer.contexts, longer.per_request, longer.per_row, strict=True):
        if context > 2:
            knots[context] = request + own, row
    return ContextCost(tuple(knots), *zip(*knots.values(), strict=True))


def draft_cost(found: Mapping[Call, Sequence[float]], grid: DrafterGrid, follow: float, plain_step: float) -> DraftCost:
    """Of a drafter, from the points of its grid that were measured.

    Args:
        found: seconds.
        grid: of the drafter.
        follow: seconds per token of keeping up with a request that does not draft.
        plain_step: seconds of the target for one token, which `follow` is compared with.
    """
    samples: dict[int, dict[int, Sequence[float]]] = {}
    contexts: dict[int, dict[int, Sequence[float]]] = {}
    for call, values in found.items():
        if call.context == grid.contexts[0]:
            samples.setdefault(call.k, {})[call.requests] = values
        if call in grid.by_context:
            contexts.setdefault(call.context, {})[call.k] = values
    context = ContextCost.measured(contexts) if grid.contexts[0] in contexts else ContextCost()
    return DraftCost.measured(samples, context, follow if follow > FOLLOWS_FREE * plain_step else 0.0)


__all__ = ["FOLLOWS_FREE", "draft_cost", "per_request", "verify_cost"]
