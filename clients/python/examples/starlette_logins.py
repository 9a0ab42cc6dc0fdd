"""A server that limits how often each address may try to log in. From the repository's root, in a
virtual environment:

    cargo run --release --bin tollgate -- serve --limits config/limits.yaml
    pip install ./clients/python starlette uvicorn
    python3 clients/python/examples/starlette_logins.py
    for i in 1 2 3 4 5 6 7; do curl -i -X POST http://127.0.0.1:8080/login; done

The first and the third command go on running: each needs a terminal.
"""

from __future__ import annotations

import contextlib
import os
from typing import AsyncIterator, Optional, Tuple

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from tollgate_client import Fallback
from tollgate_client.aio import Client
from tollgate_client.asgi import QuotaMiddleware, Scope

client = Client(
    os.environ.get("TOLLGATE_ADDRESS", "127.0.0.1:10990"), fallback=Fallback.rate(10, burst=20)
)


def logins_of_caller(scope: Scope) -> Optional[Tuple[str, str]]:
    """The bucket of the caller's address; none for other requests than logins.

    Behind a load balancer that is the balancer's address: have uvicorn take the caller's from
    ``X-Forwarded-For``, for which it must trust the balancer's address and no other
    (``proxy_headers`` and ``forwarded_allow_ips``).

    Each address makes a bucket, of the namespace's ``dynamic_bucket_template``. Where callers
    choose the names of buckets, the limits need ``max_dynamic_buckets``: else they make as many as
    they like.
    """
    if scope["path"] != "/login" or scope["client"] is None:
        return None
    address, _ = scope["client"]
    return "TheBrain_userLogins", address


async def login(_: Request) -> PlainTextResponse:
    return PlainTextResponse("welcome\n")


async def root(_: Request) -> PlainTextResponse:
    return PlainTextResponse("log in with a POST to /login\n")


@contextlib.asynccontextmanager
async def closing(_: Starlette) -> AsyncIterator[None]:
    async with client:
        yield


app = Starlette(
    routes=[Route("/login", login, methods=["POST"]), Route("/", root)],
    middleware=[Middleware(QuotaMiddleware, client=client, bucket_of=logins_of_caller)],
    lifespan=closing,
)

if __name__ == "__main__":
    # By default, uvicorn would believe what callers on this machine say of their address.
    uvicorn.run(app, port=int(os.environ.get("PORT", "8080")), proxy_headers=False)
