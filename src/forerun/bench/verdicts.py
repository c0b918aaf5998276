"""The words of a certificate's verdict. Nothing is imported here, so whatever reads a certificate can name them."""

from __future__ import annotations

LOSSLESS = "lossless"
"""Every check held."""
NOT_LOSSLESS = "NOT lossless"
"""One failed."""
NOT_PROVEN = "not proven"
"""None failed, and some had nothing to check."""
