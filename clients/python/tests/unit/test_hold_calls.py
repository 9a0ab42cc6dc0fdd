"""Calls about holds: in threads and in tasks, at a time, and what ends them early."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any, Callable, Dict, List, Optional, Set

import pytest

from tollgate_client import DecidedBy, NoAnswer, NoDecisionError
from tollgate_client._keep.asynchronous import _Signal
from tollgate_client._keep.asynchronous import close_all as close_all_async
from tollgate_client._keep.blocking import close_all
from tollgate_client._proto.holds_pb2 import EndSessionResponse, KeepAliveResponse
from tollgate_client._tenants.asynchronous import AsyncHolds
from tollgate_client._tenants.blocking import BlockingHolds
from tollgate_client._tenants.session import Reserved, Session
from tollgate_client.request import tenant_request

LIMIT = 30.0


class Stub:
    """An engine whose calls of a method hang, if the test says so."""

    has_fake_time = False

    def __init__(self) -> None:
        self.keepers: Set[object] = set()
        self.nodes = self.tenants = self
        self.clock = time.monotonic
        self.hanging: Dict[str, Any] = {}
        self.calls: List[str] = []
        self.under_way = self.most = 0
        self.lock = threading.Lock()

    def keeper_has_ended(self, keeper: object) -> None:
        self.keepers.discard(keeper)

    def fallback_grants(self, session: Session, now: float) -> bool:
        return False

    def keep_alive(self, message: Any, deadline: float) -> Any:
        yield "keep_alive"
        answer = KeepAliveResponse()
        for one in message.sessions:
            renewed = answer.sessions.add(session=one.session, alive=True)
            renewed.holds.add(hold="me")
        return answer

    def end_session(self, message: Any, deadline: float) -> Any:
        if (yield "end_session") == "away":
            raise NoDecisionError(NoAnswer.UNREACHABLE)
        return EndSessionResponse()

    def begin(self, method: str) -> Any:
        with self.lock:
            self.calls.append(method)
            self.under_way += 1
            self.most = max(self.most, self.under_way)
        return self.hanging.get(method)

    def end(self) -> None:
        with self.lock:
            self.under_way -= 1


class BlockingStub(Stub):
    def perform(self, effect: Any) -> Any:
        hanging = self.begin(effect)
        try:
            return hanging.wait(LIMIT) and None if isinstance(hanging, threading.Event) else hanging
        finally:
            self.end()


class AsyncStub(Stub):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.get_running_loop()

    async def perform(self, effect: Any) -> Any:
        hanging = self.begin(effect)
        try:
            return await hanging.wait() and None if isinstance(hanging, asyncio.Event) else hanging
        finally:
            self.end()


def hold(
    holds: Any, ttl: float = 3600.0, on_lost: Optional[Callable[[], object]] = None
) -> Session:
    request = tenant_request("sandbox", "acme", 1, None, 0.0, None, ttl)
    session: Session = holds.session(request, on_lost)
    session.sent_at = holds.clock()
    session.may_live(session.sent_at)
    assert session.grant(Reserved(1, DecidedBy.NODE), holds.clock())
    return session


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_a_call_that_hangs_holds_up_no_other():
    engine: Any = BlockingStub()
    engine.hanging["keep_alive"] = hanging = threading.Event()
    holds = BlockingHolds(engine, "me")
    one, two = hold(holds, 6.0), hold(holds, 3600.0)
    until(lambda: "keep_alive" in engine.calls)
    two.release()
    until(lambda: "end_session" in engine.calls)
    # And it is found in time that what it renews is lost.
    until(lambda: not one.is_held)
    hanging.set()
    one.release()
    until(lambda: not engine.keepers)


def test_eight_threads_at_a_time_end_sessions():
    engine: Any = BlockingStub()
    engine.hanging["end_session"] = hanging = threading.Event()
    holds = BlockingHolds(engine, "me")
    for one in [hold(holds) for _ in range(50)]:
        one.release()
    until(lambda: engine.under_way == 8)
    hanging.set()
    close_all([holds])
    assert engine.most == 8 and engine.calls == ["end_session"] * 50 and not engine.keepers


def test_thirty_two_tasks_at_a_time_end_sessions():
    async def end() -> None:
        engine: Any = AsyncStub()
        engine.hanging["end_session"] = hanging = asyncio.Event()
        holds = AsyncHolds(engine, "me")
        for one in [hold(holds) for _ in range(50)]:
            one.release()
        while engine.under_way < 32:
            await asyncio.sleep(0.001)
        hanging.set()
        await close_all_async([holds])
        assert engine.most == 32 and len(engine.calls) == 50 and not engine.keepers

    asyncio.run(end())


def test_without_another_thread_the_keeper_makes_the_calls(monkeypatch):
    engine: Any = BlockingStub()
    holds = BlockingHolds(engine, "me")
    one = hold(holds)

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    one.release()
    until(lambda: not engine.keepers)
    assert engine.calls == ["end_session"]
    # Without a keeper, there is no hold.
    with pytest.raises(RuntimeError):
        hold(holds)
    assert not holds.desk.is_kept and not engine.keepers
    close_all([holds])


def test_sessions_are_ended_after_close_has_given_up(monkeypatch):
    monkeypatch.setattr("tollgate_client._keep.blocking.LONGEST_CLOSE", 0.05)
    monkeypatch.setattr("tollgate_client._keep.asynchronous.LONGEST_CLOSE", 0.05)
    engine: Any = BlockingStub()
    engine.hanging["end_session"] = "away"
    holds = BlockingHolds(engine, "me")
    hold(holds)
    for _ in range(2):
        begin = time.monotonic()
        close_all([holds])
        assert time.monotonic() - begin >= 0.05, "a second one waits as well"
    assert engine.keepers
    engine.hanging.clear()
    until(lambda: not engine.keepers)
    assert engine.calls == ["end_session"] * 2

    async def end() -> None:
        engine: Any = AsyncStub()
        engine.hanging["end_session"] = "away"
        holds = AsyncHolds(engine, "me")
        hold(holds)
        for _ in range(2):
            await close_all_async([holds])
        assert engine.keepers and holds.task is not None
        engine.hanging.clear()
        await asyncio.wait([holds.task], timeout=LIMIT)
        assert engine.calls == ["end_session"] * 2 and not engine.keepers

    asyncio.run(end())


def test_a_callback_may_close_the_client_or_release_its_hold():
    engine: Any = BlockingStub()
    holds = BlockingHolds(engine, "me")
    done: List[str] = []
    one = hold(holds, 1.0, lambda: (close_all([holds]), one.release(), done.append("told")))
    engine.hanging["keep_alive"] = hanging = threading.Event()
    until(lambda: done == ["told"])
    hanging.set()
    until(lambda: not engine.keepers)
    assert not one.is_held


@pytest.mark.parametrize("is_begun", [False, True])
def test_when_all_tasks_are_cancelled_holds_are_lost_and_later_ones_are_kept(is_begun):
    async def cancel() -> None:
        engine: Any = AsyncStub()
        engine.hanging["end_session"] = asyncio.Event()
        holds, told = AsyncHolds(engine, "me"), threading.Event()
        one = hold(holds, on_lost=told.set)
        hold(holds).release()
        if is_begun:
            while not engine.under_way:
                await asyncio.sleep(0.001)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.wait(others)
        assert not one.is_held and told.is_set() and not engine.keepers and not engine.under_way
        engine.hanging.clear()
        two = hold(holds)
        two.release()
        while engine.keepers:
            await asyncio.sleep(0.001)
        assert engine.calls[-1] == "end_session"

    asyncio.run(cancel())


def test_a_call_that_is_cancelled_is_made_again():
    async def cancel() -> None:
        engine: Any = AsyncStub()
        engine.hanging["keep_alive"] = asyncio.Event()
        holds = AsyncHolds(engine, "me")
        one = hold(holds, 6.0)
        while not engine.under_way:
            await asyncio.sleep(0.001)
        for task in list(holds._calls):
            task.cancel()
        engine.hanging.clear()
        end = time.monotonic() + LIMIT
        while engine.calls.count("keep_alive") < 4:
            assert one.is_held and time.monotonic() < end
            await asyncio.sleep(0.01)
        assert one.is_held
        await close_all_async([holds])

    asyncio.run(cancel())


def test_who_waits_in_an_event_loop_that_is_closed_disturbs_nobody():
    loop = asyncio.new_event_loop()
    signal = _Signal(loop)
    waiter = signal._waiter = loop.create_future()
    waiter.add_done_callback(print)
    loop.close()
    signal.set()
    assert not waiter.done()
