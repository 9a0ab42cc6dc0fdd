"""How the server that keeps the leases is found."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Union

import grpc
import pytest

from tollgate_client import InvalidRequestError, NoAnswer, NoDecisionError
from tollgate_client._decide.effects import Dial, MethodCall, run
from tollgate_client._nodes.address import parse, target
from tollgate_client._nodes.capacity import CapacityNodes
from tollgate_client._proto.doorman_pb2 import GetCapacityRequest, GetCapacityResponse


class Error(grpc.RpcError):  # type: ignore[misc]
    def __init__(self, code: str) -> None:
        self._code = grpc.StatusCode[code]

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return "details"

    def trailing_metadata(self) -> tuple:
        return ()


class Servers:
    """Servers by address, each of which answers, fails, or names a master. ``node`` is a node."""

    def __init__(self, **answers: Union[str, Error, None]) -> None:
        self.answers: Dict[str, Union[str, Error, None]] = answers
        self.called: List[str] = []
        self._lessor = CapacityNodes(self, lambda: 0.0)  # type: ignore[arg-type]

    def call(self, effect: Any, deadline: float) -> Any:
        """Calls a node, as ``Nodes`` does."""
        node = type("Node", (), {"connection": "node"})
        answer = yield effect(node, deadline)
        if isinstance(answer, Error):
            raise NoDecisionError(NoAnswer.UNREACHABLE)
        return answer

    def get(self) -> None:
        self.called = []
        run(self._lessor.get_capacity(GetCapacityRequest(), 2.0), self._perform)

    def _perform(self, effect: Any) -> Any:
        if isinstance(effect, Dial):
            return effect.address.host
        assert isinstance(effect, MethodCall) and effect.method == "get_capacity"
        self.called.append(effect.connection)
        answer: Optional[Any] = self.answers[effect.connection]
        if isinstance(answer, Error):
            return answer
        response = GetCapacityResponse()
        if answer is not None:
            response.mastership.master_address = answer
        return response


def test_the_master_is_called_until_it_moves():
    servers = Servers(node="a:1", a=None, b=None)
    servers.get()
    assert servers.called == ["node", "a"]
    servers.get()
    assert servers.called == ["a"]
    servers.answers["a"] = "b:1"
    servers.get()
    assert servers.called == ["a", "b"]
    servers.get()
    assert servers.called == ["b"]


def test_three_hops_are_enough():
    servers = Servers(node="a:1", a="b:1", b="c:1", c=None)
    servers.get()
    assert servers.called == ["node", "a", "b", "c"]
    servers = Servers(node="a:1", a="b:1", b="a:1")
    with pytest.raises(NoDecisionError, match="name each other as the master"):
        servers.get()
    assert servers.called == ["node", "a", "b", "a"]


@pytest.mark.parametrize("master, text", [("", "no master at present"), ("a b", "not a valid")])
def test_a_server_without_a_master(master, text):
    servers = Servers(node="a:1", a=master)
    with pytest.raises(NoDecisionError, match=text):
        servers.get()
    # The next call begins with the nodes.
    servers.answers["node"] = None
    servers.get()
    assert servers.called == ["node"]


@pytest.mark.parametrize("code", ["UNAVAILABLE", "DEADLINE_EXCEEDED", "INTERNAL"])
def test_a_master_that_does_not_answer_is_forgotten(code):
    servers = Servers(node="a:1", a=None)
    servers.get()
    servers.answers.update(a=Error(code), node=None)
    servers.get()
    assert servers.called == ["a", "node"]
    servers.get()
    assert servers.called == ["node"]


def test_a_master_that_refuses_is_not_forgotten():
    servers = Servers(node="a:1", a=None)
    servers.get()
    servers.answers["a"] = Error("PERMISSION_DENIED")
    with pytest.raises(NoDecisionError) as error:
        servers.get()
    assert error.value.reason is NoAnswer.FORBIDDEN
    servers.answers["a"] = Error("INVALID_ARGUMENT")
    with pytest.raises(InvalidRequestError):
        servers.get()
    assert servers.called == ["a"]


def test_targets():
    assert target(parse("127.0.0.1:1")) == "ipv4:127.0.0.1:1"
    assert target(parse("[::1]:1")) == "ipv6:[::1]:1"
    assert target(parse("tollgate.internal:1")) == "dns:///tollgate.internal:1"
