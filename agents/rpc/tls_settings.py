"""The section ``[tls]`` of the files of sailord and the agents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from agents.rpc.tls import TlsFiles, is_this_machine
from simulator.documents.fields import Table

CURE = (
    "add a section [tls] (docs/security.md), or insecure = true in it to send everything in clear"
)


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """The settings of the section ``[tls]``."""

    files: TlsFiles
    by: str | None = None
    """Who signs and renews this process's certificate: sailord's folder of an authority, or the
    address that an agent enrols at. ``None``: an operator."""

    @property
    def made_in(self) -> Path | None:
        """The folder in which this process makes its certificate."""
        certificate = self.files.certificate
        return None if self.by is None or certificate is None else certificate.parent


def read_tls(
    top: Table,
    folder: Path,
    state: Path | None,
    *,
    by: Literal["authority", "enrol"],
    named: Mapping[str, str | None],
    store: str | None,
) -> TlsSettings | None:
    """Read the section; ``None``: plain HTTP.

    ``named`` holds addresses that the file listens on or names, by what they are called.
    """
    section = top.section("tls")
    insecure = section.flag("insecure", default=False)
    paths = {key: section.text(key) for key in ("ca", "certificate", "key", "revoked")}
    signer = section.text(by)
    section.finish()
    given = [key for key, value in (*paths.items(), (by, signer)) if value is not None]
    if insecure and given:
        section.report("insecure", f"contradicts {given[0]}", "leave one of them out")
        return None
    if not given:
        if not insecure:
            _require(top, named, store)
        return None
    _require(top, {}, store)
    if by == "authority" and signer is not None:
        signer = str(folder / signer)
        paths["ca"] = paths["ca"] or f"{signer}/ca.pem"
        paths["revoked"] = paths["revoked"] or f"{signer}/revoked.pem"
    own = {"certificate": "certificate.pem", "key": "key.pem"}
    for key, name in own.items():
        if signer is not None and paths[key] is not None:
            section.report(key, f"contradicts {by}", "leave it out: it is made in the state folder")
        elif signer is not None and state is not None:
            paths[key] = str(state / "tls" / name)
    if by == "enrol" and signer is not None:
        paths["revoked"] = paths["revoked"] or str((state or folder) / "tls" / "revoked.pem")
    for key in ("ca", *own):
        if paths[key] is None:
            section.report(key, "is missing", f"name a file, or give {by}")
            return None
    found = {key: None if text is None else folder / text for key, text in paths.items()}
    assert found["ca"] is not None
    return TlsSettings(TlsFiles(found["ca"], *list(found.values())[1:]), signer)


def _require(top: Table, named: Mapping[str, str | None], store: str | None) -> None:
    """Report what leaves this machine in clear."""
    for what, address in named.items():
        if address is not None and not is_this_machine(_host(address)):
            place = top.place_of("listen")
            top.problems.add(place, f"{what} {address} is not this machine, and has no TLS", CURE)
            break
    parts = urlsplit(store or "")
    if parts.scheme == "etcd" and not ("ca=" in parts.query or "cert=" in parts.query):
        far = [each for each in parts.netloc.split(",") if not is_this_machine(_host(each))]
        if far:
            cure = "append ?ca=FILE&cert=FILE&key=FILE, or set insecure = true under [tls]"
            top.report("store", f"{far[0]} is not this machine, and has no TLS", cure)


def _host(address: str) -> str:
    """Return the host of an address with or without a port."""
    if address.count(":") > 1 and not address.startswith("["):
        return address
    return urlsplit(f"//{address}").hostname or address
