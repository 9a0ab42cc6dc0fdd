"""Interceptors for gRPC clients: each call takes tokens first.

channel = grpc.insecure_channel("db.internal:443")
quota = QuotaInterceptor(client, lambda method: ("db", method), max_wait=1.0)
stub = DatabaseStub(grpc.intercept_channel(channel, quota))

channel = grpc.aio.insecure_channel("db.internal:443", interceptors=aio_interceptors(
    aio_client, lambda method: ("db", method), max_wait=1.0))
"""

from __future__ import annotations

import time
from typing import Any, Callable, List, Optional, Tuple

import grpc
import grpc.aio

from ._statuses import Metadata, limits_within, status_of
from .aio import Client as AioClient
from .client import Client
from .errors import TollgateError

BucketOf = Callable[[str], Optional[Tuple[str, str]]]
"""The namespace and the bucket of a method such as ``/package.Service/Method``; ``None`` for a
method that takes no tokens."""


class QuotaError(grpc.RpcError):
    """What an intercepted call raises that gets no tokens: ``RESOURCE_EXHAUSTED`` if it is refused,
    with a ``google.rpc.RetryInfo`` in the trailing metadata; ``UNAVAILABLE`` if nobody decides;
    ``INVALID_ARGUMENT`` if the name of the bucket is none; ``DEADLINE_EXCEEDED`` if nothing is left
    of the call's timeout.

    It is also the call that has failed so, as other interceptors, futures and streams want it."""

    def __init__(self, code: grpc.StatusCode, details: str, metadata: Metadata) -> None:
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

    def initial_metadata(self) -> Any:
        """None, as no call was made."""
        return ()

    def result(self, timeout: Optional[float] = None) -> Any:
        """Raises this."""
        raise self

    def exception(self, timeout: Optional[float] = None) -> QuotaError:
        """This."""
        return self

    def traceback(self, timeout: Optional[float] = None) -> Any:
        """Of this."""
        return self.__traceback__

    def done(self) -> bool:
        """It has ended."""
        return True

    def running(self) -> bool:
        """It has ended."""
        return False

    def is_active(self) -> bool:
        """It has ended."""
        return False

    def cancel(self) -> bool:
        """It has ended."""
        return False

    def cancelled(self) -> bool:
        """It has failed."""
        return False

    def time_remaining(self) -> Optional[float]:
        """It has ended."""
        return None

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """It has ended: the callback is not called."""
        return False

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Calls back at once."""
        callback(self)

    def __iter__(self) -> QuotaError:
        return self

    def __next__(self) -> Any:
        raise self


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
            limits = limits_within(self._max_wait, self._client.default_deadline, details.timeout)
            try:
                self._client.acquire(*bucket, **limits)
            except TollgateError as error:
                return QuotaError(*status_of(error))
            details = _after(details, time.monotonic() - start)
            if details.timeout == 0.0:
                return QuotaError(*_LATE)
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
        limits = limits_within(self._max_wait, self._client.default_deadline, details.timeout)
        try:
            await self._client.acquire(*bucket, **limits)
        except TollgateError as error:
            raise _aio_error(*status_of(error)) from error
        details = _after(details, time.monotonic() - start)
        if details.timeout == 0.0:
            raise _aio_error(*_LATE)
        return details


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


def _after(details: Any, seconds: float) -> Any:
    """The details of a call that has waited so long: that much less is left of its timeout."""
    if details.timeout is None:
        return details
    return details._replace(timeout=max(details.timeout - seconds, 0.0))


_LATE: Tuple[grpc.StatusCode, str, Metadata] = (
    grpc.StatusCode.DEADLINE_EXCEEDED,
    "the wait for tokens has taken the whole timeout",
    (),
)


def _aio_error(code: grpc.StatusCode, text: str, metadata: Metadata) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*metadata), text)
