"""The nodes of a client: which one is called next, and what must be done to keep them: names are
resolved again and again, and nodes that are not well are checked. Time is a parameter."""

from __future__ import annotations

import itertools
import random
import threading
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple, Union

from .._decide.log import LOG
from .._decide.metrics import METRICS
from ..errors import ClosedError, NoAnswer, NoDecisionError
from .address import Address, Socket
from .circuit import Circuit, Pass, Report, State

_RESOLVE_INTERVAL = 30.0
"""Seconds between two resolutions of a name."""

_RESOLVE_INTERVAL_IN_NEED = 2.0
"""The same while no node is called."""

_PUT_OFF = 1.0
"""Seconds after which a check is due again that could not be made."""


class Node:
    """One IP address of a node, with its circuit and its connection."""

    def __init__(self, address: Address, socket: Socket, now: float) -> None:
        self.address = address
        self.socket = socket
        self.circuit = Circuit()
        # A connection of the blocking or the asyncio client, and the version of its credentials.
        self.connection: Any = None
        self.credentials_version = -1
        self.check_at = now
        self.is_checked = False
        # Whether it is counted as called.
        self.counted = False

    def __str__(self) -> str:
        if self.address.host == self.socket.ip:
            return str(self.address)
        return f"{self.address} ({self.socket.ip})"


class Attempt(NamedTuple):
    """The permission for one call to a node."""

    node: Node
    given: Pass


class Resolve(NamedTuple):
    """A name has to be resolved; then :meth:`Pool.resolved` is told."""

    name: Name


class Check(NamedTuple):
    """A node has to be checked; then :meth:`Pool.checked` is told."""

    node: Node
    is_new: bool
    """On a new connection: the old one may be one whose server has vanished without closing it, or
    have older certificates."""


Task = Union[Resolve, Check]


class Name:
    """An address that the client was given, with its nodes."""

    def __init__(self, address: Address, jitter: float) -> None:
        self.address = address
        self.sockets: Sequence[Socket] = ()
        self.nodes: Dict[Socket, Node] = {}
        # Not all clients resolve at the same time.
        self._early = 0.75 + jitter / 4
        self._resolved_at: Optional[float] = None
        self.is_resolving = False

    @property
    def is_resolved(self) -> bool:
        """Whether it was resolved once, or could not be."""
        return self._resolved_at is not None

    @property
    def resolve_at(self) -> float:
        """When it has to be resolved again."""
        if self._resolved_at is None:
            return 0.0
        is_called = any(node.circuit.is_called for node in self.nodes.values())
        interval = _RESOLVE_INTERVAL if is_called else _RESOLVE_INTERVAL_IN_NEED
        return self._resolved_at + interval * self._early

    def resolved(self, sockets: Sequence[Socket], now: float) -> None:
        """Takes its addresses. While it can't be resolved, the last ones stay."""
        self._resolved_at, self.is_resolving = now, False
        self.sockets = sockets or self.sockets
        for socket in self.sockets:
            if socket not in self.nodes:
                self.nodes[socket] = Node(self.address, socket, now)

    def drop_old(self) -> None:
        """Nodes that the name has no more are called until one that it has can be."""
        has_new = any(self.nodes[socket].circuit.is_called for socket in self.sockets)
        self.nodes = {
            socket: node
            for socket, node in self.nodes.items()
            if socket in self.sockets or (not has_new and node.circuit.is_called)
        }


class Pool:
    """The nodes of a client. Its methods may be called from several threads."""

    def __init__(
        self,
        addresses: Sequence[Address],
        changed: Callable[[], None],
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """``changed`` is called when a node may have become one that is called, or has to be
        checked sooner. It must not block."""
        self._names = [Name(address, jitter()) for address in addresses]
        self._changed = changed
        self._jitter = jitter
        # A signal handler may ask for tokens while its thread holds the lock.
        self._lock = threading.RLock()
        self._turns = itertools.count(int(jitter() * 1024))
        self._closed = False
        self.nodes: Tuple[Node, ...] = ()
        self.changes = 0
        """The number of changes of the nodes so far."""

    # Calls

    def attempt(self, tried: Sequence[Node], now: float) -> Union[Attempt, int]:
        """The permission to call a node; one that was not ``tried``, if possible. While the first
        connections are made, the number of changes so far: one more may bring a node.

        Raises ``NoDecisionError`` if no node is called."""
        with self._lock:
            nodes = self.nodes
            if nodes:
                first = next(self._turns) % len(nodes)
                node = nodes[first]
                if not tried:
                    given = node.circuit.attempt(now)
                    if given is not None:
                        return Attempt(node, given)
                in_turn = nodes[first:] + nodes[:first]
                for node in sorted(in_turn, key=tried.__contains__):
                    given = node.circuit.attempt(now)
                    if given is not None:
                        return Attempt(node, given)
            if self._closed:
                raise ClosedError("the client is closed")
            if any(node.circuit.state is State.CONNECTING for node in nodes) or not all(
                name.is_resolved for name in self._names
            ):
                return self.changes
            is_quiet = any(node.circuit.is_quiet(now) for node in nodes)
            raise NoDecisionError(NoAnswer.OVERLOADED if is_quiet else NoAnswer.UNREACHABLE)

    def report(self, attempt: Attempt, report: Report, now: float) -> None:
        """Takes the result of a call."""
        node, given = attempt
        with self._lock:
            if not node.circuit.report(given, report, now):
                return
            # The pause begins anew.
            node.check_at = now + node.circuit.pause(self._jitter())
            self._has_changed(now)
        LOG.warning("calls to node %s fail: it is not called until it answers a check", node)

    # Upkeep

    def tasks(self, credentials_version: int, now: float) -> Tuple[List[Task], float]:
        """What has to be done now, and how many seconds later to ask again at the latest."""
        with self._lock:
            tasks: List[Task] = []
            next_at = now + _RESOLVE_INTERVAL
            if self._closed:
                return tasks, next_at
            for name in self._names:
                if not name.is_resolving:
                    if name.resolve_at <= now:
                        name.is_resolving = True
                        tasks.append(Resolve(name))
                    else:
                        next_at = min(next_at, name.resolve_at)
            for node in self.nodes:
                if node.is_checked:
                    continue
                if node.check_at <= now:
                    self._check(node, credentials_version, tasks, now)
                if not node.is_checked:
                    next_at = min(next_at, node.check_at)
            return tasks, next_at - now

    def _check(self, node: Node, version: int, tasks: List[Task], now: float) -> None:
        is_new = not node.circuit.is_called or node.credentials_version != version
        if is_new or not node.circuit.needs_no_check():
            node.is_checked = True
            tasks.append(Check(node, is_new))
        else:
            node.check_at = now + node.circuit.pause(self._jitter())

    def resolved(self, name: Name, sockets: Sequence[Socket], now: float) -> None:
        """Takes the addresses of a name; none if they can't be found out."""
        with self._lock:
            name.resolved(sockets, now)
            self._has_changed(now)

    def checked(
        self, check: Check, connection: Any, version: int, problem: Optional[str], now: float
    ) -> None:
        """Takes the result of a check on a connection with this version of the credentials."""
        node, is_new = check
        circuit = node.circuit
        with self._lock:
            before = circuit.state
            node.is_checked = False
            # Connected with older certificates, which still serve.
            is_kept = is_new and circuit.is_called and problem is not None
            if not is_kept:
                circuit.checked(problem is None)
                if problem is None:
                    node.connection, node.credentials_version = connection, version
            node.check_at = now + circuit.pause(self._jitter())
            self._has_changed(now)
            after = circuit.state
        if is_kept:
            LOG.error("node %s refuses the new certificates: %s", node, problem)
        if after is State.DOWN and before is not State.DOWN:
            LOG.warning("node %s is not called until it answers a check: %s", node, problem)
        elif before is State.DOWN and after is not State.DOWN:
            LOG.info("node %s answers again", node)

    def put_off(self, task: Task, now: float) -> None:
        """Takes that a task could not be done: it is due again after a while."""
        with self._lock:
            if isinstance(task, Resolve):
                task.name.resolved((), now)
            else:
                task.node.is_checked = False
                task.node.check_at = now + _PUT_OFF
            self._has_changed(now)

    def close(self) -> None:
        """Calls no node any more."""
        with self._lock:
            self._closed = True
            self._names = []
            self._has_changed(0.0)

    def _has_changed(self, now: float) -> None:
        for name in self._names:
            name.drop_old()
        kept: Set[Node] = {node for name in self._names for node in name.nodes.values()}
        for node in kept.union(self.nodes):
            is_called = node in kept and node.circuit.is_called
            if METRICS is not None:
                METRICS.nodes((node in kept) - (node in self.nodes), is_called - node.counted)
            node.counted = is_called
        known = [node for node in self.nodes if node in kept]
        self.nodes = (*known, *(node for node in kept if node not in known))
        self.changes += 1
        self._changed()
