"""Workers that share the rate of a database by leases. From the repository's root, in a virtual
environment:

    cargo run --release --bin tollgate -- serve --limits clients/python/examples/fleet.yaml
    pip install ./clients/python
    python3 clients/python/examples/fleet.py

The first command goes on running: type the others in a second terminal.

Each worker is a process, leases a share of the 100 queries a second that the database can serve,
and queries as fast as its share allows. Shares grow with the demand that clients measure, for some
five seconds. After a third of the time, the first worker is killed: the others get its share once
its lease has run out, some three seconds later. After two thirds, the second worker closes its
client: its share is free at once, and the others get it when they refresh their leases, once a
second.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import time
from multiprocessing.synchronize import Event
from typing import Any, List

from tollgate_client import Client, LeaseTimeoutError

ADDRESS = os.environ.get("TOLLGATE_ADDRESS", "127.0.0.1:10990")
# Workers start as new programs: a fork would copy whatever the parent is doing.
NEW = multiprocessing.get_context("spawn")


def work(queries: Any, leave: Event) -> None:
    """Queries until told to leave, or until the parent is gone. The end of the block gives the
    lease back."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent.
    parent = multiprocessing.parent_process()
    assert parent is not None
    with Client(ADDRESS) as client:
        rate = client.rate_limiter("database")
        while parent.is_alive() and not leave.is_set():
            with contextlib.suppress(LeaseTimeoutError):
                rate.wait(timeout=1.0)
                queries.value += 1  # Here a worker would query the database.


class Worker:
    def __init__(self) -> None:
        # Only the worker writes it, so it needs no lock, which a killed worker could keep.
        self._queries: Any = NEW.Value(ctypes.c_longlong, 0, lock=False)
        self._seen = 0
        self.leave = NEW.Event()
        self.process = NEW.Process(target=work, args=(self._queries, self.leave), daemon=True)
        self.process.start()

    def has_begun(self) -> bool:
        return bool(self._queries.value)

    def new_queries(self) -> int:
        """The queries since the last call."""
        before, self._seen = self._seen, int(self._queries.value)
        return self._seen - before


def wait_for(workers: List[Worker]) -> None:
    end = time.monotonic() + 30
    while not all(worker.has_begun() for worker in workers):
        if time.monotonic() > end:
            sys.exit(f"no leases within 30 seconds: does a node serve at {ADDRESS}?")
        time.sleep(0.05)


def watch(workers: List[Worker], seconds: int) -> None:
    """Prints the queries a second of each worker. One is killed, and another one leaves."""
    names = "".join(f"{f'worker {number}':>10}" for number in range(1, len(workers) + 1))
    print(f"second{names}       sum")
    begin = last = time.monotonic()
    for second in range(1, seconds + 1):
        time.sleep(max(begin + second - time.monotonic(), 0))
        now = time.monotonic()
        elapsed, last = now - last, now
        rates = [worker.new_queries() / elapsed for worker in workers]
        print(f"{second:6}" + "".join(f"{rate:10.0f}" for rate in [*rates, sum(rates)]), flush=True)
        if second == seconds // 3:
            workers[0].process.kill()
            print("        worker 1 is killed", flush=True)
        if second == seconds * 2 // 3:
            workers[1].leave.set()
            print("        worker 2 leaves", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Workers that share a rate.")
    parser.add_argument("--workers", type=int, default=4, help="how many; at least 3")
    parser.add_argument("--seconds", type=int, default=24, help="how long it takes")
    arguments = parser.parse_args()
    workers = [Worker() for _ in range(arguments.workers)]
    wait_for(workers)
    watch(workers, arguments.seconds)
    for worker in workers:
        worker.leave.set()
    for worker in workers:
        worker.process.join()


if __name__ == "__main__":
    main()
