"""Confidences against what happened: recorded, scaled, judged on prompts that were held out.

recorder.py    rounds of the real engine under fixed conditions
rounds_file.py what was recorded, in a file that survives an interruption
assessment.py  scalings fitted on some prompts and judged on others
report.py      tables, reliability diagrams, one page of HTML
"""
