"""The fake, with either client."""

from __future__ import annotations

import asyncio
import threading
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
    assert str(error.value) == "refused: the limit is reached"
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


def test_each_answer_about_hits(connect):
    fake = Fake(fake_time=FakeTime())
    told = []
    client = connect(fake, on_tenant_refused=lambda *refusal: told.append(refusal))
    assert client.hits("search", "acme", 3).granted == 3
    fake.answer_tenant("search", "late", FakeAnswer.grant_after(0.25))
    with pytest.raises(RefusedError) as error:
        client.hits("search", "late")
    assert error.value.retry_after == 0.25
    assert told[0][0].domain == "late" and told[0][1].retry_after == 0.25
    fake.answer_tenant("search", "slow", FakeAnswer.rate(1.0, 4))
    assert client.hits("search", "slow", 9, min_copies=3).granted == 3
    # It waits until there are enough, and gets what there is.
    assert client.hits("search", "slow", 2, max_wait=10.0).granted == 2
    for answer, reason in (
        (FakeAnswer.NO_BUCKET, NoAnswer.NOT_CONFIGURED),
        (FakeAnswer.NO_NODE, NoAnswer.UNREACHABLE),
    ):
        fake.answer_tenant("search", "acme", answer)
        for ask in (client.hits, client.hold):
            with pytest.raises(NoDecisionError) as undecided:
                ask("search", "acme")
            assert undecided.value.reason is reason
    fake.answer_tenant("search", "acme", FakeAnswer.INVALID)
    for ask in (client.hits, client.hold):
        with pytest.raises(InvalidRequestError):
            ask("search", "acme")
    assert fake.held("search") == 0


def test_holds(connect):
    fake_time = FakeTime()
    fake = Fake(fake_time=fake_time)
    fake.copies("sandbox", 3)
    client = connect(fake)
    one, two = client.hold("sandbox", "acme", 2), client.hold("sandbox", "other", 9, min_copies=1)
    assert (one.copies, two.copies, fake.held("sandbox")) == (2, 1, 3)
    for copies, retry_after in ((1, 0.1), (4, None)):
        with pytest.raises(RefusedError) as error:
            client.hold("sandbox", "acme", copies)
        assert error.value.retry_after == retry_after
    fake_time.advance(24 * 60 * 60.0)
    assert one.is_held and two.is_held and not one.lost(timeout=5.0)
    one.release()
    assert not one.is_held and one.lost() and fake.held("sandbox") == 1
    client.hold("sandbox", "acme", 2).release()
    # It is lost at its next renewal.
    fake.lose("sandbox")
    assert two.is_held
    fake_time.advance(4.0)
    assert not two.is_held and two.lost()
    last = client.hold("sandbox", "acme", 3)
    client.end()
    assert not last.is_held and fake.held("sandbox") == 0


def test_a_fallback_takes_over_a_hold_of_a_fake(connect):
    fake_time, lost = FakeTime(), []
    fake = Fake(fake_time=fake_time)
    client = connect(fake, resource_fallbacks={"sandbox": Fallback.ALLOW})
    held = client.hold("sandbox", "acme")
    gone = client.hold("other", "acme", on_lost=lambda: lost.append(1))
    for resource in ("sandbox", "other"):
        fake.answer_tenant(resource, "acme", FakeAnswer.NO_NODE)
    fake_time.advance(20.0)
    assert held.is_held and held.decided_by is DecidedBy.FALLBACK
    assert not gone.is_held and lost == [1]
    fake.answer_tenant("sandbox", "acme", FakeAnswer.GRANT)
    fake_time.advance(10.0)
    assert held.is_held and held.decided_by is DecidedBy.NODE


def test_holds_of_another_event_loop_are_lost():
    fake, told = Fake(), []
    client = fake.aio_client()

    async def hold(copies):
        held = await client.hold("sandbox", "acme", copies, on_lost=lambda: told.append(copies))
        assert held.is_held and not await held.lost(timeout=0.01)
        return held

    first = asyncio.run(hold(1))
    assert not first.is_held and told == [1]
    second = asyncio.run(hold(2))
    assert not second.is_held and told == [1, 2]
    asyncio.run(client.close())


def test_holds_in_real_time(connect):
    fake = Fake()
    fake.copies("sandbox", 1)
    client = connect(fake)
    with Fake().client().hold("sandbox", "acme") as held:
        assert held.is_held
    one = client.hold("sandbox", "acme")
    assert not one.lost(timeout=0.01)
    threading.Timer(0.05, one.release).start()
    two = client.hold("sandbox", "acme", max_wait=60.0)
    assert two.is_held and one.lost(timeout=60.0)
    client.end()
    assert two.lost() and fake.held("sandbox") == 0
