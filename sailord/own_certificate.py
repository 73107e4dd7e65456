"""sailord's own certificate, which it makes and renews if it has the authority.

It also revokes those of rented instances that are no more.
"""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import structlog

from agents.protocol.names import NAME
from agents.rpc.certificates import is_pair, share_of_life_left
from agents.rpc.enrolment import LOOK_S, RENEW_AT
from agents.rpc.tls import Tls, TlsFiles
from sailord.authority import Authority
from sailord.config import Config
from simulator.documents.problems import InputError, Problem

log = structlog.get_logger("tls")

NOT_NOW = "the certificate cannot be renewed now"


def open_tls(config: Config) -> Tls | None:
    """Open the certificate, and make it first if it must be; ``None``: plain HTTP."""
    settings = config.tls
    if settings is None:
        return None
    try:
        _renew(config)
    except InputError as error:
        if not _is_usable(settings.files):
            raise
        # As on a full disk, which must not keep sailord from its start; keep_certificate goes on.
        log.warning(NOT_NOW, error=str(error))
    return Tls(settings.files, config.cluster_name, "sailord")


async def keep_certificate(config: Config) -> None:
    """Renew the certificate in time, forever."""
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


def _is_usable(files: TlsFiles, least: float = 0.0) -> bool:
    """Return whether more than this share of the certificate's life is left, and its key fits."""
    assert files.certificate is not None
    assert files.key is not None
    return share_of_life_left(files.certificate) > least and is_pair(files.certificate, files.key)


def _renew(config: Config) -> None:
    settings = config.tls
    if settings is None or settings.by is None or _is_usable(settings.files, RENEW_AT):
        return
    certificate = settings.files.certificate
    assert certificate is not None
    authority = Authority.open(Path(settings.by))
    if authority.cluster != config.cluster_name:
        what = f"is the authority of {authority.cluster}, not of {config.cluster_name}"
        raise InputError(Problem(settings.by, what, "make another: sailorctl ca init"))
    host = socket.gethostname().partition(".")[0].lower()
    authority.issue("sailord", host if NAME.match(host) else "head", certificate.parent)
