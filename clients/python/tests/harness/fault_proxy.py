"""A TCP proxy that makes faults of the network, which tests set and clear."""

from __future__ import annotations

import asyncio
import enum
import socket
import struct
import threading
from typing import Any, Coroutine, List, Optional, Set, Tuple


class Fault(enum.Enum):
    NOTHING = enum.auto()
    NO_REPLIES = enum.auto()
    """Requests arrive; replies are held back until the fault is cleared."""
    HALF_OPEN = enum.auto()
    """The server vanishes without closing: data is discarded, and open as well as new connections
    stay dead."""
    CUT_REPLIES = enum.auto()
    """Sends half of each reply, then a reset."""
    REFUSED = enum.auto()
    """Resets open connections and refuses new ones."""
    RESET_ON_ACCEPT = enum.auto()
    """Accepts connections and resets them at once."""


_RESETTING = (Fault.REFUSED, Fault.RESET_ON_ACCEPT)

Streams = Tuple[asyncio.StreamReader, asyncio.StreamWriter]


class FaultProxy:
    """A proxy to a port of this machine, with a thread of its own."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._fault = Fault.NOTHING
        self._delay = 0.0
        self._near: Set[asyncio.StreamWriter] = set()
        self._far: Set[asyncio.StreamWriter] = set()
        # All that there ever were.
        self._transports: List[Any] = []
        self._server: Optional[asyncio.AbstractServer] = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._changed = self._run(self._make_event())
        self.port = 0
        self._run(self._listen())

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def set(self, fault: Fault, delay: float = 0.0) -> None:
        """Replaces the current fault; ``delay`` seconds are added in each direction."""
        self._run(self._set(fault, delay))

    def close(self) -> None:
        self._run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _make_event(self) -> asyncio.Event:
        return asyncio.Event()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _set(self, fault: Fault, delay: float) -> None:
        self._fault, self._delay = fault, delay
        self._changed.set()
        self._changed = asyncio.Event()
        if fault in _RESETTING:
            self._reset_all()
        if fault is Fault.HALF_OPEN:
            for writer in list(self._far):
                writer.close()
        if fault is Fault.REFUSED and self._server is not None:
            await self._refuse(self._server)
            self._server = None
        elif fault is not Fault.REFUSED and self._server is None:
            await self._listen()

    async def _stop(self) -> None:
        if self._server is not None:
            await self._refuse(self._server)
        self._reset_all()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        # Those that were closed with data that nobody reads are open still. They close their sockets
        # in the next turn of the loop.
        for transport in self._transports:
            transport.abort()
        await _next_turns()

    async def _refuse(self, server: asyncio.AbstractServer) -> None:
        """Stops listening. What was accepted a moment ago first gets to its task, which closes it: a
        server that is closed in between, or a task that is cancelled before it has begun, leaves
        its socket open."""
        for listener in server.sockets:  # type: ignore[attr-defined]
            self._loop.remove_reader(listener.fileno())
        await _next_turns()
        server.close()

    def _reset_all(self) -> None:
        for writer in [*self._near, *self._far]:
            _reset(writer)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._transports.append(writer.transport)
        try:
            if self._fault in _RESETTING:
                _reset(writer)
            elif self._fault is Fault.HALF_OPEN:
                self._near.add(writer)
                await self._discard(reader)
            else:
                await self._proxy((reader, writer))
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._near.discard(writer)
            writer.close()

    async def _proxy(self, near: Streams) -> None:
        far = await asyncio.open_connection("127.0.0.1", self._target)
        self._transports.append(far[1].transport)
        self._near.add(near[1])
        self._far.add(far[1])
        copies = [
            asyncio.ensure_future(self._copy(near[0], far[1], False)),
            asyncio.ensure_future(self._copy(far[0], near[1], True)),
        ]
        try:
            await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for copy in copies:
                copy.cancel()
            await asyncio.gather(*copies, return_exceptions=True)
            self._far.discard(far[1])
            far[1].close()
        if self._fault is Fault.HALF_OPEN:
            await self._discard(near[0])

    async def _copy(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, replies: bool
    ) -> None:
        while True:
            data = await reader.read(1 << 14)
            if not data:
                return
            while replies and self._fault is Fault.NO_REPLIES:
                await self._changed.wait()
            if replies and self._fault is Fault.CUT_REPLIES:
                writer.write(data[: len(data) // 2])
                _reset(writer)
                return
            if self._fault is Fault.HALF_OPEN:
                continue
            if self._delay:
                self._loop.call_later(self._delay, writer.write, data)
            else:
                writer.write(data)

    async def _discard(self, reader: asyncio.StreamReader) -> None:
        while await reader.read(1 << 14):
            pass


async def _next_turns() -> None:
    """Lets the loop do what it is about to do."""
    for _ in range(10):
        await asyncio.sleep(0)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Has the other side see a reset."""
    connection = writer.get_extra_info("socket")
    if connection is not None and connection.fileno() >= 0:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
