"""Test certificates and their authority, made by openssl."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple

_NEW_KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]


class Pair(NamedTuple):
    """A certificate and its key."""

    certificate: str
    key: str


class Authority:
    """A certificate authority with a directory for its files."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir()
        self.file = str(directory / "ca.pem")
        self._key = str(directory / "ca.key")
        subject = ["-subj", "/CN=a test's own", "-days", "2"]
        _openssl("req", "-x509", *_NEW_KEY, *subject, "-keyout", self._key, "-out", self.file)

    def server(self, name: str) -> Pair:
        """A certificate for 127.0.0.1."""
        return self._issue(name, "subjectAltName=IP:127.0.0.1\n")

    def client(self, name: str) -> Pair:
        """A certificate whose common name is the name."""
        return self._issue(name, "")

    def _issue(self, name: str, extensions: str) -> Pair:
        path = self._directory / name
        pair = Pair(f"{path}.crt", f"{path}.key")
        path.with_suffix(".ext").write_text(f"basicConstraints=CA:FALSE\n{extensions}")
        request = ["-keyout", pair.key, "-out", f"{path}.csr", "-subj", f"/CN={name}"]
        _openssl("req", "-new", *_NEW_KEY, *request)
        issuer = ["-CA", self.file, "-CAkey", self._key, "-CAcreateserial", "-days", "2"]
        files = ["-in", f"{path}.csr", "-out", pair.certificate, "-extfile", f"{path}.ext"]
        _openssl("x509", "-req", *issuer, *files)
        return pair


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)
