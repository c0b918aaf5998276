"""DSpark: a DFlash backbone with a sequential head and a confidence head."""

from forerun.drafters.dspark.decode import DSpark

__all__ = ["DSpark"]
