"""Both clients behind one face, so that each scenario is written once."""

from __future__ import annotations

import asyncio
import inspect
import threading
from typing import Any, Coroutine, Iterable, Union

from tollgate_client import (
    Client,
    DecidedBy,
    Decision,
    Fake,
    Granted,
    Hits,
    NoDecisionError,
    Place,
    aio,
)

from .waiting import polls

PATIENT = 20.0
"""Seconds: longer than anything that should be answered takes, even on a busy machine."""

Addresses = Union[str, Iterable[str], Fake]


class AnyClient:
    """A client as the scenarios use it. Threads may share it."""

    def allow(self, *arguments: Any, **options: Any) -> Decision:
        raise NotImplementedError

    def acquire(self, *arguments: Any, **options: Any) -> Granted:
        raise NotImplementedError

    def hits(self, *arguments: Any, **options: Any) -> Hits:
        raise NotImplementedError

    def hold(self, *arguments: Any, **options: Any) -> Any:
        raise NotImplementedError

    def charge(self, namespace: str, bucket: str, tokens: int) -> None:
        raise NotImplementedError

    def smart_bucket(self, namespace: str, bucket: str, **options: Any) -> Any:
        raise NotImplementedError

    def lease(self, use: str, resource: str, **options: Any) -> Any:
        """A lease that is used as ``rate_limiter``, ``gauge`` or ``capacity``."""
        raise NotImplementedError

    def end(self) -> None:
        """Closes the client."""
        raise NotImplementedError

    def close(self) -> None:
        """Closes the client, and what the test has it run in."""
        self.end()


class Blocking(AnyClient):
    def __init__(self, addresses: Addresses, **settings: Any) -> None:
        self.client = Client(addresses, **settings)

    def allow(self, *arguments: Any, **options: Any) -> Decision:
        return self.client.allow(*arguments, **options)

    def acquire(self, *arguments: Any, **options: Any) -> Granted:
        return self.client.acquire(*arguments, **options)

    def hits(self, *arguments: Any, **options: Any) -> Hits:
        return self.client.hits(*arguments, **options)

    def hold(self, *arguments: Any, **options: Any) -> Any:
        return self.client.hold(*arguments, **options)

    def charge(self, namespace: str, bucket: str, tokens: int) -> None:
        self.client.charge(namespace, bucket, tokens)

    def smart_bucket(self, namespace: str, bucket: str, **options: Any) -> Any:
        return self.client.smart_bucket(namespace, bucket, **options)

    def lease(self, use: str, resource: str, **options: Any) -> Any:
        return getattr(self.client, use)(resource, **options)

    def end(self) -> None:
        self.client.close()


class Asynchronous(AnyClient):
    """An asyncio client in an event loop with a thread of its own."""

    def __init__(self, addresses: Addresses, **settings: Any) -> None:
        self.client = aio.Client(addresses, **settings)
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def allow(self, *arguments: Any, **options: Any) -> Decision:
        decision: Decision = self.run(self.client.allow(*arguments, **options))
        return decision

    def acquire(self, *arguments: Any, **options: Any) -> Granted:
        granted: Granted = self.run(self.client.acquire(*arguments, **options))
        return granted

    def hits(self, *arguments: Any, **options: Any) -> Hits:
        hits: Hits = self.run(self.client.hits(*arguments, **options))
        return hits

    def hold(self, *arguments: Any, **options: Any) -> Any:
        async def hold() -> Any:
            return await self.client.hold(*arguments, **options)

        return InLoop(self, self.run(hold()))

    def charge(self, namespace: str, bucket: str, tokens: int) -> None:
        async def charge() -> None:
            self.client.charge(namespace, bucket, tokens)

        self.run(charge())

    def smart_bucket(self, namespace: str, bucket: str, **options: Any) -> Any:
        async def smart_bucket() -> Any:
            return self.client.smart_bucket(namespace, bucket, **options)

        return InLoop(self, self.run(smart_bucket()))

    def lease(self, use: str, resource: str, **options: Any) -> Any:
        async def lease() -> Any:
            return getattr(self.client, use)(resource, **options)

        return InLoop(self, self.run(lease()))

    def end(self) -> None:
        self.run(self.client.close())

    def close(self) -> None:
        if not self.loop.is_closed():
            self.end()
            self.run(_end_tasks())
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
            self.loop.close()


class InLoop:
    """A handle of an asyncio client, or a place of its gauge, as those of a blocking one are."""

    def __init__(self, client: Asynchronous, handle: Any) -> None:
        self._client = client
        self._handle = handle

    def __getattr__(self, name: str) -> Any:
        if not callable(getattr(type(self._handle), name)):
            return self._use(name)
        return lambda *arguments, **options: self._use(name, *arguments, **options)

    def _use(self, name: str, *arguments: Any, **options: Any) -> Any:
        async def use() -> Any:
            result = getattr(self._handle, name)
            if callable(result):
                result = result(*arguments, **options)
            return await result if inspect.isawaitable(result) else result

        result = self._client.run(use())
        return InLoop(self._client, result) if isinstance(result, Place) else result


async def _end_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def ask_until_decided_by(
    client: AnyClient, who: DecidedBy, namespace: str = "a", bucket: str = "b", **options: Any
) -> Decision:
    """Asks for tokens until they are decided on by ``who``."""
    for _ in polls(f"decided by {who}"):
        try:
            decision = client.allow(namespace, bucket, **options)
        except NoDecisionError:
            continue
        if decision.decided_by is who:
            return decision
    raise AssertionError
