"""Exact laws: what comes out of the real sampling and verification functions, summed over all their randomness."""
