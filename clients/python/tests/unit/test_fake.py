"""The fake, with either client."""

from __future__ import annotations

import time

import pytest

from tollgate_client import (
    DecidedBy,
    Fake,
    FakeAnswer,
    FakeTime,
    Fallback,
    InvalidRequestError,
    NoAnswer,
    NoDecisionError,
    Reason,
    RefusedError,
)


def test_each_answer(connect):
    fake = Fake(fake_time=FakeTime())
    client = connect(fake)
    assert client.allow("db", "any", 3).tokens == 3
    fake.answer("db", "late", FakeAnswer.grant_after(0.25))
    assert client.allow("db", "late").wait == 0.25
    assert client.allow("db", "late", max_wait=0.25).is_granted
    assert client.allow("db", "late", max_wait=0.1).retry_after == 0.15
    fake.answer("db", "never", FakeAnswer.refuse())
    refused = client.allow("db", "never")
    assert (refused.reason, refused.retry_after) == (Reason.LIMIT, None)
    fake.answer("db", "unknown", FakeAnswer.NO_BUCKET)
    assert client.allow("db", "unknown").reason is Reason.NO_BUCKET
    fake.answer("db", "wrong", FakeAnswer.INVALID)
    with pytest.raises(InvalidRequestError):
        client.allow("db", "wrong")
    fake.answer("db", "away", FakeAnswer.NO_NODE)
    with pytest.raises(NoDecisionError) as error:
        client.allow("db", "away")
    assert error.value.reason is NoAnswer.UNREACHABLE
    assert fake.asked("db", "late") == [1, 1, 1] and fake.asked("db", "any") == [3]


def test_fallbacks(connect):
    fake = Fake(FakeAnswer.NO_NODE)
    client = connect(fake, fallback=Fallback.ALLOW)
    assert client.allow("db", "any").decided_by is DecidedBy.FALLBACK


def test_waits_take_no_time(connect):
    fake_time = FakeTime()
    fake = Fake(FakeAnswer.rate(0.1, 1), fake_time=fake_time)
    client = connect(fake)
    begin = time.monotonic()
    for _ in range(3):
        client.acquire("db", "any", max_wait=60.0)
    assert 20 <= fake_time.now <= 25, "up to a tenth longer"
    with pytest.raises(RefusedError) as error:
        client.acquire("db", "any", max_wait=5.0)
    assert error.value.reason is Reason.LIMIT and error.value.retry_after > 5
    assert str(error.value) == "refused: not enough tokens"
    fake_time.advance(100)
    assert client.allow("db", "any").is_granted
    assert time.monotonic() - begin < 5


def test_it_has_no_memory_of_refusals(connect):
    fake = Fake(FakeAnswer.refuse(10.0), fake_time=FakeTime())
    client = connect(fake)
    for _ in range(2):
        assert client.allow("db", "any").decided_by is DecidedBy.NODE
    assert fake.asked("db", "any") == [1, 1]


def test_real_time(connect):
    client = connect(Fake(FakeAnswer.grant_after(0.02)))
    begin = time.monotonic()
    client.acquire("db", "any")
    assert time.monotonic() - begin >= 0.02
