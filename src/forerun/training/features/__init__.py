"""Features for training: the target's hidden states of each sample, computed when needed or read from a bounded store.

`open_source(target, taps)` gives a `FeatureSource`; its `batch(samples)` is all that a trainer calls. Everything is
computed by `target.forward(batch, taps)`, the pass that decoding uses.
"""

from forerun.training.features.layout import Estimate, StoreDtype, estimate
from forerun.training.features.passes import Sample, capture, log_normalizer
from forerun.training.features.source import FeatureSource, open_source

__all__ = [
    "Estimate",
    "FeatureSource",
    "Sample",
    "StoreDtype",
    "capture",
    "estimate",
    "log_normalizer",
    "open_source",
]
