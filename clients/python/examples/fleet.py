"""Workers that share the rate of a database by leases. From the repository's root:

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
import ctypes
import multiprocessing
import os
import time
from multiprocessing.synchronize import Event
from typing import Any, List

from tollgate_client import Client

ADDRESS = os.environ.get("TOLLGATE_ADDRESS", "127.0.0.1:10990")
# Workers start as new programs: a fork would copy whatever the parent is doing.
NEW = multiprocessing.get_context("spawn")


def work(queries: Any, leave: Event) -> None:
    """Queries until told to leave. The end of the block gives the lease back."""
    with Client(ADDRESS) as client:
        rate = client.rate_limiter("database")
        while not leave.is_set():
            rate.wait()
            queries.value += 1  # Here a worker would query the database.


class Worker:
    def __init__(self) -> None:
        # Only the worker writes it, so it needs no lock, which a killed worker could keep.
        self._queries: Any = NEW.Value(ctypes.c_longlong, 0, lock=False)
        self._told = 0
        self.leave = NEW.Event()
        self.process = NEW.Process(target=work, args=(self._queries, self.leave), daemon=True)
        self.process.start()

    def since_last_time(self) -> int:
        """The queries since this was asked last."""
        before, self._told = self._told, int(self._queries.value)
        return self._told - before


def main() -> None:
    parser = argparse.ArgumentParser(description="Workers that share a rate.")
    parser.add_argument("--workers", type=int, default=4, help="how many; at least 3")
    parser.add_argument("--seconds", type=int, default=24, help="how long it takes")
    arguments = parser.parse_args()
    workers: List[Worker] = [Worker() for _ in range(arguments.workers)]
    names = "".join(f"{f'worker {number}':>10}" for number in range(1, len(workers) + 1))
    print(f"second{names}       sum")
    begin = time.monotonic()
    for second in range(1, arguments.seconds + 1):
        time.sleep(max(begin + second - time.monotonic(), 0))
        counts = [worker.since_last_time() for worker in workers]
        columns = "".join(f"{count:10}" for count in counts)
        print(f"{second:6}{columns}{sum(counts):10}", flush=True)
        if second == arguments.seconds // 3:
            workers[0].process.kill()
            print("        worker 1 is killed", flush=True)
        if second == arguments.seconds * 2 // 3:
            workers[1].leave.set()
            print("        worker 2 leaves", flush=True)
    for worker in workers:
        worker.leave.set()
    for worker in workers:
        worker.process.join()


if __name__ == "__main__":
    main()
