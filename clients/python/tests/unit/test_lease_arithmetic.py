"""Demand, the meter of rates, and what an answer means."""

from __future__ import annotations

import math
import random

import pytest

from tollgate_client import InvalidRequestError, LeaseTimeoutError, Mode, TollgateError
from tollgate_client._leases.demand import WINDOW, Demand
from tollgate_client._leases.gauge import GaugeUsage
from tollgate_client._leases.held import Held, nothing_but
from tollgate_client._leases.kept import Kept, Now
from tollgate_client._leases.meter import Meter, most
from tollgate_client._leases.rate import RateUsage
from tollgate_client._leases.resource import Resource, Unmeasured
from tollgate_client._proto.doorman_pb2 import Lease, ResourceResponse


def test_demand_is_averaged_and_grows_at_once():
    demand = Demand()
    assert demand.wants(0.0) == 0.0
    assert demand.wants(3.0) == 3.0
    demand.add(10.0)
    assert demand.wants(0.0) == 12.0
    demand.add(0.0)
    assert demand.wants(0.0) == 6.0
    assert demand.wants(7.0) == 7.0
    demand.add(40.0)
    assert demand.wants(0.0) == 40.0
    for _ in range(WINDOW):
        demand.add(0.0)
    assert demand.wants(0.0) == 0.0


def test_a_meter_takes_at_the_rate_of_the_moment():
    def held(capacity: float) -> Held:
        return Held(capacity, 1000.0, 0.0)

    meter = Meter(0.0)
    assert meter.take(1, held(10.0), 0.0) == 0.0
    assert meter.take(1, held(10.0), 0.0) == pytest.approx(0.1)
    # Twice the capacity is half the wait.
    assert meter.take(1, held(20.0), 0.0) == pytest.approx(0.05)
    assert meter.take(1, held(20.0), 0.05) == 0.0
    # Nothing at all.
    assert meter.take(1, held(0.0), 60.0) == math.inf
    # A tenth of a second's capacity at once.
    assert meter.take(10, held(100.0), 120.0) == 0.0
    assert meter.take(1, held(100.0), 120.0) == pytest.approx(0.01)
    # More than that is a debt.
    assert meter.take(100, held(100.0), 180.0) == 0.0
    assert meter.take(1, held(100.0), 180.0) == pytest.approx(0.91)
    assert meter.debt == 90.0
    # Without a bound, there are no debts.
    assert meter.take(10**9, held(math.inf), 180.001) == 0.0
    assert meter.take(10, held(100.0), 180.001) == 0.0


def test_a_debt_is_paid_at_the_capacity_of_each_moment():
    held = Held(10.0, 2.0, 1.0)
    meter = Meter(0.0)
    assert meter.take(101, held, 0.0) == 0.0
    assert meter.debt == 100.0
    # Two seconds of the lease, and one without it.
    assert meter.take(1, held, 3.0) == pytest.approx(80.0)
    assert meter.debt == 79.0
    # A larger capacity counts from when it is held.
    meter.accrue(held, 4.0)
    larger = Held(100.0, 60.0, 0.0)
    assert meter.take(1, larger, 4.0) == pytest.approx(0.79)
    assert meter.take(1, larger, 4.8) == 0.0
    # Time that runs backwards adds nothing.
    before = meter.take(100, larger, 4.8)
    assert before > 0.0 and meter.take(100, larger, 3.0) == before


@pytest.mark.parametrize("seed", range(50))
def test_a_meter_takes_no_more_than_the_capacity(seed):
    """Never more than the burst and what has accrued, however the capacity changes."""
    chance = random.Random(seed)
    held, meter, now = Held(10.0, 0.3, 2.0), Meter(0.0), 0.0
    accrued = taken = largest = 0.0
    burst = 1.0
    for _ in range(200):
        for _ in range(chance.randrange(100)):
            accrued += held.at(now) / 1000
            now += 0.001
            burst = max(burst, most(held.at(now)))
        if chance.random() < 0.2:
            meter.accrue(held, now)
            length, after = chance.random() * 0.7, chance.random() * 50
            held = Held(chance.random() * 1000, now + length, after)
            burst = max(burst, most(held.capacity))
        tokens = chance.randrange(1, 20)
        if meter.take(tokens, held, now) == 0.0:
            taken += tokens
            largest = max(largest, tokens)
        # A change of capacity within a millisecond is counted at the old one here.
        assert taken <= accrued + burst + largest + 2.0


def kept(mode: Mode, wants: float = 8.0) -> Kept:
    return Kept(Resource("db", mode, wants, Unmeasured(), 0.0))


def answer(capacity: float, expiry: int, safe: "float | None" = None, degraded: bool = False):
    gets = Lease(expiry_time=expiry, refresh_interval=1, capacity=capacity)
    one = ResourceResponse(resource_id="db", gets=gets, degraded=degraded)
    if safe is not None:
        one.safe_capacity = safe
    return one


@pytest.mark.parametrize(
    "mode, safe, after",
    [
        (Mode.SAFE, 3.0, 3.0),
        (Mode.SAFE, None, 0.0),
        (Mode.SAFE, -1.0, math.inf),
        (Mode.SAFE, -2.0, 0.0),
        (Mode.SAFE, math.nan, 0.0),
        (Mode.PESSIMISTIC, 3.0, 0.0),
        (Mode.OPTIMISTIC, 3.0, 8.0),
    ],
)
def test_what_an_answer_means(mode, safe, after):
    one = kept(mode)
    resource = one.resource
    assert resource.held.at(0.0) == (8.0 if mode is Mode.OPTIMISTIC else 0.0)
    now = Now(100.0, 1000.5)
    request = one.request(0.0, now)
    assert (request.resource_id, request.wants, request.HasField("has")) == ("db", 8.0, False)
    one.answered(answer(5.0, 1010, safe), now)
    assert resource.held == Held(5.0, 109.5, after, ends=1010)
    assert one.request(0.0, now).has.capacity == 5.0
    assert not one.request(0.0, Now(110.0, 1010.5)).HasField("has"), "it has run out"
    # A degraded node may not know the safe capacity, and does not take it back.
    one.answered(answer(5.0, 1010, degraded=True), now)
    assert resource.held.after == after
    one.answered(answer(5.0, 1010), now)
    assert resource.held.after == (8.0 if mode is Mode.OPTIMISTIC else 0.0)


def test_numbers_that_make_no_sense():
    now = Now(100.0, 1000.0)
    for wants, asked in [(math.nan, 0.0), (-1.0, 0.0), (math.inf, 1e15)]:
        assert kept(Mode.SAFE, wants).request(0.0, now).wants == asked
    one = kept(Mode.SAFE)
    one.request(0.0, now)
    for capacity in (math.nan, -1.0):
        one.answered(answer(capacity, 1010), now)
        assert one.resource.held.capacity == 0.0
        assert one.request(0.0, now).has.capacity == 0.0
    one.answered(answer(1.0, 2**63 - 1), now)
    assert one.resource.held.expires == 100.0 + 365 * 24 * 60 * 60
    one.answered(answer(1.0, -5), now)
    assert one.resource.held.at(100.0) == 0.0


def test_a_lease_that_was_given_back_stays_so():
    resource = Resource("db", Mode.OPTIMISTIC, 5.0, Unmeasured(), 0.0)
    resource.close()
    resource.hold(nothing_but(5.0, 0.0), 1.0)
    assert resource.held.is_closed and resource.held.at(2.0) == 0.0


def test_the_demand_of_a_rate():
    usage = RateUsage(0.0)
    usage.ended = 6
    assert usage.demand(2.0) == 3.0
    # While callers wait, twice as much.
    usage.waiting = 1
    assert usage.demand(2.0) == 8.0
    usage.begin_second()
    assert usage.demand(1.0) == 2.0


@pytest.mark.parametrize("seed", range(20))
def test_a_gauge_never_has_more_than_the_capacity(seed):
    chance, usage, capacity = random.Random(seed), GaugeUsage(), 0.0
    for _ in range(500):
        step = chance.randrange(4)
        if step == 0:
            capacity = chance.choice([0.0, 0.5, 1.0, 2.9999999999, 7.2])
        elif step == 1 and usage.in_use:
            usage.in_use -= 1
        elif step == 2 and usage.in_use:
            usage.lose()
            assert usage.sweep() and not usage.sweep()
        else:
            before = usage.in_use
            usage.come()
            assert usage.take(capacity) == (before + 1 <= capacity + 1e-9)
            assert usage.in_use <= max(before, math.floor(capacity + 1e-9))
        assert usage.demand(1.0) >= usage.in_use >= 0
    usage.begin_second()
    assert usage.demand(1.0) == usage.in_use


def test_errors():
    assert issubclass(LeaseTimeoutError, TimeoutError) and issubclass(LeaseTimeoutError, TollgateError)
    assert str(LeaseTimeoutError("db")) == "db is not available within the timeout"
    assert issubclass(InvalidRequestError, TollgateError)
