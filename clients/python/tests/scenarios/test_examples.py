"""The programs in `examples`, run as their first lines say, but for a shorter time."""

from __future__ import annotations

import contextlib
import csv
import http.client
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import tollgate_client

from ..harness.processes import Node, Process, free_port
from ..harness.waiting import LIMIT, polls

EXAMPLES = Path(__file__).parents[2] / "examples"
LIMITS = Path(__file__).parents[4] / "config/limits.yaml"

Start = Callable[..., Node]


def command(name: str, *arguments: str) -> List[str]:
    return [sys.executable, "-B", str(EXAMPLES / name), *arguments]


def environment(node: Node, **variables: str) -> Dict[str, str]:
    """Has an example ask this node."""
    path = str(Path(tollgate_client.__file__).parents[1])
    return {**os.environ, "PYTHONPATH": path, "TOLLGATE_ADDRESS": node.grpc, **variables}


def run(node: Node, name: str, *arguments: str) -> str:
    """What an example prints."""
    done = subprocess.run(
        command(name, *arguments),
        env=environment(node),
        capture_output=True,
        text=True,
        timeout=3 * LIMIT,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_database_is_protected(start: Start, tmp_path: Path) -> None:
    node = start((EXAMPLES / "protect_a_database.yaml").read_text())
    numbers, picture = tmp_path / "numbers.csv", tmp_path / "picture.svg"
    files = ["--csv", str(numbers), "--svg", str(picture)]
    printed = run(node, "protect_a_database.py", "--seconds", "5", *files)
    with numbers.open(newline="") as file:
        rows = list(csv.DictReader(file))

    def answered(run: str, seconds: range) -> int:
        of_run = [row for row in rows if row["run"] == run]
        return sum(int(of_run[second]["answered"]) for second in seconds)

    assert len(rows) == 10 and printed.count("\n     4 ") == 2
    assert picture.read_text().count("<polyline") == 3
    assert answered("without", range(1)) > 0
    # At the height of the load, and after it.
    assert answered("with", range(2, 5)) > 3 * answered("without", range(2, 5))
    # The node has decided, not the fallback.
    assert node.decisions(outcome="granted") > 100


def test_a_fleet_shares_a_rate(start: Start) -> None:
    node = start((EXAMPLES / "fleet.yaml").read_text())
    printed = run(node, "fleet.py", "--seconds", "9")
    lines = [line.split() for line in printed.splitlines()]
    rows = [[float(number) for number in line[1:]] for line in lines if line[0].isdigit()]
    assert len(rows) == 9 and all(len(row) == 5 for row in rows)
    assert sum(row[4] for row in rows) <= 110 * len(rows)
    # The first worker is killed after three seconds, the second leaves after six. Each may query
    # once more before it does.
    assert [row[0] for row in rows[4:]] == [0] * 5
    assert rows[8][1] == 0
    # With the share of either of them left unused, the others would have 75 at most.
    assert 80 < max(row[4] for row in rows[7:]) and sum(row[4] for row in rows[7:]) <= 2 * 110


def test_logins_are_limited_behind_starlette(start: Start, ending: Any) -> None:
    node, port = start(LIMITS.read_text()), free_port()
    server = Process(
        command("starlette_logins.py"),
        env=environment(node, PORT=str(port)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    ending.callback(server.close)

    def ask(method: str, path: str, address: str = "127.0.0.1") -> Tuple[int, str]:
        """The status and `Retry-After` that a caller with this address gets."""
        here = (address, 0)
        with contextlib.closing(
            http.client.HTTPConnection("127.0.0.1", port, LIMIT, source_address=here)
        ) as connection:
            connection.request(method, path)
            answer = connection.getresponse()
            answer.read()
            return answer.status, answer.getheader("Retry-After", "")

    for _ in polls("the server listens"):
        with contextlib.suppress(ConnectionRefusedError):
            assert ask("GET", "/") == (200, "")
            break
    assert ask("POST", "/login") == (200, "")
    for _ in polls("logins are refused"):
        status, retry_after = ask("POST", "/login")
        if status != 200:
            break
    assert (status, retry_after) == (429, "1")
    assert ask("POST", "/login", "127.0.0.2") == (200, "")
    assert ask("GET", "/") == (200, "")
    assert node.decisions(namespace="TheBrain_userLogins", outcome="granted") >= 6
