"""The section ``[tls]`` of the files of sailord and the agents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
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
    authority: str | None = None
    """sailord's folder of an authority, which signs its certificate and others'."""
    enrol: str | None = None
    """The addresses of sailords, with commas between, of which the one with the authority renews
    this process's certificate. Without either an operator does."""

    @property
    def made_in(self) -> Path | None:
        """The folder in which this process makes its certificate."""
        certificate = self.files.certificate
        is_made = self.authority is not None or self.enrol is not None
        return certificate.parent if is_made and certificate is not None else None


def read_tls(
    top: Table,
    folder: Path,
    state: Path | None,
    *,
    may_sign: bool,
    named: Mapping[str, str | None],
    store: str | None,
) -> TlsSettings | None:
    """Read the section; ``None``: plain HTTP.

    ``may_sign``: it is sailord's, which may have an authority. ``named`` holds addresses that the
    file listens on or names, by what they are called.
    """
    section = top.section("tls")
    insecure = section.flag("insecure", default=False)
    paths = {key: section.text(key) for key in ("ca", "certificate", "key", "revoked")}
    authority = section.text("authority") if may_sign else None
    enrol = section.text("enrol")
    section.finish()
    every = {**paths, "authority": authority, "enrol": enrol}
    given = [key for key, value in every.items() if value is not None]
    if insecure and given:
        section.report("insecure", f"contradicts {given[0]}", "leave one of them out")
        return None
    if not given:
        if not insecure:
            _require(top, named, store)
        return None
    _require(top, {}, store)
    if authority is not None and enrol is not None:
        section.report("enrol", "contradicts authority", "leave one of them out")
        return None
    if authority is not None:
        authority = str(folder / authority)
        paths["ca"] = paths["ca"] or f"{authority}/ca.pem"
        paths["revoked"] = paths["revoked"] or f"{authority}/revoked.pem"
    signer = "authority" if authority is not None else "enrol" if enrol is not None else None
    own = {"certificate": "certificate.pem", "key": "key.pem"}
    for key, name in own.items():
        if signer is not None and paths[key] is not None:
            cure = "leave it out: it is made in the state folder"
            section.report(key, f"contradicts {signer}", cure)
        elif signer is not None and state is not None:
            paths[key] = str(state / "tls" / name)
    if enrol is not None:
        paths["revoked"] = paths["revoked"] or str((state or folder) / "tls" / "revoked.pem")
    for key in ("ca", *own):
        if paths[key] is None:
            others = "authority or enrol" if may_sign else "enrol"
            section.report(key, "is missing", f"name a file, or give {others}")
            return None
    found = {key: None if text is None else folder / text for key, text in paths.items()}
    assert found["ca"] is not None
    return TlsSettings(TlsFiles(found["ca"], *list(found.values())[1:]), authority, enrol)


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
