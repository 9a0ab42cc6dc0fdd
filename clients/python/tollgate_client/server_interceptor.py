"""Interceptors for gRPC servers: each call takes tokens before it is handled.

def bucket_of(method, context):
    return "rpc", dict(context.invocation_metadata()).get("tenant", "nobody")

server = grpc.server(ThreadPoolExecutor(), interceptors=[ServerInterceptor(client, bucket_of)])
server = grpc.aio.server(interceptors=[AioServerInterceptor(aio_client, bucket_of)])
"""

from __future__ import annotations

import asyncio
import inspect
from typing import Any, Awaitable, Callable, Optional, Tuple

import grpc
import grpc.aio

from ._statuses import Metadata, limits_within, status_of
from .aio import Client as AioClient
from .client import Client
from .errors import TollgateError

BucketOf = Callable[[str, Any], Optional[Tuple[str, str]]]
"""The namespace and the bucket of a call, by its method such as ``/package.Service/Method`` and its
``grpc.ServicerContext``, which has its metadata and its peer; ``None`` for a call that takes no
tokens."""

_Behavior = Callable[[Any, Any], Any]


class ServerInterceptor(grpc.ServerInterceptor):
    """Takes tokens before each call that a blocking server handles. A stream counts as one call.

    A call that is refused fails with ``RESOURCE_EXHAUSTED``, and a ``google.rpc.RetryInfo`` in the
    trailing metadata; with ``UNAVAILABLE`` if nobody decides; with ``INVALID_ARGUMENT`` if the name
    of the bucket is none."""

    def __init__(
        self, client: Client, bucket_of: BucketOf, *, max_wait: Optional[float] = 0.0
    ) -> None:
        """max_wait: the longest wait for tokens in seconds, in a thread of the server; by default, a
        call that would have to wait is refused. ``None`` waits as long as the bucket has callers
        wait. A call waits no longer than its timeout in any case."""
        self._client = client
        self._bucket_of = bucket_of
        self._max_wait = max_wait

    def intercept_service(self, continuation: Any, details: Any) -> Any:
        """Has a handler take tokens first."""
        handler = continuation(details)
        if handler is None:
            return None
        behavior = _behavior(handler)

        def handle(request: Any, context: Any) -> Any:
            self._take(details.method, context)
            return behavior(request, context)

        return _with_behavior(handler, handle)

    def _take(self, method: str, context: Any) -> None:
        bucket = self._bucket_of(method, context)
        if bucket is None:
            return
        client, left = self._client, context.time_remaining()
        try:
            client.acquire(*bucket, **limits_within(self._max_wait, client.default_deadline, left))
        except TollgateError as error:
            code, text, metadata = _answer(error)
            context.set_trailing_metadata(metadata)
            context.abort(code, text)
        if not context.is_active():
            # Its caller has left meanwhile.
            context.abort(grpc.StatusCode.CANCELLED, "the caller is gone")


class AioServerInterceptor(grpc.aio.ServerInterceptor):
    """The same for ``grpc.aio.server``, whose handlers may be coroutines, asynchronous generators, or
    functions of threads."""

    def __init__(
        self, client: AioClient, bucket_of: BucketOf, *, max_wait: Optional[float] = 0.0
    ) -> None:
        """max_wait: as for ``ServerInterceptor``."""
        self._client = client
        self._bucket_of = bucket_of
        self._max_wait = max_wait

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: Any
    ) -> Any:
        """Has a handler take tokens first."""
        handler = await continuation(details)
        if handler is None:
            return None
        behavior, method = _behavior(handler), details.method

        async def stream(request: Any, context: Any) -> Any:
            await self._take(method, context)
            async for message in behavior(request, context):
                yield message

        async def call(request: Any, context: Any) -> Any:
            await self._take(method, context)
            return await behavior(request, context)

        loop = asyncio.get_running_loop()

        def take_in_thread(context: Any) -> None:
            take = self._refusal(method, context)
            refusal = asyncio.run_coroutine_threadsafe(take, loop).result()
            if refusal is not None:
                code, text, metadata = refusal
                context.set_trailing_metadata(metadata)
                context.abort(code, text)

        def call_in_thread(request: Any, context: Any) -> Any:
            take_in_thread(context)
            return behavior(request, context)

        # A generator, as only its steps are made in a thread.
        def stream_in_thread(request: Any, context: Any) -> Any:
            take_in_thread(context)
            yield from behavior(request, context)

        # gRPC goes by the same two questions.
        if inspect.isasyncgenfunction(behavior):
            return _with_behavior(handler, stream)
        if inspect.iscoroutinefunction(behavior):
            return _with_behavior(handler, call)
        in_thread = stream_in_thread if handler.response_streaming else call_in_thread
        return _with_behavior(handler, in_thread)

    async def _take(self, method: str, context: Any) -> None:
        refusal = await self._refusal(method, context)
        if refusal is not None:
            code, text, metadata = refusal
            await context.abort(code, text, metadata)

    async def _refusal(
        self, method: str, context: Any
    ) -> Optional[Tuple[grpc.StatusCode, str, Metadata]]:
        """Takes tokens, or returns the status of the call."""
        bucket = self._bucket_of(method, context)
        if bucket is None:
            return None
        client, left = self._client, context.time_remaining()
        limits = limits_within(self._max_wait, client.default_deadline, left)
        try:
            await client.acquire(*bucket, **limits)
        except TollgateError as error:
            return _answer(error)
        return None


_KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


def _kind(handler: Any) -> str:
    return _KINDS[2 * bool(handler.request_streaming) + bool(handler.response_streaming)]


def _behavior(handler: Any) -> _Behavior:
    behavior: _Behavior = getattr(handler, _kind(handler))
    return behavior


def _with_behavior(handler: Any, behavior: _Behavior) -> Any:
    """A handler of the same kind."""
    make = getattr(grpc, f"{_kind(handler)}_rpc_method_handler")
    return make(behavior, handler.request_deserializer, handler.response_serializer)


def _answer(error: TollgateError) -> Tuple[grpc.StatusCode, str, Metadata]:
    code, text, metadata = status_of(error)
    if code is grpc.StatusCode.UNAVAILABLE:
        # Why there is no decision is not for everybody.
        text = "no decision"
    return code, text, metadata
