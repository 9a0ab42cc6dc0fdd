"""Settings: of the constructor, of the environment, and those that make no client."""

from __future__ import annotations

import pytest

from tollgate_client import Client, SettingsError, aio
from tollgate_client._decide import settings
from tollgate_client._nodes.address import parse, sockets

from ..harness.certificates import Authority


def test_settings_in_the_environment(monkeypatch):
    values = {
        "TOLLGATE_ADDRESS": "a:1, https://b:2,",
        "TOLLGATE_CA_FILE": "/ca",
        "TOLLGATE_SERVER_NAME": "nodes",
        "TOLLGATE_CERT_FILE": "/cert",
        "TOLLGATE_KEY_FILE": "/key",
        "TOLLGATE_TOKEN_FILE": "/token",
    }
    assert settings._environment(values) == {
        "addresses": ["a:1", "https://b:2"],
        "ca_file": "/ca",
        "server_name": "nodes",
        "certificate": "/cert",
        "key": "/key",
        "token_file": "/token",
    }
    with pytest.raises(SettingsError, match="belong together"):
        settings._environment({"TOLLGATE_CERT_FILE": "/cert"})
    monkeypatch.setenv("TOLLGATE_ADDRESS", "a:1")
    assert repr(Client.from_env()) == "<Client of a:1>"
    assert repr(aio.Client.from_env(addresses=["b:1", "[::1]:2"])) == "<Client of b:1, [::1]:2>"


def test_settings_that_make_no_client(tmp_path):
    def text(*addresses: str, **options: object) -> str:
        with pytest.raises(SettingsError) as error:
            Client(addresses, **options)
        return str(error.value)

    assert text() == "no address of a node is given"
    assert text("a") == '"a" is not a valid address: write HOST:PORT'
    tls = "https://a:1 needs TLS: name the file of its CA certificates"
    assert text("https://a:1") == tls
    incomplete = "a certificate or a server name needs the file of the CA certificates"
    assert text("a:1", server_name="b") == incomplete
    assert text("a:1", certificate="b", key="c") == incomplete
    assert text("a:1", certificate="b") == "a certificate and its key belong together"
    assert text("a:1", token_file="/nowhere/token").startswith("can't read /nowhere/token: ")
    assert text("a:1", deadline=-1.0) == "a deadline of -1.0 seconds"
    junk = tmp_path / "junk"
    junk.write_text("two words")
    assert "is not a token" in text("a:1", token_file=junk)
    assert text("a:1", ca_file=junk).startswith(f"{junk} can't be used: ")
    ca, other = Authority(tmp_path / "ca"), Authority(tmp_path / "other")
    one, another = ca.client("one"), other.client("another")
    found = text("a:1", ca_file=ca.file, certificate=one.certificate, key=another.key)
    assert found.startswith(f"{one.certificate} can't be used: ")


def test_valid_addresses():
    for text, shown, host, https in (
        ("127.0.0.1:1", "127.0.0.1:1", "127.0.0.1", False),
        ("http://node-1:10990/", "node-1:10990", "node-1", False),
        ("https://localhost:10991", "localhost:10991", "localhost", True),
        ("[::1]:65535", "[::1]:65535", "::1", False),
    ):
        address = parse(text)
        assert (str(address), address.host, address.is_https) == (shown, host, https)


def test_invalid_addresses():
    for text in (
        *("", "localhost", ":1", "h:", "h:x", "h:65536", "h h:1", "h\r\nX:1", "::1:1"),
        *("ftp://h:1", "https://", "http://h:1/path", "u@h:1", "h:1\n"),
    ):
        with pytest.raises(SettingsError, match="is not a valid address: write HOST:PORT"):
            parse(text)


def test_addresses_of_other_machines():
    for text in ("127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "LocalHost:1", "0.0.0.0:1", "[::]:1"):
        assert not parse(text).is_remote, text
    for text in ("10.0.0.1:1", "[2001:db8::1]:1", "node.example:1", "localhost.example:1"):
        assert parse(text).is_remote, text


def test_addresses_of_the_resolver():
    found = [
        (2, 1, 6, "", ("10.0.0.1", 5)),
        (2, 1, 6, "", ("10.0.0.1", 5)),
        (10, 1, 6, "", ("::1", 5, 0, 0)),
    ]
    assert [one.target for one in sockets(found)] == ["ipv4:10.0.0.1:5", "ipv6:[::1]:5"]
