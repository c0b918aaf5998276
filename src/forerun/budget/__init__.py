"""Floor 1: how much to draft and to verify. Pure and engine-free: numbers in, lengths out, never a token value.

room.py         Room, plan: K by limits alone
curve.py        CostCurve: measured seconds by count, steps kept; its lower convex envelope and free rows
costs.py        what a round costs: drafting, verifying, contexts
profile.py      Profile: measured costs of one target and its drafters, as a file
drift.py        LiveCosts: a profile kept true by real step times
history.py      AcceptanceHistory: what past rounds say about the next
lag.py          PastRounds: survivals of earlier rounds
calibration.py  sequential temperature scaling; online.py corrects while decoding
reliability.py  calibration error and its floor, Brier, AUROC, bins, bootstrap
bypass.py       when not to draft, and why; probing.py tries again
backlog.py      what drafters have yet to take in, and how long requests go on
planning.py     what drafters promise, how rows are shared; selection.py orders drafters
prefix.py       Algorithm 1 and the search over counts
policy.py       choose and keep_drafting
scheduler.py    Scheduler: all of it behind plan, keep_drafting, choose, record, observe
"""

from forerun.budget.room import Room, plan

__all__ = ["Room", "plan"]
