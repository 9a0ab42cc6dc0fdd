"""Asks a node for capacity as any gRPC client would, and checks what it answers.

The node has the limits of limits.yaml beside this file and an empty store. Needs the messages
of proto/doorman.proto, generated, on PYTHONPATH.

    python3 worked_examples.py ADDRESS MASTER_ADDRESS
"""

import itertools
import math
import sys
from typing import Callable, Dict, Iterator, List, Sequence, Tuple

import doorman_pb2 as messages
import grpc
from checks import (
    PATIENCE_S,
    PRECISION,
    TEMPLATES,
    Bands,
    Checks,
    Node,
    Want,
    get_request,
    lease,
    server_request,
)

Order = Tuple[int, ...]

# Resources, what each client wants, and what it then gets.
WORKED_EXAMPLES: List[Tuple[str, List[float], List[float]]] = [
    ("fair-120", [1000, 50, 10], [60, 50, 10]),
    ("proportional-120", [1000, 50, 10], [69.69072165, 40.309278351, 10]),
    ("proportional-90", [100, 50, 10], [45 + 5 / 9, 34 + 4 / 9, 10]),
    ("fair-160", [100, 50, 45, 10], [55, 50, 45, 10]),
]


def rounds_of(clients: int) -> Iterator[List[Order]]:
    """Every order of asking, each with several orders of the two refreshes after it."""
    for asking in itertools.permutations(range(clients)):
        back = asking[::-1]
        shifted = asking[1:] + asking[:1]
        for refreshes in [(asking, asking), (back, asking), (shifted, back)]:
            yield [asking, *refreshes]


def capacities(answers: Sequence[messages.ResourceResponse]) -> List[float]:
    return [answer.gets.capacity for answer in answers]


def worked_example(
    node: Node, kind: str, number: int, rounds: List[Order], wants: List[float], gets: List[float]
) -> None:
    checks = node.checks
    capacity = TEMPLATES[kind].capacity
    resource = f"{kind}/{number}"
    held: Dict[int, messages.Lease] = {}
    for turn, order in enumerate(rounds):
        for client in order:
            has = held.get(client)
            answer = node.get_one(f"client-{client}", Want(resource, wants[client], has))
            held[client] = answer.gets
            what = f"{resource}, orders {rounds}, round {turn}, client {client}"
            total = sum(each.capacity for each in held.values())
            # Sums of doubles are off by their last bits.
            checks.within(f"{what}: sum of has", total, 0, capacity * (1 + PRECISION))
            safe = capacity / len(held)
            checks.close(f"{what}: safe_capacity", answer.safe_capacity, safe, capacity)
    for client, expected in enumerate(gets):
        what = f"{resource}, orders {rounds}: what client {client} has"
        checks.close(what, held[client].capacity, expected, capacity)


def worked_examples(node: Node) -> None:
    for kind, wants, gets in WORKED_EXAMPLES:
        for number, rounds in enumerate(rounds_of(len(wants))):
            worked_example(node, kind, number, rounds, wants, gets)


def discovery(node: Node, master_address: str) -> None:
    answer = node.discovery()
    node.checks.equal("Discovery: is_master", answer.is_master, True)
    found = answer.mastership.master_address
    node.checks.equal("Discovery: master_address", found, master_address)


def enough_for_all(node: Node) -> None:
    for kind in ("fair-120", "proportional-120"):
        for client, wants in enumerate([20.5, 0, 60, 39.5]):
            answer = node.get_one(f"client-{client}", Want(f"{kind}/enough", wants))
            node.checks.equal(f"{kind}: wants {wants} of plenty", answer.gets.capacity, wants)


def static(node: Node) -> None:
    """Each client has the whole capacity to itself."""
    for client, (wants, gets) in enumerate([(100, 40), (25, 25), (100, 40)]):
        answer = node.get_one(f"client-{client}", Want("static-40/a", wants))
        node.checks.equal(f"static: wants {wants}", answer.gets.capacity, gets)


def unmatched(node: Node) -> None:
    """What no template matches is honoured as it stands. A `*` stops at `/`."""
    for resource in ("unmatched", "fair-120", "fair-120/a/b", "a/fair-120/b", "fair-1200/a"):
        answer = node.get_one("client", Want(resource, 12345.5))
        node.checks.equal(f"{resource}: unmatched", answer.gets.capacity, 12345.5)


def several_resources(node: Node) -> None:
    wants = [
        Want("static-40/several", 50),
        Want("fair-120/several", 130),
        Want("proportional-90/several", 80),
        Want("fair-120/other", 5),
    ]
    found = capacities(node.get("client", wants))
    node.checks.equal("several", found, [40, 120, 80, 5])
    # Each is what the first client has left, in the order asked.
    found = capacities(node.get("another", wants[::-1]))
    node.checks.equal("several, another client", found, [5, 10, 0, 40])
    node.checks.equal("nothing asked", node.get("client", []), [])


def release(node: Node) -> None:
    fair, proportional = "fair-120/release", "proportional-90/release"
    wants = [Want(fair, 60), Want(proportional, 60)]
    node.get("holder", [Want(fair, 120), Want(proportional, 90)])
    found = capacities(node.get("next", wants))
    node.checks.equal("while another holds all", found, [0, 0])
    node.release("stranger", [fair, proportional])
    found = capacities(node.get("next", wants))
    node.checks.equal("after a stranger has released", found, [0, 0])
    node.release("holder", [fair, "never-heard-of"])
    answers = node.get("next", wants)
    node.checks.equal("once one is released", capacities(answers), [60, 0])
    found = [answer.safe_capacity for answer in answers]
    node.checks.equal("safe_capacity once one is released", found, [120, 45])
    node.release("holder", [fair, proportional])
    found = capacities(node.get("next", wants))
    node.checks.equal("once both are released", found, [60, 60])


def bands(node: Node) -> None:
    """A cluster counts as its clients together.

    FAIR_SHARE of 120: two clients in one band and one in another want 70 and 50, a client of
    ours 100. At a level of 30 that is min(120, 3 * 30) + min(100, 30) = 120.

    PROPORTIONAL_SHARE of 120 among the same and a client that wants 4: an equal share is
    120 / 5 = 24, the cluster's 72. The last leaves 20 of its own; the others want 48 and 76
    beyond theirs.
    """
    cluster = [(1, 2, 70.0), (2, 1, 50.0)]
    cases: List[Tuple[str, float, Dict[str, Tuple[float, float]]]] = [
        ("fair-120/bands", 90, {"big": (100, 30)}),
        (
            "proportional-120/bands",
            72 + 20 * 48 / 124,
            {"big": (100, 24 + 20 * 76 / 124), "small": (4, 4)},
        ),
    ]
    for resource, cluster_gets, clients in cases:
        held: Dict[str, messages.Lease] = {}
        for _ in range(3):
            answer = node.get_server("cluster", [Bands(resource, cluster)])[0]
            for client, (wants, _) in clients.items():
                held[client] = node.get_one(client, Want(resource, wants)).gets
        node.checks.close(f"{resource}: cluster", answer.gets.capacity, cluster_gets, 120)
        safe = 120 / (3 + len(clients))
        node.checks.close(f"{resource}: safe_capacity", answer.safe_capacity, safe, 120)
        for client, (_, gets) in clients.items():
            node.checks.close(f"{resource}: {client}", held[client].capacity, gets, 120)


def refuses(checks: Checks, field: str, call: Callable[..., object], request: object) -> None:
    """INVALID_ARGUMENT, with a message that names the field."""
    what = f"{type(request).__name__} with a wrong {field}: {request}"
    expected = ("INVALID_ARGUMENT", f"… {field} …")
    try:
        answer = call(request, timeout=PATIENCE_S)
    except grpc.RpcError as error:
        invalid = error.code() == grpc.StatusCode.INVALID_ARGUMENT
        holds = invalid and field in error.details()
        checks.that(holds, what, (error.code().name, error.details()), expected)
    else:
        checks.that(False, what, answer, expected)


def refusals_of_clients(node: Node) -> None:
    resource = "fair-120/refusals"
    wrong: List[Tuple[str, str, List[Want]]] = [
        ("client_id", "", [Want(resource, 1)]),
        ("client_id", "", []),
        ("resource_id", "client", [Want("", 1)]),
        # The right ones before it must not be recorded.
        ("resource_id", "client", [Want(resource, 120), Want("", 1)]),
        ("resource", "client", [Want(resource, 120), Want(resource, 1)]),
    ]
    for number in (-1.0, -1e-300, math.nan, math.inf, -math.inf):
        wrong.append(("wants", "client", [Want(resource, number)]))
        wrong.append(("has", "client", [Want(resource, 1, has=lease(number))]))
    for field, client, wants in wrong:
        request = get_request(client, wants)
        refuses(node.checks, field, node.stub.GetCapacity, request)
    found = node.get_one("another", Want(resource, 120)).gets.capacity
    node.checks.equal("refused requests take nothing", found, 120)


def refusals_of_clusters(node: Node) -> None:
    resource = "fair-120/cluster-refusals"
    wrong: List[Tuple[str, str, List[Bands]]] = [
        ("server_id", "", [Bands(resource, [(0, 1, 1.0)])]),
        ("resource_id", "cluster", [Bands("", [(0, 1, 1.0)])]),
        ("resource", "cluster", [Bands(resource, [(0, 1, 120.0)])] * 2),
        ("num_clients", "cluster", [Bands(resource, [(0, -1, 1.0)])]),
    ]
    for number in (-1.0, math.nan, math.inf, -math.inf):
        wrong.append(("wants", "cluster", [Bands(resource, [(0, 1, 1.0), (1, 1, number)])]))
        wrong.append(("has", "cluster", [Bands(resource, [(0, 1, 1.0)], has=lease(number))]))
    for field, server, wants in wrong:
        request = server_request(server, wants)
        refuses(node.checks, field, node.stub.GetServerCapacity, request)
    found = node.get_one("another", Want(resource, 120)).gets.capacity
    node.checks.equal("refused requests of clusters take nothing", found, 120)


def refusals_of_releases(node: Node) -> None:
    resource = "fair-120/release-refusals"
    node.get_one("client", Want(resource, 120))
    request = messages.ReleaseCapacityRequest(client_id="", resource_id=[resource])
    refuses(node.checks, "client_id", node.stub.ReleaseCapacity, request)
    found = node.get_one("another", Want(resource, 1)).gets.capacity
    node.checks.equal("refused releases give nothing back", found, 0)
    # As older clients close: with as many empty names as there are resources before those.
    request = messages.ReleaseCapacityRequest(
        client_id="client", resource_id=["", "", resource, resource]
    )
    node.stub.ReleaseCapacity(request)
    found = node.get_one("another", Want(resource, 1)).gets.capacity
    node.checks.equal("empty and repeated names mean nothing", found, 1)


def main(address: str, master_address: str) -> int:
    checks = Checks()
    node = Node(address, checks)
    discovery(node, master_address)
    for check in (
        worked_examples,
        enough_for_all,
        static,
        unmatched,
        several_resources,
        release,
        bands,
        refusals_of_clients,
        refusals_of_clusters,
        refusals_of_releases,
    ):
        before = checks.failures
        check(node)
        failed = checks.failures - before
        print(f"{check.__name__}: {f'{failed} FAILED' if failed else 'ok'}", flush=True)
    print(f"{checks.compared} compared, {checks.failures} failed")
    return 1 if checks.failures else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
