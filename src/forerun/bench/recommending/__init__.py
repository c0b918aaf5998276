"""What should be run here: measured acceptance and measured costs, put together.

acceptance.py      what a drafter gets right on some prompts
recommendation.py  the gain to expect of every drafter and K, and how sure that is
report.py          tables and sentences
"""
