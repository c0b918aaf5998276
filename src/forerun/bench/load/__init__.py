"""Decoding under load: many requests that come and go, decoded plainly, with a fixed K and as scheduled.

arrivals.py   when requests come: a constant number at once, or a Poisson stream
drive.py      one engine under one load, in real time
rounds.py     what became of draft tokens: the token grid
trial.py      ways interleaved in pairs; a row of the result
protocol.py   when a cell has failed: paired ratios, bounds, Holm's correction
study.py      all cells, in a file of rows
report.py, plots.py
"""
