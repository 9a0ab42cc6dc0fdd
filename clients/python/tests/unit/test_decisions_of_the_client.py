"""Remembered refusals, fallbacks, and what a node's answer means."""

from __future__ import annotations

import math

import pytest

from tollgate_client import (
    DecidedBy,
    Fake,
    Fallback,
    InvalidRequestError,
    NoDecisionError,
    Reason,
    Refused,
    Request,
)
from tollgate_client._decide import refusals
from tollgate_client._decide.log import Throttle
from tollgate_client._decide.refusals import Refusals
from tollgate_client._decide.response import decision
from tollgate_client._proto.quotaservice_pb2 import AllowRequest, AllowResponse
from tollgate_client.fallback import Fallbacks, LocalRate
from tollgate_client.request import message, request


def refusal(reason: Reason, retry_after: "float | None") -> Refused:
    return Refused(reason, retry_after, DecidedBy.NODE)


def test_a_refusal_covers_what_it_says_nothing_better_about():
    table = Refusals()
    asked = Request("a", "b", 5, max_wait=0.1)
    assert table.get(asked, 0) is None
    table.add(asked, refusal(Reason.LIMIT, 0.4), 0)
    found = table.get(asked, 0.1)
    assert found == Refused(Reason.LIMIT, pytest.approx(0.3), DecidedBy.REMEMBERED)

    def covers(now: float = 0.0, **changes: object) -> bool:
        return table.get(asked._replace(**changes), now) is not None

    assert covers(tokens=6) and not covers(tokens=4)
    assert covers(max_wait=0.0) and not covers(max_wait=0.101)
    assert not covers(max_wait=None), "the bucket's own limit may be longer"
    assert covers(critical=False)
    assert not covers(bucket="c") and not covers(namespace="b")
    assert covers(0.399) and not covers(0.4)
    # The reserve may be what refused it.
    table.add(asked._replace(critical=False), refusal(Reason.LIMIT, 0.4), 1)
    assert covers(1, critical=False) and not covers(1)
    # The bucket's own limit is the longest wait, and a ban refuses any number of tokens.
    table.add(asked._replace(max_wait=None), refusal(Reason.BANNED, 5.0), 2)
    assert covers(2, max_wait=60.0, tokens=1)
    assert covers(2.999) and not covers(3), "for a second at most"


def test_refusals_that_are_not_remembered():
    table = Refusals()
    asked = Request("a", "b")
    table.add(asked, Refused(Reason.LIMIT, 0.5, DecidedBy.DEGRADED_NODE), 0)
    table.add(asked, refusal(Reason.LIMIT, None), 0)
    assert table.get(asked, 0) is None


def test_the_number_of_refusals_is_bounded():
    table, most = Refusals(), refusals.MOST
    for name in range(most):
        now = 0.0 if name < most - 100 else 0.5
        table.add(Request("a", str(name)), refusal(Reason.LIMIT, 1.0), now)
    assert len(table) == most
    table.add(Request("a", "b"), refusal(Reason.LIMIT, 1.0), 1)
    assert len(table) == 100 + 1, "expired ones go first"
    for name in range(2 * most):
        table.add(Request("a", str(name)), refusal(Reason.LIMIT, 1.0), 1)
    assert len(table) <= most


def test_a_local_rate_refills_up_to_its_burst():
    rate = LocalRate(10.0, 3)
    assert [rate.take(1, 0) for _ in range(3)] == [0, 0, 0]
    assert rate.take(1, 0) == pytest.approx(0.1)
    assert rate.take(2, 0.05) == pytest.approx(0.15)
    assert rate.take(1, 0.1) == 0
    assert rate.take(3, 60) == 0, "full"
    assert rate.take(1, 60) == pytest.approx(0.1)
    # An earlier time than that of another caller gives nothing.
    assert rate.take(1, 0) == pytest.approx(0.1)
    assert rate.take(4, 120) is None, "more than it ever holds"
    never = LocalRate(0.0, 1)
    assert never.take(1, 0) == 0 and never.take(1, 0) is None
    for numbers in ((-1.0, 1), (math.nan, 1), (1.0, -1)):
        with pytest.raises(ValueError):
            Fallback.rate(*numbers)


def test_the_most_specific_fallback_counts():
    assert Fallbacks(None, {}, {}).get("a", "b") is None
    rate = Fallback.rate(1.0, 1)
    fallbacks = Fallbacks(Fallback.ALLOW, {"a": Fallback.DENY}, {("a", "b"): rate})
    assert fallbacks.get("a", "b") is rate
    assert fallbacks.get("a", "c") is Fallback.DENY
    assert fallbacks.get("b", "b") is Fallback.ALLOW
    assert rate.decide(1, 0).is_granted
    refused = rate.decide(1, 0)
    assert refused == Refused(Reason.LIMIT, pytest.approx(1.0), DecidedBy.FALLBACK)


def test_only_what_is_known_is_granted():
    def status(number: int) -> AllowResponse:
        return AllowResponse.FromString(AllowResponse(status=number).SerializeToString())

    assert decision(status(0)).is_granted
    for number in (1, 2, 3, 4, 6):
        assert not decision(status(number)).is_granted
    with pytest.raises(InvalidRequestError):
        decision(status(5))
    for number in (7, 2**31 - 1):
        with pytest.raises(NoDecisionError, match="unknown to this version"):
            decision(status(number))


def test_the_debt_of_a_refusal():
    for tokens, rate, debt in (
        (-5.0, 2.0, 2.5),
        (5.0, 2.0, 0.0),
        (0.0, 0.0, 0.0),
        (-1.0, 0.0, 0.0),
        (-1.0, -1.0, 0.0),
        (math.nan, 1.0, 0.0),
    ):
        response = AllowResponse(status=1, tokens_available=tokens, fill_rate=rate)
        assert decision(response).debt == debt


def test_requests_on_the_wire():
    def wire(
        tokens: int = 1, max_wait: "float | None" = None, critical: bool = True
    ) -> AllowRequest:
        return message(request("a", "b", tokens, max_wait, None, critical))

    assert wire(0).tokens_requested == 1 and wire(2**70).tokens_requested == 2**63 - 1
    assert not wire().max_wait_time_override
    assert wire(max_wait=0.0).max_wait_time_override
    assert wire(max_wait=0.0019).max_wait_millis_override == 1
    assert wire(max_wait=math.inf).max_wait_millis_override > 1e12
    assert wire(critical=False).criticality == AllowRequest.NOT_CRITICAL
    with pytest.raises(InvalidRequestError):
        message(Request("\udc00", "b"))


def test_messages_are_held_back():
    throttle = Throttle()
    passed = [throttle.passes(now) for now in (0.0, 0.1, 0.9, 1.0, 1.5, 2.5)]
    assert passed == [0, None, None, 2, None, 1]


def test_a_thousand_namespaces_have_figures_of_their_own():
    registry = pytest.importorskip("prometheus_client").REGISTRY
    client = Fake().client()
    for at in range(1100):
        client.allow(f"namespace-{at}", "b")
    named = {
        sample.labels["namespace"]
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == "tollgate_client_requests_total"
    }
    assert len(named) <= 1000 and "" in named
