"""A middleware for ASGI applications (Starlette, FastAPI, Django): each HTTP request takes tokens
first.

    app = QuotaMiddleware(app, aio_client, lambda scope: ("web", "requests"))
"""

from __future__ import annotations

import math
from typing import Any, Awaitable, Callable, List, MutableMapping, Optional, Tuple

from .aio import Client
from .errors import InvalidRequestError, RefusedError, TollgateError

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

BucketOf = Callable[[Scope], Optional[Tuple[str, str]]]
"""The namespace and the bucket of a request; ``None`` for one that takes no tokens."""


class QuotaMiddleware:
    """Answers 429 with ``Retry-After`` to a request that is refused, 503 if nobody decides, and
    400 if the bucket's name is none.
    WebSockets take no tokens."""

    def __init__(
        self,
        app: App,
        client: Client,
        bucket_of: BucketOf,
        *,
        max_wait: Optional[float] = 0.0,
    ) -> None:
        """max_wait: the longest wait for tokens in seconds; by default, a request that would have
        to wait is refused. ``None`` waits as long as the bucket has callers wait."""
        self._app = app
        self._client = client
        self._bucket_of = bucket_of
        self._max_wait = max_wait

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one connection of the application."""
        bucket = self._bucket_of(scope) if scope["type"] == "http" else None
        if bucket is not None:
            try:
                await self._client.acquire(*bucket, max_wait=self._max_wait)
            except RefusedError as error:
                return await _answer(send, 429, str(error), error.retry_after)
            except InvalidRequestError as error:
                return await _answer(send, 400, str(error), None)
            except TollgateError:
                # Why there is no decision is not for everybody.
                return await _answer(send, 503, "no decision", None)
        await self._app(scope, receive, send)


async def _answer(send: Send, status: int, text: str, retry_after: Optional[float]) -> None:
    body = text.encode()
    headers: List[Tuple[bytes, bytes]] = [
        (b"content-type", b"text/plain; charset=utf-8"),
        (b"content-length", str(len(body)).encode()),
    ]
    if retry_after is not None:
        # Whole seconds, rounded up: earlier is too early.
        headers.append((b"retry-after", str(max(math.ceil(retry_after), 1)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
