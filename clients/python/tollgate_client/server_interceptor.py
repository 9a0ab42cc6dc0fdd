"""Interceptors for gRPC servers: each call takes tokens before it is handled.

def bucket_of(method, context):
    return "rpc", dict(context.invocation_metadata()).get("tenant", "nobody")

server = grpc.server(ThreadPoolExecutor(), interceptors=[ServerInterceptor(client, bucket_of)])
server = grpc.aio.server(interceptors=[AioServerInterceptor(aio_client, bucket_of)])
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from typing import Any, Awaitable, Callable, Dict, Optional, Tuple, Union

import grpc
import grpc.aio

from ._statuses import Metadata, limits_within, status_of
from .aio import Client as AioClient
from .client import Client
from .errors import TollgateError

BucketOf = Callable[[str, Any], Optional[Tuple[str, str]]]
"""The namespace and the bucket of a call, by its method such as ``/package.Service/Method`` and its
``grpc.ServicerContext``, which has its metadata and its peer; ``None`` for a call that takes no
tokens. It must not abort the call: what it raises makes the call fail."""

_Behavior = Callable[..., Any]

_Refusal = Tuple[grpc.StatusCode, str, Metadata]

_NO_TIMEOUT = 1e9
"""More seconds than a call with a timeout has left: a blocking server says so of one without."""


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
        wait, and a call with a timeout as long as that lasts. A call waits no longer than its
        timeout in any case."""
        self._client = client
        self._bucket_of = bucket_of
        self._max_wait = max_wait

    def intercept_service(self, continuation: Any, details: Any) -> Any:
        """Has a handler take tokens first."""
        handler = continuation(details)
        if handler is None:
            return None
        behavior = _behavior(handler)

        # With its attributes, by which gRPC calls some behaviors with a third argument.
        @functools.wraps(behavior)
        def handle(request: Any, context: Any, *send: Any) -> Any:
            self._take(details.method, context)
            return behavior(request, context, *send)

        return _with_behavior(handler, handle)

    def _take(self, method: str, context: Any) -> None:
        bucket = self._bucket_of(method, context)
        if bucket is None:
            return
        try:
            self._client.acquire(*bucket, **_limits(self._max_wait, self._client, context))
        except TollgateError as error:
            _abort(context, *_answer(error))
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

        def may_go_on(context: Any) -> bool:
            bucket = self._bucket_of(method, context)
            if bucket is None:
                return True
            take = self._refusal(bucket, context)
            refusal = asyncio.run_coroutine_threadsafe(take, loop).result()
            if refusal is not None:
                # Of older versions of gRPC, this returns.
                _abort(context, *refusal)
            return refusal is None

        def call_in_thread(request: Any, context: Any) -> Any:
            return behavior(request, context) if may_go_on(context) else None

        # A generator, as only its steps are made in a thread.
        def stream_in_thread(request: Any, context: Any) -> Any:
            if may_go_on(context):
                yield from behavior(request, context)

        # gRPC goes by the same two questions.
        if inspect.isasyncgenfunction(behavior):
            return _with_behavior(handler, stream)
        if inspect.iscoroutinefunction(behavior):
            return _with_behavior(handler, call)
        in_thread = stream_in_thread if handler.response_streaming else call_in_thread
        return _with_behavior(handler, in_thread)

    async def _take(self, method: str, context: Any) -> None:
        bucket = self._bucket_of(method, context)
        refusal = None if bucket is None else await self._refusal(bucket, context)
        if refusal is not None:
            code, text, metadata = refusal
            await context.abort(code, text, metadata)

    async def _refusal(self, bucket: Tuple[str, str], context: Any) -> Optional[_Refusal]:
        """Takes tokens, or returns the status of the call."""
        try:
            await self._client.acquire(*bucket, **_limits(self._max_wait, self._client, context))
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


def _limits(
    max_wait: Optional[float], client: Union[Client, AioClient], context: Any
) -> Dict[str, Any]:
    left = context.time_remaining()
    if left is not None and left > _NO_TIMEOUT:
        left = None
    return limits_within(max_wait, client.default_deadline, left)


def _abort(context: Any, code: grpc.StatusCode, text: str, metadata: Metadata) -> None:
    # Not the metadata of others, if there is none.
    if metadata:
        context.set_trailing_metadata(metadata)
    context.abort(code, text)


def _answer(error: TollgateError) -> _Refusal:
    code, text, metadata = status_of(error)
    if code is grpc.StatusCode.UNAVAILABLE:
        # Why there is no decision is not for everybody.
        text = "no decision"
    return code, text, metadata
