"""EAGLE (Li et al., arXiv 2401.15077): a head that continues the target's own top feature."""

from forerun.drafters.eagle.decode import Eagle

__all__ = ["Eagle"]
