"""Servers that tests of one module share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from serve.kit import Site, noisy_engine


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    """Bytes as tokens, exact logits, two drafters; a request that asks for none is drafted for by both."""
    with Site(noisy_engine, max_queue=200) as running:
        yield running
