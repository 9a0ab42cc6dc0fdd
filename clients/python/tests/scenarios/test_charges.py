"""What requests have cost beyond their tokens."""

from __future__ import annotations

from ..harness.waiting import eventually
from .test_processes import run

LIMITS = """namespaces:
  a:
    buckets:
      rows: { size: 10000, fill_rate: 1/h, max_tokens_per_request: 1000 }
"""


def test_charges_are_taken_from_the_bucket(connect, start):
    node = start(LIMITS)
    clients = [connect(node.grpc) for _ in range(2)]
    for _ in range(500):
        for client in clients:
            client.charge("a", "rows", 7)

    def granted() -> float:
        return node.metric("tollgate_tokens_granted_total", namespace="a", bucket="rows")

    eventually("all is charged", lambda: granted() >= 7000)
    for client in clients:
        client.end()
    assert granted() == 7000


def test_charges_of_the_parent_are_not_taken_by_the_child(start):
    node = start(LIMITS)
    program = """
        import time

        def is_open(client):
            return not all(one.desk.is_empty for one in client._kept.values())

        def charge():
            client.charge("a", "rows", 20)
            while is_open(client):
                time.sleep(0.01)
            client.close()

        def charge_in_loop():
            async def use():
                aio_client.charge("a", "rows", 300)
                while is_open(aio_client):
                    await asyncio.sleep(0.01)
                await aio_client.close()
            asyncio.run(use())

        # Connected before, so that no other thread calls during the fork.
        client.acquire("a", "rows")
        client.charge("a", "rows", 1)
        in_child(charge)
        in_child(charge_in_loop)
        in_child(client.close)
        while is_open(client):
            time.sleep(0.01)
        client.close()
    """
    run(program, node.grpc)
    assert node.metric("tollgate_tokens_granted_total", namespace="a", bucket="rows") == 322
