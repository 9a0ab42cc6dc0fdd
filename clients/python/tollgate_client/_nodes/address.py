"""Addresses of nodes."""

from __future__ import annotations

import ipaddress
import re
import socket
from typing import Any, List, NamedTuple, Optional, Sequence

from ..errors import SettingsError

_AUTHORITY = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._~-]+):(?P<port>[0-9]{1,5})")


class Socket(NamedTuple):
    """An IP address with a port."""

    ip: str
    port: int

    @property
    def target(self) -> str:
        """The same as gRPC reads it."""
        return f"ipv6:[{self.ip}]:{self.port}" if ":" in self.ip else f"ipv4:{self.ip}:{self.port}"


class Address(NamedTuple):
    """``HOST:PORT`` of a node, or of a name that has several."""

    host: str
    """The host name or IP address, without brackets."""
    port: int
    is_https: bool
    """Whether the text named the scheme ``https``."""

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_remote(self) -> bool:
        """Whether a connection leaves the machine: the host is neither ``localhost`` nor a loopback
        or unspecified address."""
        try:
            ip = ipaddress.ip_address(self.host)
        except ValueError:
            return self.host.lower() != "localhost"
        return not (ip.is_loopback or ip.is_unspecified)


def parse(text: str) -> Address:
    """Reads ``HOST:PORT``, ``http://HOST:PORT`` or ``https://HOST:PORT``. Raises
    ``SettingsError``."""
    scheme, separator, bare = text.partition("://")
    if not separator:
        scheme, bare = "http", text
    match = _AUTHORITY.fullmatch(bare[:-1] if bare.endswith("/") else bare)
    if scheme not in ("http", "https") or match is None or int(match["port"]) > 65535:
        raise SettingsError(f'"{text}" is not a valid address: write HOST:PORT')
    return Address(match["host"].strip("[]"), int(match["port"]), scheme == "https")


def literal(address: Address) -> Optional[Socket]:
    """The address itself if it is an IP address; ``None`` if it is a name to be resolved."""
    try:
        ipaddress.ip_address(address.host)
    except ValueError:
        return None
    return Socket(address.host, address.port)


def target(address: Address) -> str:
    """The address as gRPC reads it, which resolves it if it is a name."""
    socket = literal(address)
    return f"dns:///{address}" if socket is None else socket.target


RESOLVER_ARGUMENTS = {"family": socket.AF_UNSPEC, "type": socket.SOCK_STREAM}
"""The arguments of ``getaddrinfo`` besides host and port."""


def sockets(found: Sequence[Any]) -> List[Socket]:
    """The answer of ``getaddrinfo``, without duplicates."""
    return sorted({Socket(sockaddr[0], sockaddr[1]) for *_, sockaddr in found})
