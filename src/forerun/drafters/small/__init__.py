"""`small`: an independent smaller model with the target's vocabulary."""

from forerun.drafters.small.decode import INGEST_ROWS, Small

__all__ = ["INGEST_ROWS", "Small"]
