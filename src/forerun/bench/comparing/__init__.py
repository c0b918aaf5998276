"""Which drafter here? All of them on the same prompts, each beside plain decoding of the same engine.

facts.py       what a drafter is and takes: passes, parameters, memory
equality.py    outputs that are not plain decoding's, and whether rounding explains them
trend.py       whether acceptance decays along a draft
confidence.py  whether what a drafter is sure of is accepted
study.py       every drafter under every load, in a file of rows that survives an interruption
choices.py     where each is the best choice, by stated rules
sections.py    the findings as texts and tables, whatever they are shown on
report.py, markdown.py, page.py, pictures.py
"""
