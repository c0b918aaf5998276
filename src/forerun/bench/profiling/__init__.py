"""What a step costs here: measured points, and the cost profile made of them.

repeats.py   interleaved repeats, more of them where they scatter
grid.py      which points: row counts, requests, contexts, K
fit.py       points -> VerifyCost and DraftCost
passes.py    points of the target, run for real
drafting.py  points of a drafter, run for real
profiler.py  a whole profile within a time limit
report.py    table and pictures
"""
