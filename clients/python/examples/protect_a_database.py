"""What an overload does to a database, without tollgate and with it. From the repository's root, in
a virtual environment:

    cargo run --release --bin tollgate -- serve --limits clients/python/examples/protect_a_database.yaml
    pip install ./clients/python
    python3 clients/python/examples/protect_a_database.py --svg protect-a-database.svg

The first command goes on running: type the others in a second terminal. The program takes a minute:
it puts the same load on the database twice, and prints what becomes of it each second.

**The database** is a model in this process, and runs in real time. A query alone takes 50 ms on
average (exponentially distributed). Queries in progress slow each other down as Gunther's Universal
Scalability Law says: n of them together finish 20 n / (1 + 0.05 (n - 1) + 0.003 n (n - 1)) queries
a second. That is 130 at its best, with 18 in progress, and 31 with 200, which is as many as the
database has connections for. It refuses further ones.

**Callers** wait a second for an answer. Then they give up, and the database, which does not know
that, goes on with the query. They try three times in all, with pauses of a quarter to three
quarters of a second. A request is answered in time if one of its tries is.

**The load** is the same in both runs: requests arrive at random (Poisson), whether or not earlier
ones were answered. 50 a second, then up to 400, then 50 again.

**With tollgate**, each try first asks for a token of a bucket that gains 100 a second. Without one,
the caller is told "too busy" at once, and does not try again. If it did, it would cost the database
nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import heapq
import itertools
import os
import random
from dataclasses import dataclass, field
from typing import Awaitable, Callable, Iterator, List, NamedTuple, Optional, Set, Tuple

from draw import draw
from tollgate_client import Fallback
from tollgate_client.aio import Client

LOAD = [(0.0, 50), (0.2, 50), (0.4, 400), (0.55, 400), (0.7, 50), (1.0, 50)]
"""Requests a second, at these parts of a run; in between, on straight lines."""
WORK = 0.05
"""Seconds that a query takes alone, on average."""
CONNECTIONS = 200
TIMEOUT = 1.0
TRIES = 3


class TooManyConnections(Exception):
    pass


class Database:
    """Queries in progress all advance at the same speed, which depends on their number."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._now = self._loop.time()
        # Seconds of work done so far on a query that began with the database.
        self._done = 0.0
        # What `_done` is when the query ends, its number, and who waits for it.
        self._queries: List[Tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()
        self._timer: Optional[asyncio.TimerHandle] = None

    async def query(self, work: float) -> None:
        """Takes ``work`` seconds if it is alone. Its work is done even if the caller gives up."""
        self._advance()
        if len(self._queries) >= CONNECTIONS:
            raise TooManyConnections
        answer = self._loop.create_future()
        heapq.heappush(self._queries, (self._done + work, next(self._numbers), answer))
        self._advance()
        await answer

    def _speed(self) -> float:
        """Seconds of work done on each query in a second."""
        others = len(self._queries) - 1
        return 1 / (1 + 0.05 * others + 0.003 * (others + 1) * others)

    def _advance(self) -> None:
        """Does the work up to now, and comes back when the next query ends."""
        if self._timer is not None:
            self._timer.cancel()
        now = self._loop.time()
        while self._queries:
            ends = self._now + (self._queries[0][0] - self._done) / self._speed()
            if ends > now:
                self._done += (now - self._now) * self._speed()
                self._timer = self._loop.call_at(ends, self._advance)
                break
            self._now = ends
            self._done, _, answer = heapq.heappop(self._queries)
            if not answer.done():
                answer.set_result(None)
        self._now = now


@dataclass
class Second:
    """What became of requests in one second of a run."""

    asked: int = 0
    refused: int = 0
    gave_up: int = 0
    times: List[float] = field(default_factory=list)
    """Of the requests that were answered in time: seconds from the request to the answer."""

    @property
    def answered(self) -> int:
        return len(self.times)

    @property
    def p99_ms(self) -> Optional[int]:
        times = sorted(self.times)
        return round(1000 * times[(len(times) * 99 - 1) // 100]) if times else None


class Request(NamedTuple):
    at: float
    work: float
    pauses: List[float]


MayQuery = Callable[[], Awaitable[bool]]


def requests(seconds: float) -> Iterator[Request]:
    """The same in each run of this length."""
    dice = random.Random(1)
    at = 0.0
    while True:
        at += dice.expovariate(load(at / seconds))
        if at >= seconds:
            return
        pauses = [dice.uniform(0.25, 0.75) for _ in range(TRIES)]
        yield Request(at, dice.expovariate(1 / WORK), pauses)


def load(part: float) -> float:
    for (begin, low), (end, high) in zip(LOAD, LOAD[1:]):
        if part < end:
            break
    return low + (high - low) * (part - begin) / (end - begin)


class Run:
    """Puts the load on a database."""

    def __init__(self, seconds: int, may_query: MayQuery) -> None:
        self.seconds = [Second() for _ in range(seconds)]
        self._may_query = may_query
        self._loop = asyncio.get_running_loop()
        self._database = Database()
        self._begin = self._loop.time()

    async def run(self) -> List[Second]:
        callers: Set[asyncio.Task[None]] = set()
        printer = asyncio.create_task(self._print())
        for request in requests(len(self.seconds)):
            await asyncio.sleep(self._begin + request.at - self._loop.time())
            caller = asyncio.create_task(self._ask(request))
            callers.add(caller)
            caller.add_done_callback(callers.discard)
        await printer
        for caller in callers:
            caller.cancel()
        await asyncio.gather(*callers, return_exceptions=True)
        return self.seconds

    async def _ask(self, request: Request) -> None:
        begin = self._loop.time()
        self._second().asked += 1
        for pause in request.pauses:
            if not await self._may_query():
                self._second().refused += 1
                return
            try:
                await asyncio.wait_for(self._database.query(request.work), TIMEOUT)
                self._second().times.append(self._loop.time() - begin)
                return
            except (asyncio.TimeoutError, TooManyConnections):
                await asyncio.sleep(pause)
        self._second().gave_up += 1

    def _second(self) -> Second:
        now = int(self._loop.time() - self._begin)
        return self.seconds[min(now, len(self.seconds) - 1)]

    async def _print(self) -> None:
        print("second   asked  answered in time  99th percentile  refused  gave up")
        for number, second in enumerate(self.seconds):
            await asyncio.sleep(self._begin + number + 1 - self._loop.time())
            time = "-" if second.p99_ms is None else f"{second.p99_ms} ms"
            print(
                f"{number:6}{second.asked:8}{second.answered:18}{time:>17}"
                f"{second.refused:9}{second.gave_up:9}",
                flush=True,
            )


async def always() -> bool:
    return True


async def compare(seconds: int) -> List[List[Second]]:
    print("Without tollgate:")
    without = await Run(seconds, always).run()
    address = os.environ.get("TOLLGATE_ADDRESS", "127.0.0.1:10990")
    # If no node answers, the process lets through a little by itself.
    async with Client(address, deadline=0.5, fallback=Fallback.rate(20, burst=5)) as client:

        async def may_query() -> bool:
            return (await client.allow("shop", "database")).is_granted

        print("\nWith tollgate:")
        return [without, await Run(seconds, may_query).run()]


def main() -> None:
    parser = argparse.ArgumentParser(description="An overload, without tollgate and with it.")
    parser.add_argument("--seconds", type=int, default=30, help="how long each run takes")
    parser.add_argument("--csv", metavar="FILE", help="write the numbers to this file")
    parser.add_argument("--svg", metavar="FILE", help="draw them to this file")
    arguments = parser.parse_args()
    without, with_tollgate = asyncio.run(compare(arguments.seconds))
    if arguments.csv:
        with open(arguments.csv, "w", newline="") as file:
            table = csv.writer(file)
            table.writerow(
                ["run", "second", "asked", "answered", "p99_ms", "refused", "gave_up"]
            )
            for name, run in (("without", without), ("with", with_tollgate)):
                for number, s in enumerate(run):
                    table.writerow(
                        [name, number, s.asked, s.answered, s.p99_ms, s.refused, s.gave_up]
                    )
    if arguments.svg:
        asked = [second.asked for second in without]
        answered = [[second.answered for second in run] for run in (without, with_tollgate)]
        draw(arguments.svg, asked, *answered)


if __name__ == "__main__":
    main()
