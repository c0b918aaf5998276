"""A discrete-event simulator around the very scheduler and admission that the engine runs.

roofline.py    what a pass would cost on a GPU, from its data sheet
systems.py     three such systems, or a measured profile
acceptance.py  how good a drafter is, how that varies, what its confidences know
texts.py       requests: lengths, and where they are hard
specs.py       drafters and policies as they are typed
batch.py       simulated requests in the engine's admission
drafting.py    a drafting round: who is asked, for how much, at what cost
decoder.py     the loop
books.py       counts and rates
sweep.py       load x drafter x policy; predict.py: against what was measured
report.py, plots.py
"""
