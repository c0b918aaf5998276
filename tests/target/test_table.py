"""The exact targets do what their names say: the other tests lean on it."""

from __future__ import annotations

import pytest
import torch

from forerun.sampling import Row, Sampling, distribution
from forerun.target.base import Batch, Segment
from forerun.target.table import history_model, position_model, table_model

TABLE = [[0.0, 2.0, 1.0], [3.0, 0.0, 1.0], [1.0, 1.0, 0.0]]


def _rows(target, tokens, start=0, blocks=(0, 1)):
    return target.forward(Batch([Segment(tokens, start, blocks, len(tokens))])).logits


@pytest.fixture(params=["table", "position", "history"])
def target(request):
    made = {"table": table_model(TABLE), "position": position_model(3), "history": history_model(3)}[request.param]
    made.allocate(2)
    return made


def test_logits_do_not_depend_on_how_rows_are_passed(target):
    """One by one, in blocks, beside another request, over other blocks: equal to the bit."""
    tokens = [0, 2, 1, 1, 0, 2] * 3
    whole = _rows(target, tokens)
    target.allocate(4)
    single = torch.cat([_rows(target, [t], i, (3, 1)) for i, t in enumerate(tokens)])
    assert torch.equal(single, whole)
    assert whole.dtype == torch.float64
    beside = target.forward(Batch([Segment([2, 2], 0, [0], 2), Segment(tokens[3:], 3, [3, 1], len(tokens) - 3)]))
    assert torch.equal(beside.logits[2:], whole[3:])
    assert target.passes == [18, *[1] * 18, 17]


def test_each_model_looks_at_what_its_name_says():
    """Last token, position, whole prefix."""
    for make, same_last, same_place in (
        (lambda: table_model(TABLE), True, False),
        (lambda: position_model(3), False, True),
    ):
        target = make()
        target.allocate(2)
        rows = _rows(target, [0, 1, 0, 2, 1, 2])
        assert torch.equal(rows[0], rows[2]) is same_last
        target.allocate(2)
        other = _rows(target, [2, 2, 2, 2, 2, 2])
        assert torch.equal(rows[1], other[1]) is same_place
    target = history_model(5)
    target.allocate(2)
    first = _rows(target, [1, 2, 3, 4, 4, 4, 4, 4])
    second = _rows(target, [2, 2, 3, 4, 4, 4, 4, 4])
    assert not any(torch.equal(a, b) for a, b in zip(first[3:], second[3:], strict=True))  # 5! laws, 5 rows: odds 1/24


def test_hashed_logits_lie_at_least_one_apart():
    """No rounding decides an argmax."""
    target = history_model(9)
    target.allocate(2)
    rows = _rows(target, list(range(9))).sort(-1).values
    assert (rows[:, 1:] - rows[:, :-1]).min() == 1.0


def test_eq_1_an_exact_tie_goes_to_the_lowest_id_in_every_kind_of_pass():
    """EQ-1: two equal top logits at every state; greedy takes the lower id from single rows and from blocks alike.

    https://github.com/vllm-project/vllm/issues/7627
    """
    target = table_model([[0.0, 4.0, 1.0, 4.0]] * 4)
    target.allocate(2)
    greedy = Sampling(temperature=0)
    tokens = [3, 1, 2, 0, 3]
    for logits in (_rows(target, tokens), torch.cat([_rows(target, [t], i) for i, t in enumerate(tokens)])):
        law = distribution(logits, [Row(greedy, tokens[: i + 1], 1) for i in range(5)])
        assert law.argmax(-1).tolist() == [1] * 5
        assert law.sum() == 5
