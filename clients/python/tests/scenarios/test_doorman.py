"""Leases of a server that the test leads."""

from __future__ import annotations

import gc
from typing import Any, Callable

import pytest

from tollgate_client import Client

from ..harness.clients import Blocking
from ..harness.doorman import Doorman
from ..harness.processes import free_port
from ..harness.waiting import eventually


@pytest.fixture
def doorman(ending: Any) -> Callable[[], Doorman]:
    """Starts Doormen."""

    def doorman() -> Doorman:
        one = Doorman()
        ending.callback(one.close)
        return one

    return doorman


def test_a_doorman_that_moves_its_master_is_followed(connect, doorman):
    servers = [doorman(), doorman()]

    def set_master(at: int) -> None:
        servers[at].master = None
        servers[1 - at].master = servers[at].address

    def leased(wants: float) -> None:
        eventually("leased", lambda: db.get() == wants)

    set_master(1)
    # The client knows the first one only.
    client = connect(servers[0].address)
    db = client.lease("capacity", "db", wants=5.0)
    leased(5.0)
    assert servers[1].asked
    set_master(0)
    db.set_wants(6.0)
    leased(6.0)
    set_master(1)
    db.set_wants(7.0)
    leased(7.0)
    # None for a while.
    servers[1].master = ""
    db.set_wants(8.0)
    before = servers[1].calls()
    eventually("asked in vain", lambda: servers[1].calls() > before)
    assert db.get() == 7.0
    set_master(1)
    leased(8.0)
    # One that does not answer: the client asks the first one again.
    for server in servers:
        server.master = f"127.0.0.1:{free_port()}"
    db.set_wants(9.0)
    before = servers[0].calls()
    eventually("asked again", lambda: servers[0].calls() > before)
    set_master(0)
    leased(9.0)
    # The master moves between the last refresh and the release.
    set_master(1)
    client.end()
    assert servers[1].released == ["db"] and not servers[0].released


def test_all_leases_are_refreshed_in_one_call(doorman, ending):
    server = doorman()
    client = Blocking(server.address)
    ending.callback(client.close)
    leases = [client.lease("capacity", f"r{at}", wants=1.0) for at in range(20)]
    eventually("leased", lambda: all(lease.get() == 1.0 for lease in leases))
    before = server.calls()
    eventually("refreshed twice", lambda: server.calls() >= before + 2)
    asked = server.asked[before:]
    assert all(len(one.resources) == 20 for one in asked)
    # About at the interval of a second that the server says.
    assert asked[1].at - asked[0].at >= 0.5
    assert len({one.client_id for one in asked}) == 1
    # Those without a handle are released, and refreshed no more.
    for lease in leases:
        lease.close()
    eventually("released", lambda: len(server.released) == 20)


def test_a_lease_whose_handle_was_closed_can_be_leased_again_at_once(connect, doorman):
    server = doorman()
    client = connect(server.address)
    for wants in range(1, 30):
        db = client.lease("capacity", "db", wants=float(wants))
        assert db.changed(timeout=30.0) == wants
        db.close()
        # Nothing is held any more.
        assert db.get() == 0.0
    client.end()
    assert server.released[-1] == "db"


def test_a_lease_whose_handle_is_collected_ends(connect, doorman):
    server = doorman()
    client = connect(server.address)
    for _ in range(3):
        client.lease("rate_limiter", "db", wants=5.0).wait(timeout=30.0)
        gc.collect()
    eventually("released", lambda: server.released[-1:] == ["db"])
    # With a place, which keeps its gauge.
    places = [client.lease("gauge", "places", wants=5.0).acquire(timeout=30.0)]
    gc.collect()
    client.lease("capacity", "other", wants=1.0).changed(timeout=30.0)
    assert "places" not in server.released
    places.clear()
    gc.collect()
    eventually("released", lambda: "places" in server.released)


def test_a_client_that_is_collected_releases_its_leases(doorman):
    server = doorman()
    rate = Client(server.address).rate_limiter("db", wants=5.0)
    gc.collect()
    # The handle keeps its client.
    rate.wait(timeout=30.0)
    del rate
    gc.collect()
    eventually("released", lambda: server.released == ["db"])


def test_the_safe_capacity_outlives_a_degraded_answer(doorman, ending):
    server = doorman()
    client = Blocking(server.address)
    ending.callback(client.close)
    server.safe, server.length = 3.0, 2
    db = client.lease("capacity", "db", wants=5.0)
    eventually("leased", lambda: db.get() == 5.0)
    # A node without the store does not know the resource's safe capacity.
    server.safe, server.is_degraded = None, True
    before = server.calls()
    eventually("refreshed", lambda: server.calls() > before)
    # No node any more.
    server.master = ""
    eventually("run out", lambda: db.get() == 3.0)
