"""Features between commit and draft: consecutive rows, cut back with what they belong to, held once."""

from __future__ import annotations

import pytest
import torch

from forerun.drafters.features import FeatureBuffer

ROWS = torch.arange(20.0)[:, None]


def _take(buffer: FeatureBuffer, request_id: int = 1) -> tuple[int, list[int]]:
    start, features = buffer.take(request_id)
    return start, features[:, 0].int().tolist()


def test_rows_come_out_as_they_went_in():
    """In one piece, with the position of the first; taken rows are gone, and what follows goes on behind them."""
    buffer = FeatureBuffer()
    buffer.add(1, 0, ROWS[:5])
    buffer.add(2, 3, ROWS[3:4])
    buffer.add(1, 5, ROWS[5:9])
    assert buffer.rows(1) == 9
    assert _take(buffer) == (0, list(range(9)))
    assert buffer.rows(1) == 0
    buffer.add(1, 9, ROWS[9:10])
    assert _take(buffer) == (9, [9])
    assert _take(buffer, 2) == (3, [3])


@pytest.mark.parametrize("cut", range(9))
def test_a_lower_start_cuts_back(cut):
    """Also inside a piece, and below what was taken: rows from there on are the new ones."""
    buffer = FeatureBuffer()
    buffer.add(1, 0, ROWS[:2])
    buffer.take(1)
    buffer.add(1, 2, ROWS[2:6])
    buffer.add(1, 6, ROWS[6:8])
    buffer.add(1, cut, -ROWS[cut : cut + 2])
    start = min(cut, 2)
    assert _take(buffer) == (start, [*range(start, cut), -cut, -cut - 1])


def test_cutting_without_new_rows():
    """`cut` forgets rows from a position on, and nothing where it lies beyond them or nothing is known."""
    buffer = FeatureBuffer()
    buffer.cut(7, 3)
    buffer.add(1, 4, ROWS[4:9])
    buffer.cut(1, 12)
    assert buffer.rows(1) == 5
    buffer.cut(1, 6)
    assert _take(buffer) == (4, [4, 5])
    buffer.release(1)
    assert buffer.rows(1) == 0


def test_a_gap_is_a_bug_of_the_caller():
    """Rows whose features never came cannot be skipped, also right behind rows that were taken."""
    buffer = FeatureBuffer()
    buffer.add(1, 0, ROWS[:3])
    buffer.take(1)
    with pytest.raises(AssertionError, match="no features"):
        buffer.add(1, 4, ROWS[4:5])


def test_what_is_held_is_a_copy():
    """The step's whole batch of features is not kept alive by one request's view of it."""
    batch = torch.zeros(1000, 1)
    buffer = FeatureBuffer()
    buffer.add(1, 0, batch[:1])
    batch.fill_(5)
    _, held = buffer.take(1)
    assert held.untyped_storage().nbytes() == 4
    assert held.item() == 0
