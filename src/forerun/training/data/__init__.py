"""Training data: prompts and answers as token ids, with a mask over what the target wrote.

`Dataset(folder)` reads what `forerun data prepare` wrote; `open_split(folder)` gives its training and held-out parts.
"""

from forerun.training.data.dataset import Dataset, Sample, open_split

__all__ = ["Dataset", "Sample", "open_split"]
