"""The settings of a client: the same for the blocking and the asyncio client."""

from __future__ import annotations

import os
import random
import socket
import threading
import weakref
from typing import (
    Any,
    Dict,
    Iterable,
    List,
    Mapping,
    NamedTuple,
    Optional,
    TYPE_CHECKING,
    Tuple,
    Type,
    TypeVar,
    Union,
)

from .. import _fork
from .._nodes.address import Address, parse
from .._nodes.credentials import Credentials, Files
from ..errors import SettingsError
from ..fallback import Fallback, Fallbacks
from .decider import OnRefused, OnSoftLimited, OnTenantRefused, Rules
from .log import LOG

if TYPE_CHECKING:
    from ..fake import Fake

Path = Union[str, "os.PathLike[str]"]
C = TypeVar("C", bound="Configured")

DEADLINE = 0.2
"""The deadline in seconds of a request that has none of its own. A node needs up to 50 ms, or what
``--store-timeout`` says, to find that the store does not answer."""


class Servers(NamedTuple):
    """The nodes that a client was given, and how to connect to them."""

    addresses: List[Address]
    server_name: Optional[str]
    credentials: Credentials


class Configured:
    """A client with its settings, which connects on first use."""

    def __init__(
        self,
        addresses: Union[str, Iterable[str], Fake],
        *,
        fallback: Optional[Fallback] = None,
        namespace_fallbacks: Mapping[str, Fallback] = {},
        bucket_fallbacks: Mapping[Tuple[str, str], Fallback] = {},
        resource_fallbacks: Mapping[str, Fallback] = {},
        deadline: float = DEADLINE,
        ca_file: Optional[Path] = None,
        certificate: Optional[Path] = None,
        key: Optional[Path] = None,
        server_name: Optional[str] = None,
        token_file: Optional[Path] = None,
        client_id: Optional[str] = None,
        on_refused: Optional[OnRefused] = None,
        on_soft_limited: Optional[OnSoftLimited] = None,
        on_tenant_refused: Optional[OnTenantRefused] = None,
    ) -> None:
        """Reads the files, but connects only with the first request.

        addresses: one or several, each ``HOST:PORT``, ``http://HOST:PORT`` or
            ``https://HOST:PORT``. A name may have several addresses, each of which is a node; it is
            resolved again every 30 seconds. Calls are spread over all nodes that are well.
        fallback: what decides when no node does. Without it, that is an error.
        namespace_fallbacks: what decides for the buckets of a namespace instead.
        bucket_fallbacks: what decides for one bucket instead; the keys are pairs of namespace and
            bucket.
        resource_fallbacks: what decides for hits and holds on a resource instead of ``fallback``.
        deadline: the seconds to wait for an answer before the fallback decides. It includes
            connecting, and asking another node when one fails.
        ca_file: the CA certificates that the nodes' certificates are verified with (PEM): turns on
            TLS. This and the other files are read again when they change.
        certificate, key: the client's certificate and its private key (PEM).
        server_name: the name in the nodes' certificates, if it is not that of the address.
        token_file: a file whose only line is the bearer token for the nodes.
        client_id: the name that leases and holds have, which no other client may have at the same time;
            without it, host name, process id and a random number. After a fork, the child appends
            its process id.
        on_refused: called with each request that is refused, and the refusal, so that the
            application can serve less. It must not block.
        on_soft_limited: called with each request that is granted past the bucket's soft limit, and
            the grant: refusals may follow. It must not block.
        on_tenant_refused: the same as ``on_refused`` for hits and holds.

        Raises ``SettingsError``.
        """
        self._starting = threading.Lock()
        # What it keeps in the background, by its kind.
        self._kept: Dict[type, Any] = {}
        # What is called when it is collected; the last one first, so that the connections go last.
        self._finalizers: List[weakref.finalize[..., Any]] = []
        _fork.remember(self)
        self._given_id = client_id
        self._made_in = os.getpid()
        if not deadline >= 0:
            raise SettingsError(f"a deadline of {deadline} seconds")
        fallbacks = Fallbacks(fallback, namespace_fallbacks, bucket_fallbacks, resource_fallbacks)
        self._rules = Rules(deadline, fallbacks, on_refused, on_soft_limited, on_tenant_refused)
        self._backend: Union[Servers, Fake]
        if isinstance(addresses, (str, Iterable)):
            texts = [addresses] if isinstance(addresses, str) else list(addresses)
            files = Files(*(_text(path) for path in (ca_file, certificate, key, token_file)))
            self._backend = _servers(texts, files, server_name)
        else:
            self._backend = addresses

    def after_fork(self) -> None:
        """Has the client connect anew, in the child of a fork."""
        raise NotImplementedError

    def _detach(self) -> None:
        """What there is does not end with the client any more."""
        for finalizer in self._finalizers:
            finalizer.detach()
        self._finalizers = []

    @property
    def default_deadline(self) -> float:
        """The longest wait for an answer in seconds, for requests without one of their own."""
        return self._rules.deadline

    @classmethod
    def from_env(cls: Type[C], **settings: Any) -> C:
        """A client with the settings in the environment: ``TOLLGATE_ADDRESS``, one or more
        addresses separated by commas; and ``TOLLGATE_CA_FILE``, ``TOLLGATE_SERVER_NAME``,
        ``TOLLGATE_CERT_FILE`` with ``TOLLGATE_KEY_FILE``, and ``TOLLGATE_TOKEN_FILE``. The given
        settings count instead of them, or besides.

        Raises ``SettingsError``."""
        return cls(**{**_environment(os.environ), **settings})

    def _client_id(self) -> str:
        """The name that leases are held by."""
        process = os.getpid()
        if self._given_id is None:
            host = socket.gethostname() or "client"
            return f"{host}:{process}:{random.getrandbits(32):08x}"
        return self._given_id if process == self._made_in else f"{self._given_id}:{process}"

    def __repr__(self) -> str:
        if not isinstance(self._backend, Servers):
            return f"<{type(self).__qualname__} of a fake>"
        addresses = ", ".join(map(str, self._backend.addresses))
        return f"<{type(self).__qualname__} of {addresses}>"


def _environment(variables: Mapping[str, str]) -> Dict[str, Any]:
    certificate, key = variables.get("TOLLGATE_CERT_FILE"), variables.get("TOLLGATE_KEY_FILE")
    if bool(certificate) != bool(key):
        raise SettingsError("TOLLGATE_CERT_FILE and TOLLGATE_KEY_FILE belong together")
    addresses = variables.get("TOLLGATE_ADDRESS", "").split(",")
    return {
        "addresses": [one.strip() for one in addresses if one.strip()],
        "ca_file": variables.get("TOLLGATE_CA_FILE") or None,
        "server_name": variables.get("TOLLGATE_SERVER_NAME") or None,
        "certificate": certificate or None,
        "key": key or None,
        "token_file": variables.get("TOLLGATE_TOKEN_FILE") or None,
    }


def _text(path: Optional[Path]) -> Optional[str]:
    return None if path is None else os.fspath(path)


def _servers(texts: List[str], files: Files, server_name: Optional[str]) -> Servers:
    if not texts:
        raise SettingsError("no address of a node is given")
    addresses = [parse(text) for text in texts]
    if (files.certificate is None) != (files.key is None):
        raise SettingsError("a certificate and its key belong together")
    if files.ca is None:
        if files.certificate is not None or server_name is not None:
            raise SettingsError(
                "a certificate or a server name needs the file of the CA certificates"
            )
        for address in addresses:
            if address.is_https:
                raise SettingsError(
                    f"https://{address} needs TLS: name the file of its CA certificates"
                )
            if files.token is not None and address.is_remote:
                LOG.warning(
                    "the token is sent unencrypted to %s: turn on TLS with a CA file", address
                )
    return Servers(addresses, server_name, Credentials(files))
