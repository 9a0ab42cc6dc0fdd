"""The credentials of a client, and the certificates that it verifies nodes with. Their files are
read again when they change."""

from __future__ import annotations

import os
import ssl
from typing import Dict, List, NamedTuple, Optional, Tuple

import grpc

from .._decide.log import LOG, Throttle
from ..errors import SettingsError

_CHECK_INTERVAL = 0.5
"""The least seconds between two looks whether a file has changed."""

Metadata = Tuple[Tuple[str, str], ...]


class Files(NamedTuple):
    """The files of a client."""

    ca: Optional[str] = None
    """CA certificates (PEM): turns on TLS."""
    certificate: Optional[str] = None
    """The client's certificate (PEM)."""
    key: Optional[str] = None
    """Its private key (PEM)."""
    token: Optional[str] = None
    """A file whose only line is the bearer token."""


class Credentials:
    """TLS and the bearer token of a client. Raises ``SettingsError`` if a file can't be used."""

    def __init__(self, files: Files) -> None:
        self._tls_paths = [path for path in (files.ca, files.certificate, files.key) if path]
        self._files = files
        self._signature: Dict[str, Tuple[int, ...]] = {}
        self._look_at = 0.0
        self._failures = Throttle()
        self.version = 0
        """Advanced when a file of TLS has another content."""
        self._tls: Dict[str, bytes] = {}
        self._metadata: Optional[Metadata] = None
        try:
            self._load()
        except (OSError, ValueError) as error:
            raise SettingsError(_text(error)) from error

    @property
    def is_tls(self) -> bool:
        """Whether connections are encrypted."""
        return self._files.ca is not None

    @property
    def has_token(self) -> bool:
        """Whether calls carry a token."""
        return self._files.token is not None

    def metadata(self, now: float) -> Optional[Metadata]:
        """The token as the metadata of a call."""
        if self._metadata is not None:
            self.refresh(now)
        return self._metadata

    def channel_credentials(self) -> Optional[grpc.ChannelCredentials]:
        """TLS with the files as they are now; ``None`` for cleartext."""
        ca, certificate, key, _ = self._files
        if ca is None:
            return None
        read = self._tls
        return grpc.ssl_channel_credentials(
            read[ca], read[key] if key else None, read[certificate] if certificate else None
        )

    def refresh(self, now: float) -> None:
        """Reads the files again if they have changed. A half-finished change fails, and the next
        look tries again."""
        if now < self._look_at:
            return
        self._look_at = now + _CHECK_INTERVAL
        try:
            self._load()
        except (OSError, ValueError) as error:
            held_back = self._failures.passes(now)
            if held_back is not None:
                LOG.error("a new certificate, key or token is refused: %s", _text(error))

    def _load(self) -> None:
        signature = {path: _signature(path) for path in self._paths()}
        if signature == self._signature:
            return
        tls = {path: _read(path) for path in self._tls_paths}
        if tls != self._tls:
            _verify(self._files)
            self._tls = tls
            self.version += 1
        if self._files.token is not None:
            self._metadata = (("authorization", f"Bearer {_token(self._files.token)}"),)
        self._signature = signature

    def _paths(self) -> List[str]:
        token = self._files.token
        return self._tls_paths if token is None else [*self._tls_paths, token]


def _signature(path: str) -> Tuple[int, ...]:
    status = os.stat(path)
    return status.st_mtime_ns, status.st_size, status.st_ino


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _token(path: str) -> str:
    token = _read(path).decode("ascii", "replace").strip()
    if not token or not all("!" <= letter <= "~" for letter in token):
        raise ValueError(f"{path} is not a token: write one line without white space")
    return token


def _verify(files: Files) -> None:
    """Refuses what gRPC would refuse only when it connects."""
    path = files.ca
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(path)
        if files.certificate is not None:
            path = files.certificate
            # An encrypted key fails, instead of a prompt for its password.
            context.load_cert_chain(path, files.key, password="")
    except ssl.SSLError as error:
        raise ValueError(f"{path} can't be used: {error}") from error


def _text(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"can't read {error.filename}: {error.strerror}"
    return str(error)
