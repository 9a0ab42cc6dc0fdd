"""One of the processes of clients/conformance."""

import sys
import time

from tollgate_client import Client, DecidedBy, LeaseTimeoutError

with Client.from_env(deadline=20.0) as client:
    print("ready", flush=True)
    end = time.monotonic() + float(sys.stdin.readline())

    granted = 0
    for _ in range(40):
        decision = client.allow("shared", "books")
        if decision.is_granted:
            assert decision.decided_by is DecidedBy.NODE, decision
            granted += decision.tokens

    rate = client.rate_limiter("shared")
    used = 0
    try:
        while True:
            rate.wait(timeout=max(end - time.monotonic(), 0.0))
            used += 1
    except LeaseTimeoutError:
        pass
    print(granted, used, flush=True)
