"""The nodes of a blocking client: a thread keeps them, and callers wait for their answers."""

from __future__ import annotations

import queue
import socket
import threading
import time
from typing import Any, List, Optional

import grpc

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

_LONGEST_SLEEP = 24 * 60 * 60.0
"""Seconds; more than the system can sleep is an error."""

_STOP_TIMEOUT = 1.0
"""Seconds to wait for the end of the thread."""


class _Connection:
    """A connection to one node. It is closed when nothing refers to it any more."""

    allow: Any
    check: Any

    def __init__(self, channel: grpc.Channel) -> None:
        vars(self).update(methods(channel))


class BlockingNodes(NodesEngine):
    """The nodes of one client, until :meth:`stop`."""

    def __init__(self, rules: Rules, servers: Servers) -> None:
        super().__init__()
        self._servers = servers
        self._pool = Pool(servers.addresses, self._changed)
        self._change = threading.Condition()
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._is_stopped = False
        nodes = Nodes(self._pool, time.monotonic)
        self.decider = Decider(rules, nodes, time.monotonic)
        self.tenants = TenantDecider(rules, TenantNodes(nodes), time.monotonic)
        self.lessor = CapacityNodes(nodes, time.monotonic)
        self._thread = threading.Thread(target=self._keep, name="tollgate-client", daemon=True)
        self._thread.start()

    def perform(self, effect: Effect) -> Any:
        """Performs an effect of the decider's plans."""
        if type(effect) is Call:
            metadata = self._servers.credentials.metadata(time.monotonic())
            try:
                return effect.node.connection.allow(
                    effect.message, timeout=effect.seconds, metadata=metadata
                )
            except grpc.RpcError as error:
                return error
        if type(effect) is MethodCall:
            metadata = self._servers.credentials.metadata(time.monotonic())
            call = getattr(effect.connection, effect.method)
            try:
                return call(effect.message, timeout=effect.seconds, metadata=metadata)
            except grpc.RpcError as error:
                return error
        if type(effect) is Dial:
            return self._connect(effect.address, target(effect.address))
        if type(effect) is Change:
            with self._change:
                self._change.wait_for(lambda: self._pool.changes != effect.number, effect.seconds)
        else:
            assert type(effect) is Sleep
            time.sleep(min(effect.seconds, _LONGEST_SLEEP))
        return None

    def stop(self) -> None:
        """Ends the thread, and closes the connections that are not in use."""
        self.abandon()
        self._thread.join(_STOP_TIMEOUT)

    def abandon(self) -> None:
        """The same without a wait or a lock, as the garbage collector may be in a thread that holds
        one."""
        self._is_stopped = True
        self._wakes.put(None)

    def _changed(self) -> None:
        self._wakes.put(None)
        with self._change:
            self._change.notify_all()

    def _keep(self) -> None:
        """Does what has to be done for the nodes."""
        credentials = self._servers.credentials
        while not self._is_stopped:
            now = time.monotonic()
            credentials.refresh(now)
            tasks, pause = self._pool.tasks(credentials.version, now)
            for task in tasks:
                try:
                    self._begin(task)
                except Exception:  # There may be too many threads, or too little memory.
                    LOG.exception("a node can't be checked or resolved now")
                    self._pool.put_off(task, now)
            try:
                self._wakes.get(timeout=pause)
            except queue.Empty:
                pass
        self._pool.close()

    def _begin(self, task: Task) -> None:
        if isinstance(task, Resolve):
            self._resolve(task.name)
        else:
            self._check(task)

    def _resolve(self, name: Name) -> None:
        found = literal(name.address)
        if found is not None:
            self._pool.resolved(name, [found], time.monotonic())
        else:
            # The resolver may block for long, and must not delay the checks.
            threading.Thread(target=self._look_up, args=(name,), daemon=True).start()

    def _look_up(self, name: Name) -> None:
        found: List[Socket] = []
        try:
            host, port, _ = name.address
            found = sockets(socket.getaddrinfo(host, port, **RESOLVER_ARGUMENTS))
        except (OSError, UnicodeError) as error:
            LOG.warning("the name of node %s can't be resolved: %s", name.address, error)
        self._pool.resolved(name, found, time.monotonic())

    def _check(self, check: Check) -> None:
        credentials = self._servers.credentials
        version, now = credentials.version, time.monotonic()
        connection = self._connect_to(check.node) if check.is_new else check.node.connection

        def checked(call: Any) -> None:
            try:
                error: Optional[grpc.RpcError] = call.exception()
                problem = check_problem(call.result() if error is None else error)
                self._pool.checked(check, connection, version, problem, time.monotonic())
            except Exception:  # Nobody else would ever know.
                LOG.exception("a node can't be checked now")
                self._pool.put_off(check, time.monotonic())

        call = connection.check.future(
            HealthCheckRequest(), timeout=CHECK_TIMEOUT, metadata=credentials.metadata(now)
        )
        call.add_done_callback(checked)

    def _connect_to(self, node: Node) -> _Connection:
        return self._connect(node.address, node.socket.target)

    def _connect(self, address: Address, place: str) -> _Connection:
        credentials = self._servers.credentials.channel_credentials()
        arguments = options(address, self._servers.server_name, credentials is not None)
        return _Connection(new_channel(place, credentials, arguments))
