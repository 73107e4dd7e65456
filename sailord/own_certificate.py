"""sailord's own certificate, which it makes and renews if it has the authority.

A standby without it has its certificate renewed by the sailord that has it. Certificates of rented
instances that are no more are revoked.
"""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path

import aiohttp
import structlog

from agents.protocol.names import NAME
from agents.rpc.certificates import is_pair, share_of_life_left
from agents.rpc.enrolment import LOOK_S, RENEW_AT, Enrolment, take_next_key
from agents.rpc.signing import ClusterKey
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
    if settings.enrol is not None:
        return _open_enrolled(config, settings.files)
    try:
        _renew(config)
    except InputError as error:
        if settings.authority is not None and not _is_usable(settings.files):
            raise
        # A failed renewal, as on a full disk, must not keep sailord from starting; keep_certificate
        # tries again.
        log.warning(NOT_NOW, error=str(error))
    return Tls(settings.files, config.cluster_name, "sailord")


def check_certificate(config: Config) -> None:
    """Raise ``InputError`` if the files of ``[tls]`` cannot be used; make none."""
    settings = config.tls
    if settings is None:
        return
    if settings.authority is not None:
        _authority(config.cluster_name, settings.authority)
    elif settings.enrol is not None:
        _open_enrolled(config, settings.files)
    else:
        Tls(settings.files, config.cluster_name, "sailord")


async def keep_certificate(config: Config, key: ClusterKey, tls: Tls) -> None:
    """Renew the certificate before it expires; warn on its last day if an operator should have."""
    if config.tls is not None and config.tls.enrol is not None:
        assert tls.own is not None
        async with aiohttp.ClientSession() as session:
            await Enrolment(config.tls, tls.own, key, session).keep(tls)
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


def _open_enrolled(config: Config, files: TlsFiles) -> Tls:
    """Open the certificate of a standby; an operator issues the first one, and one that expired."""
    try:
        take_next_key(files)
        return Tls(files, config.cluster_name, "sailord")
    except InputError as error:
        (problem,) = error.problems
        assert files.certificate is not None
        folder = files.certificate.parent
        command = "sailorctl ca issue sailord/NAME --out DIR"
        cure = f"where the authority is: {command}; copy DIR to {folder} (docs/operations.md)"
        raise InputError(Problem(problem.place, problem.what, cure)) from None


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
    if settings.authority is None:
        _check_end(certificate)
        return
    if _is_usable(settings.files, RENEW_AT):
        return
    authority = _authority(config.cluster_name, settings.authority)
    host = socket.gethostname().partition(".")[0].lower()
    authority.issue("sailord", host if NAME.match(host) else "head", certificate.parent)
