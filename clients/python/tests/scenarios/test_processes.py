"""Forks, threads, the end of the process, and the loops of asyncio."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from pathlib import Path
from typing import Any, Callable

import pytest

import tollgate_client
from tollgate_client import Client, ClosedError, DecidedBy, Fallback, aio

from ..harness.clients import PATIENT
from ..harness.fault_proxy import Fault
from ..harness.waiting import LIMIT, eventually, polls

# Python 3.12 and newer warn of any fork while there are threads, such as those of gRPC.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


def in_child(work: Callable[[], bool]) -> bool:
    """Whether the work succeeds in a forked process, which ends as any other."""
    child = os.fork()
    if child == 0:
        done = False
        try:
            done = work()
        finally:
            os._exit(0 if done else 1)
    for _ in polls("the child ends"):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status == 0
    raise AssertionError


def test_a_client_of_before_a_fork_works_in_the_child(start):
    client = Client(start().grpc, deadline=PATIENT)
    is_answered = lambda: client.allow("a", "b").decided_by is DecidedBy.NODE  # noqa: E731
    assert is_answered() and in_child(is_answered) and is_answered()
    context = multiprocessing.get_context("fork")
    process = context.Process(target=client.allow, args=("a", "b"))
    process.start()
    process.join(LIMIT)
    assert process.exitcode == 0 and is_answered()
    client.close()


def test_an_asyncio_client_of_before_a_fork_works_in_the_child(start):
    client = aio.Client(start().grpc, deadline=PATIENT)

    async def ask() -> bool:
        assert (await client.acquire("a", "b")).decided_by is DecidedBy.NODE
        calls = [asyncio.ensure_future(client.allow("a", "b")) for _ in range(20)]
        calls[0].cancel()
        await asyncio.gather(*calls[1:])
        return True

    is_answered = lambda: asyncio.run(ask())  # noqa: E731
    assert in_child(is_answered), "it has not been used"
    assert is_answered() and in_child(is_answered) and is_answered()


def test_a_process_ends_cleanly(start):
    """Without a word, although no client is closed; after a fork, too."""
    program = """
        import asyncio, logging, os, sys
        from tollgate_client import Client, Fallback, aio

        logging.disable()
        blocking, other = (Client(sys.argv[1], deadline=20.0) for _ in range(2))
        blocking.allow("a", "b")
        other.allow("a", "b")

        async def ask(client):
            return await client.allow("a", "b")

        left = aio.Client(sys.argv[1], deadline=20.0)
        asyncio.run(ask(left))
        asyncio.run(ask(aio.Client(sys.argv[1], deadline=20.0)))
        asyncio.run(ask(aio.Client("127.0.0.1:9", fallback=Fallback.DENY)))
        child = os.fork()
        blocking.allow("a", "b")
        if child:
            sys.exit(os.waitpid(child, 0)[1])
    """
    arguments = [sys.executable, "-X", "dev", "-W", "error", "-W", "ignore:.*fork"]
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(tollgate_client.__file__).parents[1]),
        # gRPC tells of forks.
        "GRPC_VERBOSITY": "NONE",
    }
    done = subprocess.run(
        [*arguments, "-c", textwrap.dedent(program), start().grpc],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_an_interrupted_call_ends_at_once(proxied):
    _, proxy = proxied
    client = Client(proxy.address, deadline=PATIENT)
    client.allow("a", "b")
    proxy.set(Fault.NO_REPLIES)
    begin = time.monotonic()
    main = threading.main_thread().ident
    assert main is not None
    threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        client.allow("a", "b")
    assert time.monotonic() - begin < PATIENT / 2
    proxy.set(Fault.NOTHING)
    assert client.allow("a", "b").decided_by is DecidedBy.NODE
    client.close()


def test_one_thread_for_each_client_and_none_after_it(start):
    address = start().grpc
    ours = lambda: [one for one in threading.enumerate() if one.name == "tollgate-client"]  # noqa: E731
    client = Client(address, deadline=PATIENT)
    assert not ours(), "it begins with the first request"
    with client:
        for _ in range(10):
            client.allow("a", "b")
        assert len(ours()) == 1 and ours()[0].daemon
    assert not ours()
    dropped = Client(address, deadline=PATIENT)
    dropped.allow("a", "b")
    assert len(ours()) == 1
    del dropped
    gc.collect()
    eventually("the thread of a dropped client ends", lambda: not ours())


def test_a_closed_client_refuses_requests(connect, start):
    client = connect(start().grpc, fallback=Fallback.ALLOW)
    client.allow("a", "b")
    client.end()
    with pytest.raises(ClosedError):
        client.allow("a", "b")


def test_an_asyncio_client_of_several_loops(start):
    client = aio.Client(start().grpc, deadline=PATIENT)

    async def ask() -> Any:
        return (await client.allow("a", "b")).decided_by

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [asyncio.run(ask()) for _ in range(3)] == [DecidedBy.NODE] * 3


def test_the_tasks_of_an_asyncio_client_end_with_it(start):
    address = start().grpc

    async def use() -> None:
        async with aio.Client(address, deadline=PATIENT) as client:
            await asyncio.gather(*(client.allow("a", "b") for _ in range(50)))
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(use())
