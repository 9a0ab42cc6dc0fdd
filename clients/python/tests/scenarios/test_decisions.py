"""What is granted and refused, and how long callers wait."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, List

import pytest

from tollgate_client import (
    DecidedBy,
    Fallback,
    Granted,
    InvalidRequestError,
    Reason,
    Refused,
    RefusedError,
    Request,
)

LIMITS = """namespaces:
  a:
    buckets:
      slow: { size: 2, fill_rate: 1/h, wait_timeout_millis: 0, max_tokens_per_request: 2 }
      quick: { size: 1, fill_rate: 4, wait_timeout_millis: 60000 }
      waits: { size: 1, fill_rate: 1/m, wait_timeout_millis: 3600000, max_debt_millis: 3600000 }
      never_waits: { size: 1, fill_rate: 4, wait_timeout_millis: 0 }
      books: { size: 1000, fill_rate: 1/d, max_tokens_per_request: 1000, soft_limit_percent: 99 }
      banned: { size: 100, fill_rate: 100, ban: { threshold: 1, window: 1h, for: 1h } }
      reserved: { size: 2, fill_rate: 1/h, wait_timeout_millis: 0, reserve: 50% }
      shadow: { size: 1, fill_rate: 1/h, wait_timeout_millis: 0, enforce: false }
"""
"""A bucket for each case; the namespace has no other."""

HOUR = 3600.0


def granted(decision: Any) -> Granted:
    assert isinstance(decision, Granted), decision
    return decision


def refused(decision: Any) -> Refused:
    assert isinstance(decision, Refused), decision
    return decision


def test_each_answer_of_a_node(connect, start):
    client = connect(start(LIMITS).grpc)
    assert client.allow("a", "slow") == Granted(1, 0.0, False, False, DecidedBy.NODE)
    granted(client.allow("a", "slow"))
    refusal = refused(client.allow("a", "slow"))
    assert (refusal.reason, refusal.decided_by) == (Reason.LIMIT, DecidedBy.NODE)
    assert HOUR / 2 < refusal.retry_after <= HOUR
    # A wait, as the bucket allows it, and not as this request allows it.
    granted(client.allow("a", "waits"))
    granted(client.allow("a", "waits"))
    assert 0 < granted(client.allow("a", "waits")).wait <= 60
    assert refused(client.allow("a", "waits", max_wait=0.001)).reason is Reason.LIMIT
    granted(client.allow("a", "banned"))
    refusal = refused(client.allow("a", "banned"))
    assert refusal.reason is Reason.BANNED and refusal.retry_after > HOUR
    granted(client.allow("a", "reserved", critical=False))
    refused(client.allow("a", "reserved", critical=False))
    granted(client.allow("a", "reserved"))
    granted(client.allow("a", "shadow"))
    assert granted(client.allow("a", "shadow")).shadow
    assert refused(client.allow("a", "books", 2000)).reason is Reason.TOO_MANY_TOKENS
    refusal = refused(client.allow("a", "unknown"))
    assert (refusal.reason, refusal.retry_after) == (Reason.NO_BUCKET, None)
    with pytest.raises(InvalidRequestError):
        client.allow("", "b")


def test_a_mistake_of_the_caller_is_an_error_whatever_the_fallback(connect, start):
    client = connect(start(LIMITS).grpc, fallback=Fallback.ALLOW)
    for name in ("b\n", "\udcff", "x" * (5 << 20)):
        # As often as would open a circuit.
        for _ in range(3):
            with pytest.raises(InvalidRequestError):
                client.allow("a", name)
    for options in ({"tokens": -1}, {"max_wait": -1.0}, {"deadline": float("nan")}):
        with pytest.raises(InvalidRequestError):
            client.allow("a", "slow", **options)
    # No bucket is a mistake of the limits.
    decision = granted(client.allow("a", "unknown", 7))
    assert (decision.tokens, decision.decided_by) == (7, DecidedBy.FALLBACK)


def test_a_refusal_is_remembered_until_its_retry_time_and_for_a_second_at_most(connect, start):
    node = start(LIMITS)
    client = connect(node.grpc)
    begin = time.monotonic()
    granted(client.allow("a", "slow"))
    assert refused(client.allow("a", "slow", 2)).decided_by is DecidedBy.NODE
    remembered = 0
    while True:
        refusal = refused(client.allow("a", "slow", 2))
        if refusal.decided_by is DecidedBy.NODE:
            break
        assert refusal.decided_by is DecidedBy.REMEMBERED and refusal.retry_after > HOUR / 2
        remembered += 1
        time.sleep(0.001)
    assert time.monotonic() - begin >= 1 and remembered > 0
    assert node.decisions(namespace="a", bucket="slow") == 3
    # Fewer tokens may be there.
    assert granted(client.allow("a", "slow")).decided_by is DecidedBy.NODE


def test_acquire_waits_as_long_as_the_node_says(connect, start):
    client = connect(start(LIMITS).grpc)
    begin = time.monotonic()
    for _ in range(5):
        client.acquire("a", "quick")
    # One token is there, one is lent, and three come at four a second.
    assert time.monotonic() - begin >= 0.74


def test_acquire_asks_again_where_the_bucket_has_nobody_wait(connect, start):
    client = connect(start(LIMITS).grpc)
    begin = time.monotonic()
    with ThreadPoolExecutor(5) as threads:
        calls = [threads.submit(client.acquire, "a", "never_waits", max_wait=60) for _ in range(5)]
        assert [call.result().tokens for call in calls] == [1] * 5
    assert time.monotonic() - begin >= 0.74
    # It does not wait for what comes too late, and says when that would be.
    client.acquire("a", "slow")
    begin = time.monotonic()
    with pytest.raises(RefusedError) as error:
        client.acquire("a", "slow", 2, max_wait=60)
    assert error.value.retry_after > 60 and error.value.reason is Reason.LIMIT
    assert time.monotonic() - begin < 30


def test_acquire_gives_up_at_once_what_comes_too_late(connect, start):
    """Where the bucket would have callers wait for longer than this one wants, asking again is no
    use."""
    node = start(LIMITS)
    client = connect(node.grpc)
    for _ in range(2):
        granted(client.allow("a", "waits"))
    begin = time.monotonic()
    with pytest.raises(RefusedError) as error:
        client.acquire("a", "waits", max_wait=30)
    # The node says how long until a request with this wait is granted.
    assert error.value.retry_after < 40
    assert time.monotonic() - begin < 15
    assert node.decisions(namespace="a", bucket="waits") == 3


def test_many_clients_get_exactly_what_is_in_the_books(connect, start):
    address = start(LIMITS).grpc
    clients = [connect(address) for _ in range(50)]

    def ask(client: Any) -> int:
        return sum(client.allow("a", "books").is_granted for _ in range(30))

    with ThreadPoolExecutor(50) as threads:
        assert sum(threads.map(ask, clients)) == 1000


def test_the_application_is_told_of_refusals_and_soft_limits(connect, start):
    told: List[Any] = []

    def on_soft_limited(request: Request, granted: Granted) -> None:
        told.append(("soft", request.bucket, granted.tokens))

    def on_refused(request: Request, refused: Refused) -> None:
        told.append(("refused", request.bucket, refused.decided_by))

    client = connect(start(LIMITS).grpc, on_refused=on_refused, on_soft_limited=on_soft_limited)
    for tokens in (1, 998, 1, 1, 1):
        client.allow("a", "books", tokens)
    assert told == [
        ("soft", "books", 998),
        ("soft", "books", 1),
        ("refused", "books", DecidedBy.NODE),
        ("refused", "books", DecidedBy.REMEMBERED),
    ]
