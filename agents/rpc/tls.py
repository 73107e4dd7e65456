"""TLS between the processes of a cluster: both ends show a certificate of the cluster's authority.

New connections use changed files, which are looked for at most once a second.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import ssl
import time
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from agents.daemon.credentials import check_mode
from agents.rpc.identity import CallerRole, Identity, identity_of, read_identity, server_name
from simulator.documents.problems import InputError, Problem

log = structlog.get_logger("tls")

HANDSHAKE: ContextVar[socket.socket | None] = ContextVar("handshake", default=None)
"""The socket of a server's handshake, in the task that begins it."""
LOOK_S = 1.0
"""How often the files are looked at."""
_END_OF_LIST = b"-----END X509 CRL-----"
RENEW = "renew it: sailorctl ca renew"
OURS = "both ends need a certificate of the same authority (sailorctl ca issue)"
SENTENCES = (
    ("certificate revoked", "the certificate is revoked", "issue another: sailorctl ca issue"),
    ("certificate has expired", "the certificate has expired", RENEW),
    ("certificate expired", "the certificate has expired", RENEW),
    ("not yet valid", "the certificate is not valid yet", "check the clocks of both machines"),
    ("hostname mismatch", "the certificate is of another member", ""),
    ("unable to get certificate crl", "the list of revoked certificates is of another authority",
     "copy ca.pem and revoked.pem from the same authority"),
    ("crl has expired", "the list of revoked certificates has expired", "copy a new revoked.pem"),
    ("certificate verify failed", "the certificate is not of this cluster's authority", OURS),
    ("unknown ca", "our certificate is not of its authority", OURS),
    ("bad certificate", "our certificate is not accepted", OURS),
    ("http request", "plain HTTP was spoken to a TLS port",
     "give the caller [tls], or https:// and --tls"),
    ("wrong version number", "it speaks plain HTTP, and we speak TLS",
     "give it [tls], or say insecure = true in ours"),
    ("eof occurred", "the connection ended in the handshake",
     "the other end's log says why; it may not accept our certificate"),
)  # fmt: skip
"""A part of OpenSSL's message, what it means, and the cure."""


def explain(error: BaseException) -> str:
    """Say what an error of a connection means, in one sentence, with a cure where there is one."""
    text = str(error) or type(error).__name__
    for part, what, cure in SENTENCES:
        if part in text.lower().replace("_", " "):
            return f"{what}; {cure}" if cure else f"{what}: {text}"
    return text


def is_this_machine(host: str) -> bool:
    """Return whether a host name or address is that of the loopback device."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The files of one process."""

    ca: Path
    """Certificates of the authority; more than one while it is replaced."""
    certificate: Path | None = None
    key: Path | None = None
    """``None``: this process shows no certificate."""
    revoked: Path | None = None
    """The authority's list of revoked certificates."""

    def stamp(self) -> tuple[Any, ...]:
        """Return a value that changes when a file does."""
        found = []
        for path in (self.ca, self.certificate, self.key, self.revoked):
            try:
                about = None if path is None else path.stat()
                found.append(about and (about.st_mtime_ns, about.st_size, about.st_ino))
            except OSError:
                found.append(None)
        return tuple(found)


@dataclass(eq=False)
class Tls:
    """The TLS of one process; ``InputError`` if its files cannot be used at the start."""

    files: TlsFiles
    cluster: str | None
    """``None``: that of the certificate."""
    role: CallerRole
    name: str | None = None
    """The name that the certificate must have; ``None``: any."""
    own: Identity | None = None
    """Whose certificate it is."""
    until: float = float("inf")
    """When it expires, in seconds since the epoch."""
    _stamp: tuple[Any, ...] = ()
    _failed: tuple[Any, ...] = ()
    """Files that failed to load once: they may have been half written, so try once more."""
    _looked_s: float = float("-inf")
    _client: ssl.SSLContext = field(init=False)
    _server: ssl.SSLContext | None = None
    _pair: tuple[bytes, Any] | None = None
    """Our certificate, as DER, and its key."""
    _revoked: frozenset[int] = frozenset()
    """Serial numbers."""

    def __post_init__(self) -> None:
        self._stamp, self._looked_s = self.files.stamp(), time.monotonic()
        self._load()

    @property
    def client(self) -> ssl.SSLContext:
        """The context of new connections to others."""
        self._look()
        return self._client

    @property
    def server(self) -> ssl.SSLContext:
        """The context of incoming connections, whose clients may show a certificate."""
        self._look()
        assert self._server is not None, "a server has a certificate"
        return self._server

    def server_name(self, wanted: str) -> str:
        """Return the name that a server's certificate must have."""
        assert self.cluster is not None
        return server_name(wanted, self.cluster)

    def sign(self, text: bytes) -> tuple[bytes, bytes]:
        """Sign as the owner of our certificate; return it, as DER, and the signature."""
        from cryptography.hazmat.primitives import hashes  # noqa: PLC0415 - slow to import, too
        from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415 - as above

        self._look()
        assert self._pair is not None, "who signs has a certificate"
        der, key = self._pair
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        return der, key.sign(text, ec.ECDSA(hashes.SHA256()))

    def check_signed(self, text: bytes, der: bytes, signature: bytes) -> tuple[Identity, int]:
        """Return who signed a text, and the serial number of the certificate.

        Raises ``ValueError`` unless it is of our authority, is valid now and made the signature.
        """
        from cryptography import x509  # noqa: PLC0415 - slow to import, and only TLS needs it
        from cryptography.exceptions import InvalidSignature  # noqa: PLC0415 - as above
        from cryptography.hazmat.primitives import hashes  # noqa: PLC0415 - as above
        from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415 - as above

        try:
            found, key = x509.load_der_x509_certificate(der), None
        except (x509.InvalidVersion, ValueError):
            raise ValueError("the certificate is malformed") from None
        for authority in x509.load_pem_x509_certificates(self.files.ca.read_bytes()):
            with contextlib.suppress(ValueError, TypeError, InvalidSignature):
                found.verify_directly_issued_by(authority)
                key = found.public_key()
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise ValueError("the certificate is not of this cluster's authority")
        begin, end = found.not_valid_before_utc, found.not_valid_after_utc
        if not begin.timestamp() <= time.time() < end.timestamp():
            raise ValueError("the certificate is not valid now")
        if self.has_revoked(found.serial_number):
            raise ValueError("the certificate is revoked")
        try:
            key.verify(signature, text, ec.ECDSA(hashes.SHA256()))
        except InvalidSignature:
            raise ValueError("the certificate's key did not sign it") from None
        owner = _owner_of(found)
        if owner is None or owner.cluster != self.cluster:
            raise ValueError("the certificate is of no member of this cluster")
        return owner, found.serial_number

    def has_revoked(self, serial: int) -> bool:
        """Return whether a certificate is on the list of revoked ones, as it is now."""
        self._look()
        return serial in self._revoked

    def why_not(self, certificate: Mapping[str, Any]) -> str:
        """Return why a certificate that was valid at the handshake is valid no longer."""
        if self.has_revoked(int(certificate["serialNumber"], 16)):
            return "the certificate is revoked"
        if ssl.cert_time_to_seconds(certificate["notAfter"]) < time.time():
            return "the certificate has expired"
        return ""

    def _look(self) -> None:
        now = time.monotonic()
        if now < self._looked_s + LOOK_S:
            return
        self._looked_s, stamp = now, self.files.stamp()
        if stamp == self._stamp:
            return
        try:
            self._load()
        except InputError as error:
            if stamp != self._failed:
                self._failed = stamp
                return
            self._stamp = stamp
            log.warning("new certificates cannot be used; the old ones stay", error=str(error))
        else:
            self._stamp = stamp
            log.info("certificates reloaded", certificate=str(self.own), until=self.until)

    def _load(self) -> None:
        own, until = self._read_own()
        client = self._context(ssl.PROTOCOL_TLS_CLIENT)
        server = None if own is None else self._context(ssl.PROTOCOL_TLS_SERVER)
        if server is not None:
            # A client without a certificate gets an answer that says so. Resumed sessions would
            # not be checked against the list of revoked certificates.
            server.verify_mode, server.num_tickets = ssl.CERT_OPTIONAL, 0
            server.owner = self
        pair, revoked = _read_pair(self.files), _read_revoked(self.files.revoked)
        self._client, self._server, self.own, self.until = client, server, own, until
        self._pair, self._revoked = pair, revoked
        if self.cluster is None and own is not None:
            self.cluster = own.cluster

    def _read_own(self) -> tuple[Identity | None, float]:
        files = self.files
        if files.certificate is None:
            return None, float("inf")
        assert files.key is not None
        own, until = read_certificate(files.certificate)
        check_mode(files.key)
        place = str(files.certificate)
        name = self.name or own.name
        wanted = Identity(self.cluster or own.cluster, self.role, name)
        if own != wanted:
            cure = f"issue one of {wanted.role}/{wanted.name} in {wanted.cluster}"
            raise InputError(Problem(place, f"is of {own.uri}, not {wanted.uri}", cure))
        if until < time.time():
            raise InputError(Problem(place, "has expired", RENEW))
        return own, until

    def _context(self, kind: Any) -> _Context:
        context, files = _Context(kind), self.files
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        _take(files.ca, "certificates", context.load_verify_locations)
        if files.revoked is not None:
            _take(files.revoked, "certificates", context.load_verify_locations)
            if _has_list_of_each(context):
                context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
        if files.certificate is not None:
            key = files.key
            _take(files.certificate, "a certificate of that key",
                  lambda path: context.load_cert_chain(path, key))  # fmt: skip
        return context


def _take(path: Path, what: str, load: Any) -> None:
    try:
        load(path)
    except ssl.SSLError as error:
        problem = Problem(str(path), f"does not hold {what}: {error.reason or error}")
        raise InputError(problem) from None
    except OSError as error:
        raise InputError(Problem(str(path), f"cannot be read: {error.strerror}")) from None


def _has_list_of_each(context: ssl.SSLContext) -> bool:
    """Return whether there is a list of revoked certificates for each authority.

    While one authority replaces the other, one of them has no list, and OpenSSL would refuse all of
    its certificates. Servers check the lists themselves, at each request.
    """
    loaded = context.cert_store_stats()  # A certificate that a file holds twice counts once.
    return loaded["crl"] >= loaded["x509_ca"]


def read_certificate(path: Path) -> tuple[Identity, float]:
    """Read whose a certificate is, and when it expires."""
    from cryptography import x509  # noqa: PLC0415 - slow to import, and only TLS needs it

    try:
        found = x509.load_pem_x509_certificate(path.read_bytes())
        owner, until = _owner_of(found), found.not_valid_after_utc.timestamp()
    except OSError as error:
        cure = "make one: sailorctl ca issue"
        raise InputError(Problem(str(path), f"cannot be read: {error.strerror}", cure)) from None
    except ValueError:
        owner, until = None, 0.0
    if owner is None:
        what = "is not a certificate of a cluster's authority"
        raise InputError(Problem(str(path), what, "make one: sailorctl ca issue"))
    return owner, until


def _read_pair(files: TlsFiles) -> tuple[bytes, Any] | None:
    """Read our certificate, as DER, and its key, together: either may have been written anew."""
    from cryptography import x509  # noqa: PLC0415 - slow to import, and only TLS needs it
    from cryptography.hazmat.primitives import serialization  # noqa: PLC0415 - as above

    if files.certificate is None or files.key is None:
        return None
    problem = Problem(str(files.certificate), f"is not of the key {files.key}")
    try:
        certificate = x509.load_pem_x509_certificate(files.certificate.read_bytes())
        key = serialization.load_pem_private_key(files.key.read_bytes(), None)
    except (OSError, ValueError, TypeError, x509.InvalidVersion):
        raise InputError(problem) from None
    if certificate.public_key() != key.public_key():
        raise InputError(problem)
    return certificate.public_bytes(serialization.Encoding.DER), key


def _owner_of(certificate: Any) -> Identity | None:
    from cryptography import x509  # noqa: PLC0415 - slow to import, and only TLS needs it

    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound):
        return None
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    return read_identity(uris[0]) if len(uris) == 1 else None


def _read_revoked(path: Path | None) -> frozenset[int]:
    from cryptography import x509  # noqa: PLC0415 - slow to import, and only TLS needs it

    if path is None:
        return frozenset()
    try:
        *lists, _ = path.read_bytes().split(_END_OF_LIST)
        if not lists:
            raise ValueError("there is none in it")
        found = [x509.load_pem_x509_crl(each + _END_OF_LIST) for each in lists]
        return frozenset(entry.serial_number for each in found for entry in each)
    except (OSError, ValueError) as error:
        raise InputError(
            Problem(str(path), f"is not a list of revoked certificates: {error}")
        ) from None


def why_refused(transport: Any) -> str:
    """Return why the certificate at the other end is valid no longer."""
    context = transport.get_extra_info("sslcontext")
    certificate = transport.get_extra_info("peercert")
    if not certificate or not isinstance(context, _Context) or context.owner is None:
        return ""
    return context.owner.why_not(certificate)


def peer_of(transport: Any) -> Identity | None:
    """Return the identity in the client's certificate; ``None``: it showed none."""
    certificate = None if transport is None else transport.get_extra_info("peercert")
    return identity_of(certificate) if certificate else None


class _SslObject(ssl.SSLObject):
    """Sends the alert that says why a handshake failed, which asyncio does not do."""

    outgoing: ssl.MemoryBIO
    wire: socket.socket | None = None

    def do_handshake(self) -> None:
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError:
            alert = self.outgoing.read()
            if alert and self.wire is not None:
                with contextlib.suppress(OSError):
                    self.wire.send(alert)
            raise


class _Context(ssl.SSLContext):
    """A context whose handshakes know their connection."""

    sslobject_class = _SslObject
    owner: Tls | None = None

    def wrap_bio(self, incoming: Any, outgoing: Any, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        made = super().wrap_bio(incoming, outgoing, *args, **kwargs)
        assert isinstance(made, _SslObject)
        made.outgoing = outgoing
        # Only of the server's side: the handler's own connections to others inherit the variable.
        made.wire = HANDSHAKE.get() if made.server_side else None
        return made
