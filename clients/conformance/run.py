#!/usr/bin/env python3
"""Many processes of the three libraries use one bucket and one resource at once; see README.md.

  run.py SERVER REDIS_SERVER RUST_WORKER PYTHON GO_WORKER

The arguments are the paths of programs. Exits with 1 if a process fails, or was granted too much.
"""

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request

WORKERS = 17  # Of each language.
SECONDS = 8.0
TOKENS = 1000
CAPACITY = 300
LIMIT = 60.0  # Seconds that anything may take, even on a busy machine.

LIMITS = f"""namespaces:
  shared:
    buckets:
      books: {{ size: {TOKENS}, fill_rate: 1/d, wait_timeout_millis: 0 }}
resources:
  - identifier_glob: shared
    capacity: {CAPACITY}
    algorithm: {{ kind: FAIR_SHARE, lease_length: 20, refresh_interval: 1, learning_mode_duration: 0 }}
"""


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Node:
    def __init__(self, server, limits, store):
        listen = ["--grpc-listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0"]
        command = [server, "serve", "--limits", limits, "--log-format", "json", "--store", store]
        self.log = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [*command, *listen, "--store-timeout", "20s"], stderr=self.log
        )
        processes.append(self.process)

    def wait(self):
        end = time.monotonic() + LIMIT
        while time.monotonic() < end:
            self.log.seek(0)
            for line in self.log:
                event = json.loads(line) if line.startswith("{") else {}
                if event.get("message") == "serving":
                    self.grpc, self.http = event["grpc"], event["http"]
                    return
            time.sleep(0.05)
        raise SystemExit("a node does not start")

    def leased(self):
        with urllib.request.urlopen(f"http://{self.http}/metrics", timeout=LIMIT) as answer:
            text = answer.read().decode()
        return sum(float(n) for n in re.findall(r"^tollgate_resource_has\{.*\} (\S+)$", text, re.M))


def run(server, redis_server, rust, python, go):
    port = free_port()
    redis = [redis_server, "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    processes.append(subprocess.Popen(redis, stdout=subprocess.DEVNULL))
    limits = tempfile.NamedTemporaryFile("w", suffix=".yaml")
    limits.write(LIMITS)
    limits.flush()
    nodes = [Node(server, limits.name, f"redis://127.0.0.1:{port}") for _ in range(2)]
    for node in nodes:
        node.wait()
    here = os.path.dirname(os.path.abspath(__file__))
    commands = {
        "Rust": [rust],
        "Python": [python, os.path.join(here, "worker.py")],
        "Go": [go],
    }
    environment = {**os.environ, "TOLLGATE_ADDRESS": ",".join(node.grpc for node in nodes)}
    workers = []
    for language, command in commands.items():
        for _ in range(WORKERS):
            worker = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
            )
            processes.append(worker)
            workers.append((language, worker))
    for language, worker in workers:
        if worker.stdout.readline() != "ready\n":
            raise SystemExit(f"a worker in {language} does not start")
    begin = time.monotonic()
    for _, worker in workers:
        worker.stdin.write(f"{SECONDS}\n")
        worker.stdin.flush()
    leased = []
    while any(worker.poll() is None for _, worker in workers):
        leased.append(max(node.leased() for node in nodes))
        if time.monotonic() > begin + LIMIT:
            raise SystemExit("the workers do not end")
        time.sleep(0.1)
    return workers, leased, time.monotonic() - begin


def judge(workers, leased, seconds):
    failed = [language for language, worker in workers if worker.returncode != 0]
    if failed:
        raise SystemExit(f"workers that failed: {', '.join(failed)}")
    granted, used = {}, {}
    for language, worker in workers:
        of_worker = [int(number) for number in worker.stdout.read().split()]
        granted[language] = granted.get(language, 0) + of_worker[0]
        used[language] = used.get(language, 0) + of_worker[1]
    # Each process may use one at once beyond its rate.
    most = CAPACITY * seconds + len(workers)
    print(f"{len(workers)} processes; granted {granted} of {TOKENS}")
    print(f"used {used} of {most:.0f} in {seconds:.1f} s; leased up to {max(leased):.0f} of {CAPACITY}")
    faults = []
    if sum(granted.values()) != TOKENS:
        faults.append("not as many tokens were granted as there were")
    if max(leased) > CAPACITY * (1 + 1e-9):
        faults.append("more was leased than there was")
    if sum(used.values()) > most:
        faults.append("more was used than the capacity")
    if min(granted.values()) == 0 or min(used.values()) == 0:
        faults.append("one language got nothing")
    if faults:
        raise SystemExit("; ".join(faults))


processes = []
try:
    judge(*run(*sys.argv[1:]))
finally:
    for process in reversed(processes):
        process.kill()
        process.wait()
