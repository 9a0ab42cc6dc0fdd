"""What a decision needs done. A plan is a generator that yields effects; the blocking and the
asyncio client perform them, each in its way, and send back the results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Awaitable, Callable, Generator, TypeVar, Union

if TYPE_CHECKING:
    from .._nodes.address import Address
    from .._nodes.pool import Node
    from .._proto.quotaservice_pb2 import AllowRequest

T = TypeVar("T")


class Call:
    """A call to a node. The result is its answer, or the ``grpc.RpcError``."""

    __slots__ = ("node", "message", "seconds")

    def __init__(self, node: Node, message: AllowRequest, seconds: float) -> None:
        self.node = node
        self.message = message
        self.seconds = seconds


class MethodCall:
    """A call of a method on a connection. The result is its answer, or the ``grpc.RpcError``."""

    __slots__ = ("connection", "method", "message", "seconds")

    def __init__(self, connection: Any, method: str, message: Any, seconds: float) -> None:
        self.connection = connection
        self.method = method
        self.message = message
        self.seconds = seconds


class Dial:
    """A new connection. The result is that."""

    __slots__ = ("address",)

    def __init__(self, address: Address) -> None:
        self.address = address


class Change:
    """The wait for a change of the nodes after that of this number, for some seconds at most."""

    __slots__ = ("number", "seconds")

    def __init__(self, number: int, seconds: float) -> None:
        self.number = number
        self.seconds = seconds


class Sleep:
    """A pause."""

    __slots__ = ("seconds",)

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds


Effect = Union[Call, MethodCall, Dial, Change, Sleep]
Plan = Generator[Any, Any, T]
"""Yields effects, here or of leases."""


def run(plan: Plan[T], perform: Callable[[Effect], Any]) -> T:
    """Performs the effects of a plan, one after the other, and returns its result."""
    try:
        effect = next(plan)
        while True:
            effect = plan.send(perform(effect))
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        plan.close()


async def run_async(plan: Plan[T], perform: Callable[[Effect], Awaitable[Any]]) -> T:
    """The same with a coroutine."""
    try:
        effect = next(plan)
        while True:
            effect = plan.send(await perform(effect))
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        plan.close()
