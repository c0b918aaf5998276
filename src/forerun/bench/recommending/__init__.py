"""What should be run here: measured acceptance and measured costs, put together.

acceptance.py      what a drafter gets right on some prompts, or by its card
recommendation.py  the gain to expect of every drafter and K, and how sure that is
mixture.py         the same of two drafters in turn
report.py          tables and sentences
"""
