"""EAGLE-3 (Li et al., arXiv 2503.01840): several fused taps, trained on its own continuations."""

from forerun.drafters.eagle3.decode import Eagle3

__all__ = ["Eagle3"]
