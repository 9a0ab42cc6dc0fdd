"""Calls of clients that name a node in ways which are not a host and a port."""

import sys
import threading
import time
from typing import List, Tuple

import grpc

METHOD = "/quotaservice.QuotaService/Allow"
PATIENCE_S = 20

# AllowRequest: namespace "ns", bucket_name "b".
REQUEST = b"\x0a\x02ns\x12\x01b"

AUTHORITIES = ["node", "a%2Cb", "a:b:c", "::1", "/tmp/socket", "a b", "1.1.1.1:1,2.2.2.2:2", ""]

# One attempt is made again where a node said that it has not looked at it.
RETRIES = """{"methodConfig": [{"name": [{}], "retryPolicy": {"maxAttempts": 5,
 "initialBackoff": "0.1s", "maxBackoff": "1s", "backoffMultiplier": 2,
 "retryableStatusCodes": ["UNAVAILABLE"]}}]}"""


def allow(channel: grpc.Channel):
    return channel.unary_unary(METHOD)


def each_authority(address: str) -> None:
    """Several calls with each: the first sends it, the others refer to it."""
    for authority in AUTHORITIES:
        options = [("grpc.default_authority", authority)]
        with grpc.insecure_channel(address, options) as channel:
            for _ in range(3):
                allow(channel)(REQUEST, timeout=PATIENCE_S)
        print(f"{authority!r}: OK", flush=True)


def list_of_addresses(addresses: List[str]) -> None:
    """Calls all nodes in turn, until a line comes on standard input; prints what failed."""
    target = "ipv4:" + ",".join(addresses)
    options = [
        ("grpc.lb_policy_name", "round_robin"),
        ("grpc.service_config", RETRIES),
        ("grpc.max_reconnect_backoff_ms", 500),
    ]
    stop = threading.Event()
    counts: List[Tuple[int, List[str]]] = []
    with grpc.insecure_channel(target, options) as channel:

        def caller() -> None:
            done, failed = 0, []
            while not stop.is_set():
                try:
                    allow(channel)(REQUEST, timeout=PATIENCE_S)
                    done += 1
                except grpc.RpcError as error:
                    failed.append(f"{error.code().name}: {error.details()}")
                time.sleep(0.005)
            counts.append((done, failed))

        allow(channel)(REQUEST, timeout=PATIENCE_S, wait_for_ready=True)
        callers = [threading.Thread(target=caller) for _ in range(4)]
        for thread in callers:
            thread.start()
        print("calling", flush=True)
        sys.stdin.readline()
        stop.set()
        for thread in callers:
            thread.join()
    failures = [failure for _, failed in counts for failure in failed]
    print(f"done {sum(done for done, _ in counts)} failed {len(failures)}", flush=True)
    for failure in sorted(set(failures)):
        print(failure, flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "each":
        each_authority(sys.argv[2])
    else:
        list_of_addresses(sys.argv[2:])
