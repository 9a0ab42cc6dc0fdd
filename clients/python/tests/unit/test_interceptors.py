"""The gRPC interceptors and the ASGI middleware, with a fake."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import Any, Dict, List, Tuple

import grpc
import grpc.aio
import pytest

from tollgate_client import Client, Fake, FakeAnswer, FakeTime, asgi
from tollgate_client._nodes.failures import _retry_delay
from tollgate_client._proto.health_pb2 import HealthCheckRequest, HealthCheckResponse
from tollgate_client._proto.health_pb2_grpc import HealthStub
from tollgate_client.asgi import QuotaMiddleware
from tollgate_client.interceptor import QuotaInterceptor, aio_interceptors

KINDS = ["unary_unary", "unary_stream", "stream_unary", "stream_stream"]

CHECK = "/grpc.health.v1.Health/Check"


@pytest.fixture
def fake() -> Fake:
    fake = Fake(fake_time=FakeTime())
    fake.answer("refused", CHECK, FakeAnswer.refuse(2.5))
    fake.answer("late", CHECK, FakeAnswer.grant_after(4.0))
    fake.answer("away", CHECK, FakeAnswer.NO_NODE)
    return fake


def serving(node: Any) -> str:
    return f"ipv4:{node.grpc}"


def test_a_call_of_a_blocking_channel_takes_tokens_first(fake, start):
    def check(namespace: str, timeout: "float | None" = None, **options: Any) -> Any:
        quota = QuotaInterceptor(fake.client(), lambda method: (namespace, method), **options)
        with grpc.insecure_channel(serving(node)) as channel:
            stub = HealthStub(grpc.intercept_channel(channel, quota))
            return stub.Check(HealthCheckRequest(), timeout=timeout).status

    node = start()
    assert check("granted") == HealthCheckResponse.SERVING
    assert fake.asked("granted", CHECK) == [1]
    with pytest.raises(grpc.RpcError) as error:
        check("refused")
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error.value.details() == "refused: the limit is reached"
    assert _retry_delay(error.value) == 2.5
    with pytest.raises(grpc.RpcError) as error:
        check("away")
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    # A call that may wait.
    assert check("late", max_wait=None) == HealthCheckResponse.SERVING
    assert fake.now() == 4
    assert check("late", max_wait=5.0, timeout=20.0) == HealthCheckResponse.SERVING
    with pytest.raises(grpc.RpcError):
        check("late", max_wait=5.0, timeout=3.0)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_call_of_a_blocking_channel(fake, kind):
    quota = QuotaInterceptor(fake.client(), lambda method: ("refused", method))
    with grpc.insecure_channel("ipv4:127.0.0.1:9") as channel:
        call = getattr(grpc.intercept_channel(channel, quota), kind)(CHECK)
        with pytest.raises(grpc.RpcError) as error:
            list(call(b"" if kind.startswith("unary") else iter([b""])))
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        # Methods without a bucket take no tokens.
        free = QuotaInterceptor(fake.client(), lambda method: None)
        call = getattr(grpc.intercept_channel(channel, free), kind)(CHECK)
        with pytest.raises(grpc.RpcError) as error:
            list(call(b"" if kind.startswith("unary") else iter([b""])))
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_call_of_an_asyncio_channel_takes_tokens_first(fake, start):
    node = start()

    async def check(namespace: str, **options: Any) -> Any:
        quota = aio_interceptors(fake.aio_client(), lambda method: (namespace, method), **options)
        async with grpc.aio.insecure_channel(serving(node), interceptors=quota) as channel:
            answer = await HealthStub(channel).Check(HealthCheckRequest(), timeout=20.0)
            return answer.status

    assert asyncio.run(check("granted")) == HealthCheckResponse.SERVING
    assert fake.asked("granted", CHECK) == [1]
    with pytest.raises(grpc.aio.AioRpcError) as error:
        asyncio.run(check("refused"))
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert _retry_delay(error.value) == 2.5
    assert asyncio.run(check("late", max_wait=None)) == HealthCheckResponse.SERVING
    assert fake.now() == 4


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_call_of_an_asyncio_channel(fake, kind):
    async def call() -> None:
        quota = aio_interceptors(fake.aio_client(), lambda method: ("refused", method))
        async with grpc.aio.insecure_channel("127.0.0.1:9", interceptors=quota) as channel:
            asked = b"" if kind.startswith("unary") else iter([b""])
            answer = getattr(channel, kind)(CHECK)(asked)
            if kind.endswith("unary"):
                await answer
            else:
                async for _ in answer:
                    pass

    with pytest.raises(grpc.aio.AioRpcError) as error:
        asyncio.run(call())
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


class PassThrough(grpc.UnaryUnaryClientInterceptor):
    """What others put around it, such as a tracer."""

    def __init__(self) -> None:
        self.codes: List[Any] = []

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        call = continuation(details, request)
        self.codes.append(call.code())
        return call


def test_a_refusal_is_a_call_that_has_failed(fake):
    quota = QuotaInterceptor(fake.client(), lambda method: ("refused", method))
    outer = PassThrough()
    with grpc.insecure_channel("ipv4:127.0.0.1:9") as plain:
        stub = HealthStub(grpc.intercept_channel(plain, outer, quota))
        with pytest.raises(grpc.RpcError) as error:
            stub.Check(HealthCheckRequest())
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert outer.codes == [grpc.StatusCode.RESOURCE_EXHAUSTED]
        call = stub.Check.future(HealthCheckRequest())
        assert call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert _retry_delay(call.exception()) == 2.5
        stream = grpc.intercept_channel(plain, quota).unary_stream(CHECK)(b"")
        assert stream.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        with pytest.raises(grpc.RpcError):
            next(stream)


def test_a_name_that_is_none_and_a_closed_client_are_errors_of_grpc_and_http(fake):
    def check(client: Any, name: str) -> Any:
        quota = QuotaInterceptor(client, lambda method: ("a", name))
        with grpc.insecure_channel("ipv4:127.0.0.1:9") as channel:
            stub = HealthStub(grpc.intercept_channel(channel, quota))
            with pytest.raises(grpc.RpcError) as error:
                stub.Check(HealthCheckRequest())
            return error.value.code()

    fake.answer("a", "wrong", FakeAnswer.INVALID)
    assert check(fake.client(), "wrong") is grpc.StatusCode.INVALID_ARGUMENT
    closed = fake.client()
    closed.close()
    assert check(closed, "b") is grpc.StatusCode.UNAVAILABLE
    app = QuotaMiddleware(application, fake.aio_client(), lambda scope: ("a", "wrong"))
    assert get(app, "/")[0] == 400


def test_a_call_waits_no_longer_than_its_timeout():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = "%s:%s" % silent.getsockname()
        with Client(address, deadline=20.0) as client:
            quota = QuotaInterceptor(client, lambda method: ("a", "b"))
            with grpc.insecure_channel(f"ipv4:{address}") as channel:
                stub = HealthStub(grpc.intercept_channel(channel, quota))
                begin = time.monotonic()
                with pytest.raises(grpc.RpcError) as error:
                    stub.Check(HealthCheckRequest(), timeout=0.2)
                assert error.value.code() is grpc.StatusCode.UNAVAILABLE
                assert time.monotonic() - begin < 10.0


async def application(scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"served"})


def get(app: asgi.App, path: str, kind: str = "http") -> Tuple[int, Dict[bytes, bytes], bytes]:
    sent: List[asgi.Message] = []

    async def run() -> None:
        async def receive() -> asgi.Message:
            return {"type": "http.request"}

        async def send(message: asgi.Message) -> None:
            sent.append(message)

        await app({"type": kind, "path": path}, receive, send)

    asyncio.run(run())
    return sent[0]["status"], dict(sent[0]["headers"]), sent[1]["body"]


def test_http_requests_take_tokens_first():
    fake = Fake(fake_time=FakeTime())
    fake.answer("web", "/refused", FakeAnswer.refuse(1.2))
    fake.answer("web", "/never", FakeAnswer.refuse())
    fake.answer("web", "/away", FakeAnswer.NO_NODE)

    def bucket_of(scope: asgi.Scope) -> "tuple[str, str] | None":
        return None if scope["path"] == "/free" else ("web", scope["path"])

    app = QuotaMiddleware(application, fake.aio_client(), bucket_of)
    assert get(app, "/")[::2] == (200, b"served")
    assert get(app, "/free")[0] == 200 and fake.asked("web", "/free") == []
    status, headers, body = get(app, "/refused")
    assert (status, headers[b"retry-after"]) == (429, b"2")
    assert body == b"refused: the limit is reached"
    assert int(headers[b"content-length"]) == len(body)
    status, headers, _ = get(app, "/never")
    assert status == 429 and b"retry-after" not in headers
    assert get(app, "/away")[0] == 503
    assert get(app, "/refused", kind="websocket")[0] == 200
