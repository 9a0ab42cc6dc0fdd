"""Uses the installed package, without the packages that tests need, against a node: a program for
scripts/test-python.sh."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import subprocess
import tempfile

import tollgate_client
from tollgate_client import Client, DecidedBy, aio


def main() -> None:
    assert "site-packages" in tollgate_client.__file__, tollgate_client.__file__
    assert importlib.metadata.version("tollgate-client") == tollgate_client.__version__
    folder = os.path.dirname(tollgate_client.__file__)
    assert os.path.exists(os.path.join(folder, "py.typed"))
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as limits:
        limits.write("global_default_bucket: {}")
        limits.flush()
        listen = ["--grpc-listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0"]
        command = [os.environ["TOLLGATE_BINARY"], "serve", "--limits", limits.name, *listen]
        arguments = [*command, "--log-format", "json"]
        with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True) as node:
            try:
                assert node.stderr is not None
                events = (json.loads(line) for line in node.stderr)
                address = next(event["grpc"] for event in events if event["message"] == "serving")
                with Client(address, deadline=20.0) as client:
                    assert client.acquire("a", "b").decided_by is DecidedBy.NODE
                asyncio.run(ask(address))
            finally:
                node.kill()
    print(f"tollgate-client {tollgate_client.__version__} works")


async def ask(address: str) -> None:
    async with aio.Client(address, deadline=20.0) as client:
        assert (await client.acquire("a", "b")).decided_by is DecidedBy.NODE


if __name__ == "__main__":
    main()
