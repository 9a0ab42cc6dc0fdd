"""The interceptors for gRPC servers, with a fake."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Dict, Iterator, List, Optional

import grpc
import grpc.aio
import pytest

from tollgate_client import Fake, FakeAnswer, FakeTime
from tollgate_client._nodes.failures import _retry_delay
from tollgate_client.server_interceptor import AioServerInterceptor, ServerInterceptor

from ..harness.waiting import eventually

KINDS = ["unary_unary", "unary_stream", "stream_unary", "stream_stream"]

LISTEN = "127.0.0.1:0"


def bucket_of(method: str, context: Any) -> "tuple[str, str] | None":
    """By the metadata, as most servers want it."""
    bucket = dict(context.invocation_metadata()).get("bucket")
    return None if bucket is None else (method, bucket)


class Service:
    """Each kind of handler, as functions, coroutines and asynchronous generators."""

    def __init__(self) -> None:
        self.handled: List[str] = []

    def handlers(self, behaviors: str) -> Any:
        handlers: Dict[str, Any] = {}
        for kind in KINDS:
            make = getattr(grpc, f"{kind}_rpc_method_handler")
            is_stream = kind.endswith("stream")
            if behaviors == "written" and not is_stream:
                behavior = self.coroutine
            else:
                behavior = getattr(self, behaviors + ("_stream" if is_stream else ""))
            handlers[kind] = make(behavior)
        return grpc.method_handlers_generic_handler("test.Service", handlers)

    def _handles(self, context: Any) -> None:
        self.handled.append(dict(context.invocation_metadata()).get("bucket", "none"))

    def function(self, request: Any, context: Any) -> bytes:
        self._handles(context)
        return b"done"

    def function_stream(self, request: Any, context: Any) -> Iterator[bytes]:
        self._handles(context)
        yield b"do"
        yield b"ne"

    async def coroutine(self, request: Any, context: Any) -> bytes:
        self._handles(context)
        return b"done"

    async def coroutine_stream(self, request: Any, context: Any) -> Any:
        self._handles(context)
        yield b"do"
        yield b"ne"

    async def written_stream(self, request: Any, context: Any) -> None:
        self._handles(context)
        await context.write(b"do")
        await context.write(b"ne")


@contextlib.contextmanager
def served(fake: Fake, service: Service, behaviors: str, **options: Any) -> Iterator[str]:
    """A server with an interceptor; its address."""
    if behaviors == "blocking":
        quota = ServerInterceptor(fake.client(), bucket_of, **options)
        server = grpc.server(ThreadPoolExecutor(2), interceptors=[quota])
        server.add_generic_rpc_handlers((service.handlers("function"),))
        port = server.add_insecure_port(LISTEN)
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(None).wait()
        return
    loop, ports, stop = asyncio.new_event_loop(), [], asyncio.Event()

    async def serve() -> None:
        quota = AioServerInterceptor(fake.aio_client(), bucket_of, **options)
        server = grpc.aio.server(ThreadPoolExecutor(2), interceptors=[quota])
        server.add_generic_rpc_handlers((service.handlers(behaviors),))
        ports.append(server.add_insecure_port(LISTEN))
        await server.start()
        await stop.wait()
        await server.stop(None)

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        eventually("it is served", lambda: ports)
        yield f"127.0.0.1:{ports[0]}"
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


def call(
    address: str, kind: str, bucket: Optional[str], timeout: Optional[float] = 60.0
) -> bytes:
    """One call; its whole answer."""
    metadata = () if bucket is None else (("bucket", bucket),)
    with grpc.insecure_channel(f"ipv4:{address}") as channel:
        asked = b"" if kind.startswith("unary") else iter([b"", b""])
        method = getattr(channel, kind)(f"/test.Service/{kind}")
        answer = method(asked, timeout=timeout, metadata=metadata)
        return b"".join(answer) if kind.endswith("stream") else answer


def failure(ask: Callable[[], Any]) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as error:
        ask()
    return error.value


@pytest.fixture(params=["blocking", "function", "coroutine", "written"])
def behaviors(request: pytest.FixtureRequest) -> str:
    behaviors: str = request.param
    return behaviors


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_call_takes_tokens_before_it_is_handled(behaviors, kind):
    fake, service, method = Fake(fake_time=FakeTime()), Service(), f"/test.Service/{kind}"
    fake.answer(method, "refused", FakeAnswer.refuse(2.5))
    fake.answer(method, "never", FakeAnswer.refuse())
    fake.answer(method, "late", FakeAnswer.grant_after(4.0))
    fake.answer(method, "away", FakeAnswer.NO_NODE)
    fake.answer(method, "wrong", FakeAnswer.INVALID)
    with served(fake, service, behaviors) as address:
        assert call(address, kind, "granted") == call(address, kind, None) == b"done"
        assert fake.asked(method, "granted") == [1]
        error = failure(lambda: call(address, kind, "refused"))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error.details() == "refused: the limit is reached"
        assert _retry_delay(error) == 2.5
        error = failure(lambda: call(address, kind, "never"))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert not error.trailing_metadata()
        error = failure(lambda: call(address, kind, "late"))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        error = failure(lambda: call(address, kind, "away"))
        assert (error.code(), error.details()) == (grpc.StatusCode.UNAVAILABLE, "no decision")
        error = failure(lambda: call(address, kind, "wrong"))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert service.handled == ["granted", "none"]
        with grpc.insecure_channel(f"ipv4:{address}") as channel:
            error = failure(lambda: channel.unary_unary("/test.Service/Other")(b""))
            assert error.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_call_of_a_server_waits_no_longer_than_its_timeout(behaviors):
    fake, service, kind = Fake(fake_time=FakeTime()), Service(), "unary_unary"
    fake.answer("/test.Service/unary_unary", "late", FakeAnswer.grant_after(40.0))
    with served(fake, service, behaviors, max_wait=None) as address:
        assert call(address, kind, "late") == b"done"
        assert fake.now() == 40
        error = failure(lambda: call(address, kind, "late", timeout=30.0))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert service.handled == ["late"]


def test_without_a_timeout_a_call_waits_as_long_as_the_bucket_has_callers_wait(behaviors):
    fake, service, kind = Fake(fake_time=FakeTime()), Service(), "unary_unary"
    fake.answer("/test.Service/unary_unary", "refused", FakeAnswer.refuse(0.2))
    with served(fake, service, behaviors, max_wait=None) as address:
        error = failure(lambda: call(address, kind, "refused", timeout=None))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert fake.asked("/test.Service/unary_unary", "refused") == [1] and not service.handled


def test_a_function_is_not_handled_although_abort_returns():
    """As in older versions of gRPC."""
    fake = Fake(fake_time=FakeTime())
    fake.answer("a", "b", FakeAnswer.refuse(1.0))
    handled: List[Any] = []
    answers: List[Any] = []

    class Context:
        codes: List[grpc.StatusCode] = []

        def time_remaining(self) -> Optional[float]:
            return None

        def set_trailing_metadata(self, metadata: Any) -> None:
            pass

        def abort(self, code: grpc.StatusCode, details: str) -> None:
            self.codes.append(code)

    class Details:
        method = "/test.Service/unary_unary"

    async def run() -> None:
        quota = AioServerInterceptor(fake.aio_client(), lambda method, context: ("a", "b"))
        for make in (grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler):

            async def found(details: Any) -> Any:
                return make(lambda request, context: handled.append(request) or [])

            handler = await quota.intercept_service(found, Details())
            loop = asyncio.get_running_loop()
            behavior = handler.unary_unary or (lambda *asked: list(handler.unary_stream(*asked)))
            answers.append(await loop.run_in_executor(None, behavior, b"", Context()))

    asyncio.run(run())
    assert (answers, handled) == ([None, []], [])
    assert Context.codes == [grpc.StatusCode.RESOURCE_EXHAUSTED] * 2


def test_a_behavior_that_does_not_block_is_called_as_grpc_calls_it():
    fake, sent = Fake(fake_time=FakeTime()), []

    def watch(request: Any, context: Any, send: Any) -> None:
        send(b"now")
        send(None)

    watch.experimental_non_blocking = True  # type: ignore[attr-defined]
    quota = ServerInterceptor(fake.client(), lambda method, context: ("a", "b"))
    server = grpc.server(ThreadPoolExecutor(2), interceptors=[quota])
    handlers = {"Watch": grpc.unary_stream_rpc_method_handler(watch)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.S", handlers),))
    port = server.add_insecure_port(LISTEN)
    server.start()
    with grpc.insecure_channel(f"ipv4:127.0.0.1:{port}") as channel:
        sent = list(channel.unary_stream("/test.S/Watch")(b"", timeout=60.0))
    server.stop(None).wait()
    assert sent == [b"now"] and fake.asked("a", "b") == [1]


def test_a_call_whose_caller_leaves_while_it_waits_is_not_handled():
    contexts: List[Any] = []
    fake, service = Fake(), Service()
    ask = fake.ask

    def leave(message: Any, deadline: float) -> Any:
        calls.pop().cancel()
        eventually("the server knows it", lambda: not contexts[0].is_active())
        fake.ask = ask  # type: ignore[method-assign]
        return ask(message, deadline)

    def remembered(method: str, context: Any) -> Any:
        contexts.append(context)
        return bucket_of(method, context)

    quota = ServerInterceptor(fake.client(), remembered)
    # One call after the other.
    server = grpc.server(ThreadPoolExecutor(1), interceptors=[quota])
    server.add_generic_rpc_handlers((service.handlers("function"),))
    port = server.add_insecure_port(LISTEN)
    with grpc.insecure_channel(f"ipv4:127.0.0.1:{port}") as channel:
        check = channel.unary_unary("/test.Service/unary_unary")
        fake.ask = leave  # type: ignore[method-assign]
        calls = [check.future(b"", metadata=(("bucket", "first"),))]
        server.start()
        eventually("it is cancelled", lambda: not calls)
        assert check(b"", metadata=(("bucket", "second"),)) == b"done"
    server.stop(None).wait()
    assert service.handled == ["second"]
    assert fake.asked("/test.Service/unary_unary", "first") == [1]


def test_a_coroutine_whose_caller_leaves_while_it_waits_is_not_handled():
    fake, service = Fake(), Service()
    method = "/test.Service/unary_unary"
    fake.answer(method, "first", FakeAnswer.grant_after(3600.0))

    async def run() -> None:
        quota = AioServerInterceptor(fake.aio_client(), bucket_of, max_wait=None)
        server = grpc.aio.server(interceptors=[quota])
        server.add_generic_rpc_handlers((service.handlers("coroutine"),))
        port = server.add_insecure_port(LISTEN)
        await server.start()
        async with grpc.aio.insecure_channel(f"ipv4:127.0.0.1:{port}") as channel:
            check = channel.unary_unary(method)
            first = check(b"", metadata=(("bucket", "first"),))
            while not fake.asked(method, "first"):
                await asyncio.sleep(0.001)
            first.cancel()
            assert await check(b"", metadata=(("bucket", "second"),)) == b"done"
        # It returns at once, as no call waits any more.
        await server.stop(None)

    asyncio.run(run())
    assert service.handled == ["second"]
