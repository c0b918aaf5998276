"""`small`: an independent smaller model with the target's vocabulary."""

from forerun.drafters.small.decode import INGEST_ROWS, STALE, Small

__all__ = ["INGEST_ROWS", "STALE", "Small"]
