"""Authorities and certificates for tests, made by the openssl command."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True, slots=True)
class Certificate:
    """PEM files of a certificate, its key, and the authority that signed it."""

    file: Path
    key: Path
    authority: Path


class Authority:
    """Signs certificates for 127.0.0.1 and localhost. Without openssl the test skips."""

    def __init__(self, folder: Path, name: str) -> None:
        if shutil.which("openssl") is None:
            pytest.skip("openssl is not installed")
        self._folder = folder
        self.file, self._key = folder / f"{name}.pem", folder / f"{name}.key"
        _openssl(
            *_request(name, self._key, self.file), "-x509", "-days", "2",
            "-addext", "basicConstraints=critical,CA:TRUE",
        )  # fmt: skip

    def sign(self, name: str, file_name: str = "") -> Certificate:
        """Signs a new certificate; it replaces an old one in the same files."""
        base = self._folder / (file_name or name)
        file, key, request = (base.with_suffix(end) for end in (".pem", ".key", ".csr"))
        extensions = base.with_suffix(".cnf")
        extensions.write_text(f"subjectAltName=DNS:localhost,DNS:{name},IP:127.0.0.1\n")
        fresh = base.with_suffix(".new")
        _openssl(*_request(name, key, request))
        _openssl(
            "x509", "-req", "-in", request, "-CA", self.file, "-CAkey", self._key, "-CAcreateserial",  # noqa: E501
            "-days", "2", "-extfile", extensions, "-out", fresh,
        )  # fmt: skip
        fresh.replace(file)
        return Certificate(file, key, self.file)


def _request(name: str, key: Path, output: Path) -> tuple[str | Path, ...]:
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    return ("req", *curve, "-subj", f"/CN={name}", "-keyout", key, "-out", output)


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=60)
