"""What gRPC's own client sees of compressed requests, long ones, and deadlines.

Usage: edge.py HOST:PORT
Messages are written by hand, so that no generated code is needed.
"""

import sys

import grpc

PATIENCE_S = 20
ALLOW = "/quotaservice.QuotaService/Allow"
LEASES = "/doorman.Capacity/GetCapacity"

checked = 0


def check(what, is_true, seen):
    """Fails the program unless it is true."""
    global checked
    checked += 1
    if not is_true:
        raise SystemExit(f"{what}: {seen!r}")


def text(number, value):
    """A field with a text of at most 127 bytes."""
    value = value.encode()
    return bytes([number << 3 | 2, len(value)]) + value


def call(channel, path, message, **options):
    """The code of a unary call."""
    asked = channel.unary_unary(path)
    try:
        asked(message, timeout=options.pop("timeout", PATIENCE_S), **options)
        return grpc.StatusCode.OK, ""
    except grpc.RpcError as error:
        return error.code(), error.details()


def main(target):
    code = grpc.StatusCode
    channel = grpc.insecure_channel(target)
    allow = text(1, "shop") + text(2, "b")
    padding = text(15, "x" * 100)

    gzip = grpc.Compression.Gzip
    for message in [allow, allow + padding, b""]:
        seen = call(channel, ALLOW, message, compression=gzip)
        check("gzip", seen[0] is code.OK, seen)
    # A client that compresses all that it sends.
    compressing = grpc.insecure_channel(target, compression=gzip)
    for path in [ALLOW, "/grpc.health.v1.Health/Check", "/doorman.Capacity/Discovery"]:
        seen = call(compressing, path, b"")
        check(f"gzip to {path}", seen[0] is code.OK, seen)
    # 4 MB that are few bytes on the wire.
    seen = call(channel, LEASES, padding * 40000, compression=gzip)
    check("a bomb", seen[0] is code.OUT_OF_RANGE, seen)
    seen = call(channel, ALLOW, allow + padding, compression=grpc.Compression.Deflate)
    check("deflate", seen[0] is code.UNIMPLEMENTED and "gzip" in seen[1], seen)

    # Refused by the announced length, while it is being sent.
    for _ in range(20):
        seen = call(channel, LEASES, padding * 30000)
        check("a long request", seen[0] is code.OUT_OF_RANGE, seen)
    # A deadline that passes while a long request is on its way.
    for timeout in [0.001, 0.002, 0.005, 0.01]:
        for _ in range(20):
            seen = call(channel, ALLOW, padding * 30000, timeout=timeout)
            check("a deadline", seen[0] in (code.DEADLINE_EXCEEDED, code.OK), seen)
    seen = call(channel, "/no.Such/Method", allow)
    check("a method", seen == (code.UNIMPLEMENTED, "unknown method /no.Such/Method"), seen)
    # gRPC takes 8 kB of metadata by default, and checks what is sent against what a server takes.
    metadata = [("x-large", "x" * (20 << 10))]
    seen = call(channel, ALLOW, allow, metadata=metadata)
    check("metadata", seen[0] is code.RESOURCE_EXHAUSTED and "metadata" in seen[1], seen)
    seen = call(channel, ALLOW, allow)
    check("afterwards", seen[0] is code.OK, seen)
    print(f"{checked} checked")


if __name__ == "__main__":
    main(sys.argv[1])
