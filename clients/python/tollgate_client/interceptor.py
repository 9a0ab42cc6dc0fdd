"""Interceptors for gRPC clients: each call takes tokens first.

channel = grpc.insecure_channel("db.internal:443")
quota = QuotaInterceptor(client, lambda method: ("db", method), max_wait=1.0)
stub = DatabaseStub(grpc.intercept_channel(channel, quota))

channel = grpc.aio.insecure_channel("db.internal:443", interceptors=aio_interceptors(
    aio_client, lambda method: ("db", method), max_wait=1.0))
"""

from __future__ import annotations

import time
from typing import Any, Callable, Dict, List, Optional, Tuple, Union

import grpc
import grpc.aio

from ._proto.status_pb2 import Any as AnyMessage
from ._proto.status_pb2 import Duration, RetryInfo, Status
from .aio import Client as AioClient
from .client import Client
from .errors import NoDecisionError, RefusedError

BucketOf = Callable[[str], Optional[Tuple[str, str]]]
"""The namespace and the bucket of a method such as ``/package.Service/Method``; ``None`` for a
method that takes no tokens."""

_Metadata = Tuple[Tuple[str, bytes], ...]


class QuotaError(grpc.RpcError):
    """What an intercepted call raises that gets no tokens: ``RESOURCE_EXHAUSTED`` if it is refused,
    with a ``google.rpc.RetryInfo`` in the trailing metadata; ``UNAVAILABLE`` if nobody decides."""

    def __init__(self, code: grpc.StatusCode, details: str, metadata: _Metadata) -> None:
        super().__init__(details)
        self._code = code
        self._details = details
        self._metadata = metadata

    def code(self) -> grpc.StatusCode:
        """The status."""
        return self._code

    def details(self) -> str:
        """Why, in words."""
        return self._details

    def trailing_metadata(self) -> Any:
        """The metadata with the ``RetryInfo``."""
        return self._metadata


class QuotaInterceptor(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Takes tokens before each call of a blocking channel. A stream counts as one call."""

    def __init__(
        self, client: Client, bucket_of: BucketOf, *, max_wait: Optional[float] = 0.0
    ) -> None:
        """max_wait: the longest wait for tokens in seconds; by default, a call that would have to
        wait fails. ``None`` waits as long as the bucket has callers wait. A call waits no longer
        than its timeout in any case."""
        self._client = client
        self._bucket_of = bucket_of
        self._max_wait = max_wait

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        """Takes tokens, and makes the call."""
        bucket = self._bucket_of(details.method)
        if bucket is not None:
            start = time.monotonic()
            try:
                self._client.acquire(*bucket, **_limits(self._max_wait, details.timeout))
            except (RefusedError, NoDecisionError) as error:
                raise QuotaError(*_status(error)) from error
            details = _after(details, time.monotonic() - start)
        return continuation(details, request)

    intercept_unary_stream: Any = intercept_unary_unary
    intercept_stream_unary: Any = intercept_unary_unary
    intercept_stream_stream: Any = intercept_unary_unary


def aio_interceptors(
    client: AioClient, bucket_of: BucketOf, *, max_wait: Optional[float] = 0.0
) -> List[grpc.aio.ClientInterceptor]:
    """The same for ``grpc.aio``, whose channels take one interceptor for each kind of call. A call
    that gets no tokens raises ``grpc.aio.AioRpcError``."""
    quota = _AioQuota(client, bucket_of, max_wait)
    return [_UnaryUnary(quota), _UnaryStream(quota), _StreamUnary(quota), _StreamStream(quota)]


class _AioQuota:
    def __init__(self, client: AioClient, bucket_of: BucketOf, max_wait: Optional[float]) -> None:
        self._client = client
        self._bucket_of = bucket_of
        self._max_wait = max_wait

    async def take(self, details: Any) -> Any:
        method = details.method
        bucket = self._bucket_of(method.decode() if isinstance(method, bytes) else method)
        if bucket is None:
            return details
        start = time.monotonic()
        try:
            await self._client.acquire(*bucket, **_limits(self._max_wait, details.timeout))
        except (RefusedError, NoDecisionError) as error:
            code, text, metadata = _status(error)
            trailing = grpc.aio.Metadata(*metadata)
            raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, text) from error
        return _after(details, time.monotonic() - start)


class _AioInterceptor:
    def __init__(self, quota: _AioQuota) -> None:
        self._quota = quota

    async def _intercept(self, continuation: Any, details: Any, request: Any) -> Any:
        return await continuation(await self._quota.take(details), request)


class _UnaryUnary(_AioInterceptor, grpc.aio.UnaryUnaryClientInterceptor):
    intercept_unary_unary: Any = _AioInterceptor._intercept


class _UnaryStream(_AioInterceptor, grpc.aio.UnaryStreamClientInterceptor):
    intercept_unary_stream: Any = _AioInterceptor._intercept


class _StreamUnary(_AioInterceptor, grpc.aio.StreamUnaryClientInterceptor):
    intercept_stream_unary: Any = _AioInterceptor._intercept


class _StreamStream(_AioInterceptor, grpc.aio.StreamStreamClientInterceptor):
    intercept_stream_stream: Any = _AioInterceptor._intercept


def _limits(max_wait: Optional[float], timeout: Optional[float]) -> Dict[str, Any]:
    """The limits of a request for a call that may take so long."""
    limits: Dict[str, Any] = {"max_wait": max_wait}
    if timeout is not None:
        timeout = max(timeout, 0.0)
        limits["max_wait"] = timeout if max_wait is None else min(max_wait, timeout)
    return limits


def _after(details: Any, seconds: float) -> Any:
    """The details of a call that has waited so long: that much less is left of its timeout."""
    if details.timeout is None:
        return details
    return details._replace(timeout=max(details.timeout - seconds, 0.0))


def _status(
    error: Union[RefusedError, NoDecisionError],
) -> Tuple[grpc.StatusCode, str, _Metadata]:
    if isinstance(error, NoDecisionError):
        return grpc.StatusCode.UNAVAILABLE, str(error), ()
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    if error.retry_after is None:
        return code, str(error), ()
    seconds = min(error.retry_after, 1e10)
    delay = Duration(seconds=int(seconds), nanos=int(seconds % 1 * 1e9))
    info = RetryInfo(retry_delay=delay).SerializeToString()
    detail = AnyMessage(type_url="type.googleapis.com/google.rpc.RetryInfo", value=info)
    status = Status(code=code.value[0], message=str(error), details=[detail])
    return code, str(error), (("grpc-status-details-bin", status.SerializeToString()),)
