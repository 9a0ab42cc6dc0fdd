"""The fake, with either client."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import threading
import time
from typing import List

import pytest

from tollgate_client import (
    ClosedError,
    DecidedBy,
    Fake,
    FakeAnswer,
    FakeTime,
    Fallback,
    Hold,
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


def test_a_domain_without_a_node_spoils_no_other(connect):
    fake_time = FakeTime()
    fake = Fake(fake_time=fake_time)
    client = connect(fake)
    one, two = client.hold("sandbox", "acme"), client.hold("sandbox", "other")
    fake.answer_tenant("sandbox", "acme", FakeAnswer.NO_NODE)
    fake_time.advance(60.0)
    assert not one.is_held and two.is_held


def test_a_task_that_waits_for_a_hold_is_cancelled():
    fake = Fake()
    fake.copies("sandbox", 1)

    async def wait() -> None:
        async with fake.aio_client() as client:
            one = await client.hold("sandbox", "acme")

            async def hold() -> None:
                async with client.hold("sandbox", "other", max_wait=600.0):
                    raise AssertionError

            # Before it begins, and while it waits.
            for pause in (None, 0.0, 0.01):
                task = asyncio.ensure_future(hold())
                if pause is not None:
                    await asyncio.sleep(pause)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            one.release()
            (holds,) = client._kept.values()
            while holds.desk.live(True):
                await asyncio.sleep(0.001)
            assert fake.held("sandbox") == 0

    asyncio.run(wait())


def test_an_interrupt_ends_the_wait_for_a_hold():
    fake = Fake()
    fake.copies("sandbox", 1)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with fake.client() as client:
            one = client.hold("sandbox", "acme")
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(KeyboardInterrupt):
                client.hold("sandbox", "other", max_wait=600.0)
            one.release()
            end = time.monotonic() + 30.0
            (holds,) = client._kept.values()
            while holds.desk.live(True) and time.monotonic() < end:
                time.sleep(0.001)
            assert not holds.desk.live(True) and fake.held("sandbox") == 0
    finally:
        signal.signal(signal.SIGALRM, before)


def test_closing_ends_the_wait_for_a_hold(connect):
    fake, failures = Fake(), []
    fake.copies("sandbox", 1)
    client = connect(fake)
    one = client.hold("sandbox", "acme")

    def ask() -> None:
        with pytest.raises(ClosedError) as error:
            client.hold("sandbox", "acme", max_wait=600.0)
        failures.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(0.05)
    client.end()
    thread.join(30.0)
    assert failures and not one.is_held and fake.held("sandbox") == 0


def test_holds_over_random_histories():
    """After any history, the fake knows exactly the copies that the application holds."""
    for seed in range(60):
        chance = random.Random(seed)
        fake_time = FakeTime()
        fake = Fake(fake_time=fake_time)
        fake.copies("sandbox", 10)
        client = fake.client(fallback=Fallback.ALLOW if seed % 2 else None)
        is_away, may_lose = seed % 4 < 2, seed % 8 < 4
        held: List[Hold] = []
        for _ in range(200):
            domain, what = chance.choice(["acme", "other"]), chance.randrange(10)
            if what < 4:
                copies, ttl = chance.randrange(1, 5), float(chance.randrange(1, 30))
                with contextlib.suppress(RefusedError, NoDecisionError):
                    held.append(client.hold("sandbox", domain, copies, min_copies=1, ttl=ttl))
            elif what < 6 and held:
                one = held.pop(chance.randrange(len(held)))
                if what == 4:
                    one.release()
                del one
            elif what == 6 and is_away:
                fake.answer_tenant("sandbox", domain, FakeAnswer.NO_NODE)
            elif what == 7:
                fake.answer_tenant("sandbox", domain, FakeAnswer.GRANT)
            elif what == 8 and may_lose and not chance.randrange(4):
                fake.lose("sandbox")
            else:
                fake_time.advance(chance.randrange(8000) / 1000)
            recorded = [one for one in held if one.is_held and one.decided_by is DecidedBy.NODE]
            copies = sum(one.copies for one in recorded)
            assert may_lose or copies <= fake.held("sandbox"), seed
        for domain in ("acme", "other"):
            fake.answer_tenant("sandbox", domain, FakeAnswer.GRANT)
        fake_time.advance(60.0)
        held = [one for one in held if one.is_held]
        assert all(one.decided_by is DecidedBy.NODE for one in held), seed
        # A fake's sessions end only when they are told to.
        if not is_away:
            assert sum(one.copies for one in held) == fake.held("sandbox"), seed
        held.clear()
        client.close()
        assert is_away or fake.held("sandbox") == 0, seed


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
