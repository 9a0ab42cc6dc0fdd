"""TLS, client certificates and tokens."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import Tuple

import pytest

from tollgate_client import DecidedBy, Fallback, NoDecisionError

from ..harness.certificates import Authority, Pair
from ..harness.clients import ask_until_decided_by
from ..harness.processes import binary


def tls(own: Pair, authority: Authority) -> Tuple[str, ...]:
    files = ("--tls-cert-file", own.certificate, "--tls-key-file", own.key)
    return (*files, "--tls-client-ca-file", authority.file)


def test_tls_with_a_certificate_of_the_client(connect, start, tmp_path):
    ca, other = Authority(tmp_path / "ca"), Authority(tmp_path / "other")
    node = start("global_default_bucket: {}", *tls(ca.server("own"), ca))
    address = f"https://{node.grpc}"
    mine, stranger = ca.client("a")._asdict(), other.client("a")._asdict()
    client = connect(address, ca_file=ca.file, **mine)
    assert client.allow("a", "b").decided_by is DecidedBy.NODE
    # By a name that resolves, and whose certificate is of another name.
    named = connect(f"localhost:{node.port}", ca_file=ca.file, server_name="127.0.0.1", **mine)
    assert named.allow("a", "b").decided_by is DecidedBy.NODE
    # Each of these is refused during the handshake, and the fallback decides.
    for refused in (
        connect(address, fallback=Fallback.DENY, ca_file=ca.file),
        connect(address, fallback=Fallback.DENY, ca_file=ca.file, **stranger),
        connect(address, fallback=Fallback.DENY, ca_file=other.file, **mine),
        connect(
            address, fallback=Fallback.DENY, ca_file=ca.file, server_name="node.example", **mine
        ),
        connect(node.grpc, fallback=Fallback.DENY),
    ):
        assert refused.allow("a", "b").decided_by is DecidedBy.FALLBACK
    assert client.allow("a", "b").decided_by is DecidedBy.NODE


def test_certificates_that_are_replaced(connect, start, tmp_path):
    ca, other = Authority(tmp_path / "ca"), Authority(tmp_path / "other")
    node = start("global_default_bucket: {}", *tls(ca.server("own"), ca))
    mine, root = ca.client("a"), tmp_path / "root.pem"
    shutil.copy(ca.file, root)
    client = connect(f"https://{node.grpc}", ca_file=root, fallback=Fallback.DENY, **mine._asdict())
    assert client.allow("a", "b").decided_by is DecidedBy.NODE
    # The node comes back with certificates of another authority.
    node.kill()
    start("global_default_bucket: {}", *tls(other.server("own"), other), port=node.port)
    ask_until_decided_by(client, DecidedBy.FALLBACK)
    for new, old in zip(other.client("a"), mine):
        os.replace(new, old)
    shutil.copy(other.file, root)
    ask_until_decided_by(client, DecidedBy.NODE)


def token() -> Tuple[str, str]:
    """A new token and its hash."""
    made = subprocess.run([binary(), "token"], capture_output=True, text=True, check=True).stdout
    values = dict(line.split(None, 1) for line in made.splitlines() if " " in line)
    return values["token"].strip(), values["token_sha256"].strip()


def test_a_token_that_is_replaced(connect, start, tmp_path):
    (first, first_hash), (second, second_hash) = token(), token()
    access, file = tmp_path / "access.yaml", tmp_path / "token"

    def accept(hash: str) -> None:
        access.write_text(f"callers: [{{ name: a, token_sha256: [{hash}], namespaces: ['a'] }}]")

    accept(first_hash)
    file.write_text(first)
    node = start("global_default_bucket: {}", "--access", str(access))
    client = connect(node.grpc, token_file=file, fallback=Fallback.DENY)
    assert client.allow("a", "b").decided_by is DecidedBy.NODE
    # Without the right there is no decision, but the node is well.
    assert client.allow("other", "b").decided_by is DecidedBy.FALLBACK
    assert client.allow("a", "b").decided_by is DecidedBy.NODE
    with pytest.raises(NoDecisionError, match="no decision: Unauthenticated: "):
        connect(node.grpc).allow("a", "b")
    # The node takes only the second token now, which the client reads from its file.
    accept(second_hash)
    ask_until_decided_by(client, DecidedBy.FALLBACK)
    file.write_text(second)
    ask_until_decided_by(client, DecidedBy.NODE)
