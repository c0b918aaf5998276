"""Latencies under their own names, by a fake clock."""

from __future__ import annotations

import numpy as np
import pytest

from forerun.bench.timeline import Timeline, latencies, percentile


def test_su_2_the_gap_between_emissions_is_not_the_time_per_token():
    """One token, then 4 tokens every 40 ms: ITL is 40 ms and TPOT 10 ms, (t_last - t_first) / (n - 1).

    https://github.com/dstackai/dstack/issues/4225
    """
    line = Timeline(start=5.0)
    line.arrived(5.1, 1)
    for step in range(1, 6):
        line.arrived(5.1 + 0.040 * step, 4)
    assert line.inter_token_latencies == pytest.approx([0.040] * 5)
    assert line.time_per_output_token == pytest.approx(0.010)
    assert line.time_to_first_token == pytest.approx(0.1)
    found = latencies([line])
    assert found["itl_ms"] == {"p50": pytest.approx(40), "p95": pytest.approx(40)}
    assert found["tpot_ms"] == {"p50": pytest.approx(10), "p95": pytest.approx(10)}


def test_a_single_token_has_no_time_per_token():
    """TPOT needs two tokens, a gap two emissions; what does not exist is None and not 0."""
    line = Timeline(0.0)
    assert line.time_to_first_token is None
    line.arrived(1.0, 1)
    assert line.time_per_output_token is None
    assert latencies([line])["tpot_ms"] == {"p50": None, "p95": None}
    assert latencies([line])["ttft_ms"]["p50"] == 1000


def test_steps_without_a_token_are_no_emissions():
    """A prefill chunk emits nothing."""
    line = Timeline(0.0)
    line.arrived(1.0, 0)
    line.arrived(2.0, 1)
    assert line.time_to_first_token == 2.0


@pytest.mark.parametrize("share", [0.0, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("values", [[3.0], [2.0, 1.0], [5.0, 1.0, 4.0, 2.0, 8.0]])
def test_percentiles_are_numpys(values, share):
    """Linear interpolation."""
    assert percentile(values, share) == pytest.approx(np.percentile(values, 100 * share))
