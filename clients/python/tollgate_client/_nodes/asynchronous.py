"""The nodes of an asyncio client: tasks of its event loop keep them."""

from __future__ import annotations

import asyncio
import os
import time
from functools import partial
from typing import Any, Awaitable, ClassVar, List, Optional, Set, Union

import grpc
import grpc.aio

from .._decide.decider import Decider, Rules
from .._decide.effects import Call, Change, Dial, Effect, MethodCall, Sleep
from .._decide.log import LOG
from .._decide.settings import Servers
from .._proto.health_pb2 import HealthCheckRequest
from .._tenants.decider import TenantDecider
from .address import RESOLVER_ARGUMENTS, Address, Socket, literal, sockets, target
from .asking import Nodes, NodesEngine
from .capacity import CapacityNodes
from .channel import methods, new_channel, options
from .failures import CHECK_TIMEOUT, check_problem
from .pool import Check, Name, Node, Pool, Resolve, Task
from .tenants import TenantNodes


class _Connection:
    """A connection to one node. It is closed when nothing refers to it any more."""

    allow: Any
    check: Any

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        vars(self).update(methods(channel))


class _ConnectionAfterFork:
    """The same in a process whose parent has used ``grpc.aio``, which does not work then any more:
    on a channel of gRPC's own threads."""

    allow: Any
    check: Any

    def __init__(self, channel: grpc.Channel) -> None:
        for name, method in methods(channel).items():
            setattr(self, name, partial(_call, method))


async def _call(method: Any, message: Any, **options: Any) -> Any:
    """Makes a call in another thread, and waits for its end."""
    call = method.future(message, **options)
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def end(_: Any) -> None:
        try:
            loop.call_soon_threadsafe(ended.set)
        except RuntimeError:  # The loop is closed: nobody waits.
            pass

    call.add_done_callback(end)
    try:
        await ended.wait()
    except asyncio.CancelledError:
        call.cancel()
        raise
    return call.result()


async def _answer(call: Awaitable[Any]) -> Any:
    """The answer of a call, or its ``grpc.RpcError``."""
    try:
        answer = await call
    except grpc.RpcError as error:
        return error
    if answer is None:
        # What gRPC returns for an answer that it can't read.
        nothing = grpc.aio.Metadata()
        code = grpc.StatusCode.INTERNAL
        return grpc.aio.AioRpcError(code, nothing, nothing, "the answer can't be read")
    return answer


class AsyncNodes(NodesEngine):
    """The nodes of one client in one event loop, until :meth:`stop`."""

    _first_process: ClassVar[Optional[int]] = None
    """The first process that has used ``grpc.aio``."""

    def __init__(self, rules: Rules, servers: Servers) -> None:
        super().__init__()
        self.loop = asyncio.get_running_loop()
        self._servers = servers
        self._pool = Pool(servers.addresses, self._changed)
        self._waiters: List[asyncio.Future[None]] = []
        self._timer: Optional[asyncio.Handle] = None
        self._tasks: Set[asyncio.Task[None]] = set()
        self._is_stopped = False
        if AsyncNodes._first_process is None:
            AsyncNodes._first_process = os.getpid()
        self._is_after_fork = AsyncNodes._first_process != os.getpid()
        nodes = Nodes(self._pool, time.monotonic)
        self.decider = Decider(rules, nodes, time.monotonic)
        self.tenants = TenantDecider(rules, TenantNodes(nodes), time.monotonic)
        self.lessor = CapacityNodes(nodes, time.monotonic)
        self._keep()

    async def perform(self, effect: Effect) -> Any:
        """Performs an effect of the decider's plans."""
        if type(effect) is Call:
            # Keeps the connection open until the call has ended.
            connection = effect.node.connection
            metadata = self._servers.credentials.metadata(time.monotonic())
            return await _answer(
                connection.allow(effect.message, timeout=effect.seconds, metadata=metadata)
            )
        if type(effect) is MethodCall:
            metadata = self._servers.credentials.metadata(time.monotonic())
            call = getattr(effect.connection, effect.method)
            return await _answer(
                call(effect.message, timeout=effect.seconds, metadata=metadata)
            )
        if type(effect) is Dial:
            return self._connect(effect.address, target(effect.address))
        if type(effect) is Change:
            if self._pool.changes == effect.number:
                waiter = self.loop.create_future()
                self._waiters.append(waiter)
                try:
                    await asyncio.wait([waiter], timeout=effect.seconds)
                finally:
                    if waiter in self._waiters:
                        self._waiters.remove(waiter)
        else:
            assert type(effect) is Sleep
            await asyncio.sleep(effect.seconds)
        return None

    def stop(self) -> None:
        """Ends the tasks, and closes the connections that are not in use."""
        self._is_stopped = True
        if self.loop.is_closed():
            # Nobody waits any more, and nobody can be told.
            self._waiters = []
        self._pool.close()
        if self._timer is not None:
            self._timer.cancel()
        if not self.loop.is_closed():
            for task in self._tasks:
                task.cancel()

    def close(self) -> None:
        """The client was closed. Keepers use it until they have released everything, if their event
        loop is this one."""
        if self.loop is asyncio.get_running_loop():
            super().close()
        else:
            self.stop()

    def abandon(self) -> None:
        """The same without a lock while the loop runs, as the garbage collector may be in code that
        holds one."""
        if self.loop.is_closed():
            self.stop()
        else:
            self.loop.call_soon_threadsafe(self.stop)

    def _changed(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._keep_after(0.0)

    def _keep_after(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self._is_stopped:
            self._timer = self.loop.call_later(seconds, self._keep)

    def _keep(self) -> None:
        """Does what has to be done for the nodes."""
        credentials = self._servers.credentials
        now = time.monotonic()
        credentials.refresh(now)
        tasks, pause = self._pool.tasks(credentials.version, now)
        self._keep_after(pause)
        for task in tasks:
            found = literal(task.name.address) if isinstance(task, Resolve) else None
            if isinstance(task, Resolve) and found is not None:
                self._pool.resolved(task.name, [found], now)
            else:
                running = self.loop.create_task(self._do(task))
                self._tasks.add(running)
                running.add_done_callback(partial(self._task_has_ended, task))

    async def _do(self, task: Task) -> None:
        if isinstance(task, Resolve):
            await self._look_up(task.name)
        else:
            await self._check(task)

    def _task_has_ended(self, task: Task, running: asyncio.Task[None]) -> None:
        self._tasks.discard(running)
        error = None if running.cancelled() else running.exception()
        if error is not None:
            LOG.error("a check of the nodes has failed", exc_info=error)
        if running.cancelled() or error is not None:
            # The application has cancelled all tasks, perhaps before they began, or there is too
            # little memory.
            self._pool.put_off(task, time.monotonic())

    async def _look_up(self, name: Name) -> None:
        found: List[Socket] = []
        try:
            host, port, _ = name.address
            found = sockets(await self.loop.getaddrinfo(host, port, **RESOLVER_ARGUMENTS))
        except (OSError, UnicodeError) as error:
            LOG.warning("the name of node %s can't be resolved: %s", name.address, error)
        self._pool.resolved(name, found, time.monotonic())

    async def _check(self, check: Check) -> None:
        credentials = self._servers.credentials
        version, now = credentials.version, time.monotonic()
        connection = self._connect_to(check.node) if check.is_new else check.node.connection
        answer = await _answer(
            connection.check(
                HealthCheckRequest(), timeout=CHECK_TIMEOUT, metadata=credentials.metadata(now)
            )
        )
        problem = check_problem(answer)
        self._pool.checked(check, connection, version, problem, time.monotonic())

    def _connect_to(self, node: Node) -> Union[_Connection, _ConnectionAfterFork]:
        return self._connect(node.address, node.socket.target)

    def _connect(
        self, address: Address, place: str
    ) -> Union[_Connection, _ConnectionAfterFork]:
        credentials = self._servers.credentials.channel_credentials()
        arguments = options(address, self._servers.server_name, credentials is not None)
        if self._is_after_fork:
            return _ConnectionAfterFork(new_channel(place, credentials, arguments))
        if credentials is None:
            return _Connection(grpc.aio.insecure_channel(place, arguments))
        return _Connection(grpc.aio.secure_channel(place, credentials, arguments))
