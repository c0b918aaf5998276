"""Measured costs, by scripted costs and a clock that adds them up: no time is read, no time is asserted."""

from __future__ import annotations

from collections import Counter

import pytest

from budget.world import INT4
from forerun.bench.profiling.fit import FOLLOWS_FREE
from forerun.bench.profiling.grid import Call, DrafterGrid, Step, TargetGrid, counts, doubling, unplaced_step
from forerun.bench.profiling.profiler import measure_drafter, measure_target
from forerun.bench.profiling.repeats import Effort, measure, scatter
from forerun.budget.curve import CostCurve

AMPLE = Effort(1e9)
INT4_CURVE = CostCurve.measured(INT4)


class World:
    """Costs given by a function; `disturb(i)` is the factor of measurement number i (from 0)."""

    def __init__(self, cost, disturb=lambda i: 1.0):
        self._cost, self._disturb = cost, disturb
        self.now = 0.0
        self.runs = Counter()

    def clock(self):
        return self.now

    def __call__(self, point):
        seconds = self._cost(point) * self._disturb(sum(self.runs.values()))
        self.runs[point] += 1
        self.now += seconds
        return seconds


def target(cost, grid=None, effort=AMPLE, disturb=lambda i: 1.0):
    """(costs, points, world) of a target that costs this."""
    world = World(cost, disturb)
    verify, found = measure_target(world, grid or TargetGrid(64, 8, [16]), effort, world.clock)
    return verify, found, world


# -------------------------------------------------------------------------------------------------------------- points


def test_every_small_count_is_measured():
    """1 .. 17 one by one, then two an octave, and the limit itself."""
    assert counts(100) == [*range(1, 18), 24, 32, 48, 64, 96, 100]
    assert counts(5) == [1, 2, 3, 4, 5]
    assert counts(17) == list(range(1, 18))
    assert doubling(6) == [1, 2, 4, 6]
    assert doubling(1) == [1]


def test_rows_are_shared_out_as_verification_has_them():
    """A few requests with several rows each; never more requests than the engine runs, nor a request without a row."""
    grid = TargetGrid(512, 16, [256])
    assert grid.of_rows(7) == Step(1, 7, 256)
    assert grid.of_rows(17) == Step(3, 17, 256)
    assert grid.of_rows(17).spread == [6, 6, 5]
    assert grid.of_rows(512) == Step(16, 512, 256)
    for step in grid.points():
        assert sum(step.spread) == step.rows
        assert min(step.spread) >= 1


def test_points_come_once_and_cheap_ones_first():
    """So that what there is no time for is the dear end."""
    for points in (TargetGrid(64, 8, [16, 64]).points(), DrafterGrid(5, 8, [16, 64]).points()):
        assert len(set(points)) == len(points)
        assert points[0][:2] == (1, 1)


# ------------------------------------------------------------------------------------------------------------- repeats


def test_an_outlier_does_not_count():
    """Every seventh measurement takes ten times as long: the costs are those of a quiet machine, to the last bit."""
    quiet, _, _ = target(lambda step: INT4_CURVE(step.rows))
    disturbed, _, _ = target(lambda step: INT4_CURVE(step.rows), disturb=lambda i: 10.0 if i % 7 == 3 else 1.0)
    assert disturbed == quiet


def test_a_disturbance_that_lasts_hits_no_point_alone():
    """Slower by half for a whole turn: every point has one repeat of it, and the median of the others."""
    points = [Step(1, n, 0) for n in range(1, 11)]
    world = World(lambda step: float(step.rows), lambda i: 1.5 if 20 <= i < 30 else 1.0)
    found = measure(points, world, AMPLE, world.clock)
    assert [sorted(found[point])[2] for point in points] == [float(point.rows) for point in points]


def test_a_drift_cancels():
    """Each measurement is slower than the one before: forwards and backwards in turns, ratios stay within a per cent.

    Always forwards the last point would be dearer by what a turn makes slower, 7 %."""
    points = [Step(1, n, 0) for n in range(1, 101)]
    world = World(lambda step: 1.0, lambda i: 1 + 0.001 * i)
    found = measure(points, world, Effort(1e9, repeats=6, again=0), world.clock)
    middle = [sum(found[point]) / 6 for point in (points[0], points[-1])]
    assert middle[1] / middle[0] == pytest.approx(1.0, abs=0.01)


def test_what_scatters_is_measured_again_and_what_does_not_is_not():
    """One point of three scatters: it gets the further repeats, up to the limit."""
    points = [Step(1, 1, 0), Step(1, 2, 0), Step(1, 3, 0)]
    noisy = World(lambda step: step.rows * (1.0 + (0.5 * (noisy.runs[step] % 3) if step.rows == 2 else 0.0)))
    measure(points, noisy, Effort(1e9, repeats=5, again=4), noisy.clock)
    assert [noisy.runs[point] for point in points] == [6, 10, 6]


def test_a_pair_in_the_wrong_order_is_measured_again():
    """More work cannot cost less: both points get further repeats, which set the first impression right."""
    small, big = Step(1, 2, 0), Step(1, 4, 0)
    world = World(lambda step: 1.0 if step is big or world.runs[step] > 3 else 1.4)
    found = measure([small, big], world, Effort(1e9, repeats=3), world.clock, lambda a, b: a.rows < b.rows)
    assert (len(found[small]), len(found[big])) == (7, 7)
    assert sorted(found[small])[3] == 1.0


def test_the_first_run_of_a_point_is_not_counted():
    """It compiles, allocates and fills caches."""
    points = [Step(1, n, 0) for n in (1, 2, 3)]
    world = World(lambda step: 50.0 if world.runs[step] == 0 else 1.0)
    found = measure(points, world, AMPLE, world.clock)
    assert {value for values in found.values() for value in values} == {1.0}


def test_dear_points_are_left_out_when_time_is_short():
    """A second a row and 100 s: what is measured can be repeated three times, and the limit is kept."""
    verify, found, world = target(lambda step: float(step.rows), TargetGrid(64, 1, [16]), Effort(100.0))
    most = max(step.rows for step in found)
    assert 4 <= most < 17
    assert all(len(values) >= 3 for values in found.values())
    assert world.now <= 130.0
    assert verify(1, 64) == pytest.approx(64.0)  # goes on as it rose


def test_advance_is_told_of_every_measurement_planned():
    """Whether made or left out: a bar ends at its total."""
    for seconds in (1e9, 100.0):
        world, told = World(lambda step: float(step.rows)), []
        points = TargetGrid(64, 1, [16]).points()
        measure(points, world, Effort(seconds), world.clock, advance=told.append)
        assert sum(told) == Effort(seconds).turns(len(points))


def test_scatter_ignores_one_outlier():
    """It is the median distance."""
    assert scatter([1.0, 1.0, 1.0, 1.0, 9.0]) == 0.0
    assert scatter([1.0, 1.1, 1.2]) == pytest.approx(0.1 / 1.1)


# -------------------------------------------------------------------------------------------------------------- target


def test_a_step_at_five_rows_is_kept():
    """The staircase of int4 weights: 4 rows cost 1.39, 5 cost 2.38, and nothing in between is smoothed."""
    verify, _, _ = target(lambda step: INT4_CURVE(step.rows))
    assert [verify.tokens(n) for n in (1, 4, 5, 8, 16)] == [1.0, 1.39, 2.38, 2.42, 4.38]


@pytest.mark.parametrize("edge", [18, 21, 29, 47, 63])
def test_a_step_between_two_measured_counts_is_placed(edge):
    """The cost trebles at a count that the grid leaves out: bisection finds the very count."""
    verify, _, _ = target(lambda step: 1.0 if step.rows < edge else 3.0)
    assert verify.tokens(edge - 1) == 1.0
    assert verify.tokens(edge) == 3.0


def test_a_line_hides_no_step():
    """Fixed and proportional cost: nothing further is measured."""
    curve = CostCurve((1, 2, 4, 8, 16), tuple(0.5 + 0.1 * n for n in (1, 2, 4, 8, 16)))
    assert unplaced_step(curve) is None
    assert unplaced_step(CostCurve((4, 8), (1.0, 3.0))) == 6


def test_what_a_request_costs_is_told_from_what_a_row_costs():
    """16 plain rows cost more than 2 requests of 8 rows: both are predicted as they were measured."""

    def cost(step):
        return 1.0 + 0.02 * step.rows + 0.05 * step.requests

    verify, found, _ = target(cost, TargetGrid(64, 16, [16]))
    for step in found:
        assert verify(step.requests, step.rows, step.context) == pytest.approx(cost(step))


def test_a_long_context_costs_by_request_and_by_row():
    """Both parts are recovered, and go on beyond the longest context."""

    def cost(step):
        return 1.0 + 0.02 * step.rows + step.context * (1e-4 * step.requests + 2e-5 * step.rows)

    verify, found, _ = target(cost, TargetGrid(64, 8, [64, 256, 1024]))
    for step in (*found, Step(2, 10, 2048)):
        extra = cost(step) - cost(step._replace(context=64))
        predicted = verify(step.requests, step.rows, step.context) - verify(step.requests, step.rows, 64)
        assert predicted == pytest.approx(extra, abs=1e-9)


def test_noise_never_makes_a_request_or_a_context_cheaper_than_nothing():
    """A machine that got faster meanwhile: costs stay ascending and not negative."""
    verify, _, _ = target(lambda step: 1.0 - 0.01 * step.requests - 1e-4 * step.context, TargetGrid(32, 8, [16, 64]))
    extra = verify.context.at([1, 16, 64, 1000])
    assert min(extra.request) >= 0
    assert min(extra.row) >= 0


def test_one_request_at_a_time_is_enough_for_a_profile():
    """max_num_seqs 1: the rows of a single request."""
    verify, found, _ = target(lambda step: 1.0 + step.rows, TargetGrid(9, 1, [0]))
    assert {step.requests for step in found} == {1}
    assert verify(1, 9) == 10.0


# ------------------------------------------------------------------------------------------------------------ drafters


def drafter(cost, grid, follow=(0.0, 1.0)):
    world = World(cost)
    return measure_drafter(world, grid, AMPLE, world.clock, follow=follow)


def test_a_drafter_costs_by_requests_and_k():
    """Every measured point comes back, for serial drafts and for blocks."""
    for cost in (lambda c: c.k * (0.1 + 0.01 * c.requests), lambda c: 0.3 + 0.01 * c.requests):
        made, found = drafter(cost, DrafterGrid(6, 16, [64]))
        assert made.lengths == (1, 2, 4, 6)
        for call in found:
            assert made(call.requests, call.k) == pytest.approx(cost(call))


def test_a_longer_context_makes_a_draft_dearer():
    """By request and by draft token."""

    def cost(call):
        return call.k * 0.1 + call.context * (1e-4 + 1e-5 * call.k)

    made, _ = drafter(cost, DrafterGrid(4, 4, [64, 512]))
    assert made(1, 4, 64) == pytest.approx(cost(Call(1, 4, 64)))
    assert made(1, 4, 512) == pytest.approx(cost(Call(1, 4, 512)))


def test_following_counts_only_where_it_is_felt():
    """Half a per cent of a plain step a token, or nothing."""
    grid = DrafterGrid(2, 1, [8])
    assert drafter(lambda call: 0.1, grid, (0.03, 1.0))[0].follow == 0.03
    assert drafter(lambda call: 0.1, grid, (FOLLOWS_FREE / 2, 1.0))[0].follow == 0.0
