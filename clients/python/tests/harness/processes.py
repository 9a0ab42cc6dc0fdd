"""Nodes and Redis as processes, on free ports. Each is killed by the end of its test."""

from __future__ import annotations

import json
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import urllib.request
from typing import Any, Dict, List, Optional

from .waiting import LIMIT, eventually


def binary() -> str:
    """The server."""
    path = os.environ.get("TOLLGATE_BINARY")
    assert path, "set TOLLGATE_BINARY to the path of the tollgate binary"
    return path


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class Process:
    """A process that is killed when its test ends."""

    def __init__(self, arguments: List[str], **options: Any) -> None:
        self.child = subprocess.Popen(arguments, **options)

    def signal(self, number: signal.Signals) -> None:
        self.child.send_signal(number)

    def has_ended(self) -> bool:
        return self.child.poll() is not None

    def kill(self) -> None:
        self.child.kill()
        self.child.wait()

    close = kill


class Node(Process):
    """A node that serves."""

    def __init__(self, limits: str, *arguments: str, port: int = 0) -> None:
        self._limits = tempfile.NamedTemporaryFile("w", suffix=".yaml")
        self._limits.write(limits)
        self._limits.flush()
        listen = ["--grpc-listen", f"127.0.0.1:{port}", "--http-listen", "127.0.0.1:0"]
        command = [binary(), "serve", "--limits", self._limits.name, "--log-format", "json"]
        super().__init__([*command, *listen, *arguments], stderr=subprocess.PIPE, text=True)
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        event = self._serving()
        self.grpc: str = event["grpc"]
        self.http: str = event["http"]

    @property
    def port(self) -> int:
        return int(self.grpc.rpartition(":")[2])

    def _read(self) -> None:
        assert self.child.stderr is not None
        for line in self.child.stderr:
            self._lines.put(line)

    def _serving(self) -> Dict[str, Any]:
        log = []
        while True:
            try:
                line = self._lines.get(timeout=LIMIT)
            except queue.Empty:
                self.close()
                raise AssertionError(f"the node does not start: {log}") from None
            log.append(line)
            event: Dict[str, Any] = json.loads(line) if line.startswith("{") else {}
            if event.get("message") == "serving":
                return event

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels."""
        with urllib.request.urlopen(f"http://{self.http}/metrics", timeout=LIMIT) as response:
            lines = response.read().decode().splitlines()
        total = 0.0
        for line in lines:
            sample = re.fullmatch(r"(\w+)(?:\{(.*)\})? (\S+)", line)
            if sample is None or sample[1] != name:
                continue
            has = dict(re.findall(r'(\w+)="([^"]*)"', sample[2] or ""))
            if all(has.get(label) == value for label, value in labels.items()):
                total += float(sample[3])
        return total

    def decisions(self, **labels: str) -> float:
        return self.metric("tollgate_decisions_total", **labels)

    def close(self) -> None:
        self.kill()
        self._reader.join()
        assert self.child.stderr is not None
        self.child.stderr.close()
        self._limits.close()


class Redis(Process):
    """A Redis server."""

    def __init__(self, port: Optional[int] = None) -> None:
        program = shutil.which("redis-server")
        assert program, "redis-server is not installed"
        self.port = port or free_port()
        settings = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        super().__init__([program, *settings, "--loglevel", "warning"], stdout=subprocess.DEVNULL)
        eventually("Redis answers", self._answers)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), LIMIT) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(100).startswith(b"+PONG")
        except ConnectionError:
            return False
