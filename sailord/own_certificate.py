"""sailord's own certificate, which it makes and renews if it has the authority.

It also revokes those of rented instances that are no more.
"""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path

import structlog

from agents.protocol.names import NAME
from agents.rpc.certificates import is_pair, share_of_life_left
from agents.rpc.enrolment import LOOK_S, RENEW_AT
from agents.rpc.tls import Tls, TlsFiles, read_certificate
from sailord.authority import Authority
from sailord.config import Config
from simulator.documents.problems import InputError, Problem

log = structlog.get_logger("tls")

WARN_S = 86_400.0
"""How long before its end a certificate is warned of that an operator renews."""
NOT_NOW = "the certificate cannot be renewed now"


def open_tls(config: Config) -> Tls | None:
    """Open the certificate, and make it first if it must be; ``None``: plain HTTP."""
    settings = config.tls
    if settings is None:
        return None
    try:
        _renew(config)
    except InputError as error:
        if settings.by is not None and not _is_usable(settings.files):
            raise
        # As on a full disk, which must not keep sailord from its start; keep_certificate goes on.
        log.warning(NOT_NOW, error=str(error))
    return Tls(settings.files, config.cluster_name, "sailord")


def check_certificate(config: Config) -> None:
    """Raise ``InputError`` if the files of ``[tls]`` cannot be used; make none."""
    settings = config.tls
    if settings is not None and settings.by is not None:
        _authority(config.cluster_name, settings.by)
    elif settings is not None:
        Tls(settings.files, config.cluster_name, "sailord")


async def keep_certificate(config: Config) -> None:
    """Renew the certificate before it expires; warn on its last day if an operator should have."""
    while True:
        await asyncio.sleep(LOOK_S)
        try:
            await asyncio.to_thread(_renew, config)
        except (InputError, OSError) as error:
            log.warning(NOT_NOW, error=str(error))


def end_instance(authority: str, name: str, number: str) -> None:
    """Revoke the certificate of a rented instance that is no more."""
    if Authority.open(Path(authority)).end_instance(name, number):
        log.info("revoked the certificate of an instance that is no more", node=name)


def _check_end(certificate: Path) -> None:
    """Raise ``InputError`` if a certificate ends soon that an operator should have renewed."""
    left_s = read_certificate(certificate)[1] - time.time()
    if left_s < WARN_S and share_of_life_left(certificate) < RENEW_AT:
        what = f"expires in {max(0.0, left_s / 3600):.1f} h, and nobody has renewed it"
        cure = "renew it where the authority is: sailorctl ca renew (docs/operations.md)"
        raise InputError(Problem(str(certificate), what, cure))


def _authority(cluster: str, folder: str) -> Authority:
    found = Authority.open(Path(folder))
    if found.cluster != cluster:
        what = f"is the authority of {found.cluster}, not of {cluster}"
        raise InputError(Problem(folder, what, "make another: sailorctl ca init"))
    return found


def _is_usable(files: TlsFiles, least: float = 0.0) -> bool:
    """Return whether more than this share of the certificate's life is left, and its key fits."""
    assert files.certificate is not None
    assert files.key is not None
    return share_of_life_left(files.certificate) > least and is_pair(files.certificate, files.key)


def _renew(config: Config) -> None:
    settings = config.tls
    if settings is None:
        return
    certificate = settings.files.certificate
    assert certificate is not None
    if settings.by is None:
        _check_end(certificate)
        return
    if _is_usable(settings.files, RENEW_AT):
        return
    authority = _authority(config.cluster_name, settings.by)
    host = socket.gethostname().partition(".")[0].lower()
    authority.issue("sailord", host if NAME.match(host) else "head", certificate.parent)
