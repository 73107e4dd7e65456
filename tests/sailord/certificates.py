"""An authority of a test cluster, and the settings that use it."""

from __future__ import annotations

from pathlib import Path

from agents.rpc.tls import Tls, TlsFiles
from sailord.authority import Authority


def member(authority: Authority, role: str, name: str, folder: Path, *, days: float = 7.0) -> Tls:
    """Issue a certificate, and open it."""
    authority.issue(role, name, folder, days=days)
    return Tls(files_in(folder), authority.cluster, role)  # type: ignore[arg-type] # one of Role


def files_in(folder: Path) -> TlsFiles:
    """Return the files that ``issue`` wrote."""
    names = ("ca.pem", "certificate.pem", "key.pem", "revoked.pem")
    return TlsFiles(*(folder / name for name in names))
