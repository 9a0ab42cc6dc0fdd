"""Forks, threads, the end of the process, and the loops of asyncio."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

import tollgate_client
from tollgate_client import Client, ClosedError, DecidedBy, Fallback, NoDecisionError, aio

from ..harness.clients import PATIENT
from ..harness.fault_proxy import Fault
from ..harness.waiting import LIMIT, eventually

PRELUDE = """
import asyncio, logging, multiprocessing, os, sys
from tollgate_client import Client, DecidedBy, Fallback, aio

logging.disable()
client = Client(sys.argv[1], deadline=20.0)
aio_client = aio.Client(sys.argv[1], deadline=20.0)

def ask():
    assert client.allow("a", "b").decided_by is DecidedBy.NODE

async def ask_often(client):
    calls = [asyncio.ensure_future(client.acquire("a", "b")) for _ in range(20)]
    calls[0].cancel()
    for granted in await asyncio.gather(*calls[1:]):
        assert granted.decided_by is DecidedBy.NODE

def in_child(work, *arguments):
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == 0
    else:
        work(*arguments)
        sys.exit()
"""


def run(program: str, address: str) -> None:
    """Runs a program in a process of its own, which must end well and without a word."""
    environment = {**os.environ, "PYTHONPATH": str(Path(tollgate_client.__file__).parents[1])}
    del environment["GRPC_ENABLE_FORK_SUPPORT"]
    # gRPC tells of forks, and Python 3.12 and newer warn of them.
    environment["GRPC_VERBOSITY"] = "NONE"
    options = ["-X", "dev", "-W", "error", "-W", "ignore:.*use of fork:DeprecationWarning"]
    done = subprocess.run(
        [sys.executable, *options, "-c", PRELUDE + textwrap.dedent(program), address],
        env=environment,
        capture_output=True,
        text=True,
        timeout=2 * LIMIT,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_client_of_before_a_fork_works_in_the_child(start):
    program = """
        in_child(ask)
        ask()
        in_child(ask)
        in_child(in_child, ask)
        process = multiprocessing.get_context("fork").Process(target=ask)
        process.start()
        process.join()
        assert process.exitcode == 0
        ask()
    """
    run(program, start().grpc)


def test_an_asyncio_client_of_before_a_fork_works_in_the_child(start):
    program = """
        def run_often():
            asyncio.run(ask_often(aio_client))

        in_child(run_often)
        run_often()
        in_child(run_often)
        in_child(in_child, run_often)
        run_often()
    """
    run(program, start().grpc)


def test_a_process_ends_without_a_word(start):
    """Although no client is closed; after a fork, too."""
    program = """
        other = Client(sys.argv[1], deadline=20.0)
        other.allow("a", "b")
        ask()
        asyncio.run(ask_often(aio_client))
        asyncio.run(ask_often(aio.Client(sys.argv[1], deadline=20.0)))
        asyncio.run(aio.Client("127.0.0.1:9", fallback=Fallback.DENY).allow("a", "b"))
        in_child(ask)
    """
    run(program, start().grpc)


def test_an_interrupted_call_ends_at_once(proxied):
    # A shell has its background commands ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _, proxy = proxied
    client = Client(proxy.address, deadline=PATIENT)
    client.allow("a", "b")
    proxy.set(Fault.NO_REPLIES)
    begin = time.monotonic()
    main = threading.main_thread().ident
    assert main is not None
    # Late enough that a busy machine has begun the call.
    timer = threading.Timer(1, signal.pthread_kill, (main, signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        try:
            client.allow("a", "b")
        finally:
            timer.cancel()
    assert time.monotonic() - begin < PATIENT / 2
    proxy.set(Fault.NOTHING)
    assert client.allow("a", "b").decided_by is DecidedBy.NODE
    client.close()


def test_one_thread_for_each_client_and_none_after_it(start):
    node = start()
    address = node.grpc
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
    connections = lambda: node.metric("tollgate_connections", transport="grpc")  # noqa: E731
    eventually("its connection is closed", lambda: connections() == 0)


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


def test_an_application_that_cancels_all_tasks(proxied):
    _, proxy = proxied

    async def use() -> None:
        async with aio.Client(proxy.address, deadline=PATIENT) as client:
            await client.allow("a", "b")
            proxy.set(Fault.REFUSED)
            with pytest.raises(NoDecisionError):
                await client.allow("a", "b")
            proxy.set(Fault.NO_REPLIES)
            ours: "set[Any]" = set()
            while not ours:
                await asyncio.sleep(0.005)
                ours = asyncio.all_tasks() - {asyncio.current_task()}
            for task in ours:
                task.cancel()
            proxy.set(Fault.NOTHING)
            for _ in range(int(LIMIT / 0.01)):
                await asyncio.sleep(0.01)
                try:
                    await client.allow("a", "b")
                except NoDecisionError:
                    continue
                return
            raise AssertionError("the node is not called again")

    asyncio.run(use())
