"""The cluster's certificate authority: a folder with its key and the list of what it issued.

ca.pem          its certificate, which every machine has
ca.key          its key
revoked.pem     the certificates that are valid no longer, signed by it
issued.jsonl    one line per certificate
"""

from __future__ import annotations

import contextlib
import datetime as dt
import fcntl
import ipaddress
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import AttributeOID, ExtendedKeyUsageOID, NameOID

from agents.daemon.credentials import check_mode
from agents.protocol.names import NAME
from agents.rpc.certificates import hash_of_key, key_pem, new_key, proof_audience
from agents.rpc.identity import ROLES, Identity, read_identity
from simulator.documents.problems import InputError, Problem
from worker.atomic_file import OWNER_ONLY, replacing

DAYS = 7.0
CA_DAYS = 3650
KEPT_S = 30 * 86_400.0
"""How long expired certificates stay in the list."""
_HOST = re.compile(r"[a-z0-9]([a-z0-9.-]{0,200}[a-z0-9])?\Z", re.IGNORECASE)
NO_AUTHORITY = (
    "make an authority: sailorctl ca init; only the head node has one, and a standby sailord gets a"
    " certificate from there (docs/operations.md, A standby sailord)"
)
AHEAD = dt.timedelta(minutes=10)
"""Certificates are valid from a little before their making, as clocks differ."""
CERTIFICATE, KEY, CA, REVOKED = "certificate.pem", "key.pem", "ca.pem", "revoked.pem"
"""The files of one member's folder."""


@dataclass(frozen=True, slots=True)
class Issued:
    """One certificate that was issued."""

    serial: str
    uri: str
    until: float
    """When it expires, in seconds since the epoch."""
    revoked: float | None = None
    """When it was revoked."""
    may_return: bool = False
    """Its name may be enrolled again."""
    instance: str = ""
    """The number of the rented instance that it was issued to; empty: another machine."""
    key: str = ""
    """The hash of its key; empty: an earlier version issued it."""

    @property
    def is_shut_out(self) -> bool:
        """Whether an operator must allow its name before it is enrolled again."""
        return self.revoked is not None and not self.may_return

    @property
    def owner(self) -> Identity:
        """The member that it was issued to."""
        owner = read_identity(self.uri)
        assert owner is not None
        return owner

    def state(self, now: float) -> str:
        """Return ``valid``, ``expired`` or ``revoked``."""
        if self.revoked is not None:
            return "revoked"
        return "valid" if now < self.until else "expired"

    def was_of_another(self, instance: str) -> bool:
        """Return whether the name is valid for an instance whose name another one has by now."""
        return bool(instance) and self.revoked is None and self.instance not in ("", instance)

    @classmethod
    def read(cls, line: str) -> Issued:
        """Read a line; a later version may have written more into it."""
        known = {each.name for each in fields(cls)}
        return cls(**{key: value for key, value in json.loads(line).items() if key in known})

    def line(self) -> str:
        """Return its line; what earlier versions do not know is left out where it is empty."""
        said = {k: v for k, v in asdict(self).items() if v or k not in ("instance", "key")}
        return f"{json.dumps(said)}\n"


@dataclass(frozen=True, slots=True)
class SigningRequest:
    """What an agent asks to be signed."""

    wanted: Identity
    public: ec.EllipticCurvePublicKey
    proof: str
    """By which a cloud says that the agent's node is an instance; empty: none was sent."""

    @property
    def audience(self) -> str:
        """Whom a proof must be for."""
        return proof_audience(self.wanted, self.public)

    @classmethod
    def read(cls, request: bytes) -> SigningRequest:
        """Read a request; ``InputError`` if it is none."""
        none = InputError(Problem("body", "is not a request for a certificate"))
        try:
            asked = x509.load_pem_x509_csr(request)
            names = asked.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            (uri,) = names.get_values_for_type(x509.UniformResourceIdentifier)
            public = asked.public_key()
            wanted = read_identity(uri) if asked.is_signature_valid else None
            shown = [a.value for a in asked.attributes if a.oid == AttributeOID.CHALLENGE_PASSWORD]
            proof = shown[0].decode("ascii") if shown else ""
        except (ValueError, x509.ExtensionNotFound, InvalidSignature, TypeError):
            raise none from None
        if wanted is None or not isinstance(public, ec.EllipticCurvePublicKey):
            raise none
        return cls(wanted, public, proof)


@dataclass(frozen=True, slots=True)
class Authority:
    """One authority; its methods lock the folder."""

    folder: Path
    cluster: str

    # ---- the folder -----------------------------------------------------------------------------

    @classmethod
    def create(cls, folder: Path, cluster: str) -> Authority:
        """Make a new authority; ``InputError`` if the folder has one, or the name is not valid."""
        if not NAME.match(cluster):
            cure = "give lower-case letters, digits and hyphens, as cluster_name"
            raise InputError(Problem("--cluster", f'is "{cluster}"', cure))
        if (folder / "ca.key").exists():
            cure = "name another folder"
            raise InputError(Problem(str(folder), "has an authority already", cure))
        with _problem_of(folder):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            folder.chmod(0o700)
        made, key, now = cls(folder, cluster), new_key(), dt.datetime.now(dt.UTC)
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"sailor {cluster}")])
        builder = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - AHEAD)
            .not_valid_after(now + dt.timedelta(days=CA_DAYS))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs=True), critical=True)
            .add_extension(
                x509.SubjectAlternativeName(
                    [x509.UniformResourceIdentifier(f"sailor://{cluster}")]
                ),
                critical=False,
            )
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
            )
        )
        with _problem_of(folder):
            _replace(folder / "ca.key", key_pem(key), mode=OWNER_ONLY)
            _replace(folder / CA, _pem(builder.sign(key, hashes.SHA256())))
            made._write([])
        return made

    @classmethod
    def open(cls, folder: Path) -> Authority:
        """Open an authority; ``InputError`` says what is wrong with its folder."""
        check_mode(folder / "ca.key", NO_AUTHORITY)
        cluster = (
            cls(folder, "")._ca().extensions.get_extension_for_class(x509.SubjectAlternativeName)
        )
        (uri,) = cluster.value.get_values_for_type(x509.UniformResourceIdentifier)
        return cls(folder, uri.removeprefix("sailor://"))

    def issued(self) -> list[Issued]:
        """Return all certificates that were issued, the oldest first."""
        place = self.folder / "issued.jsonl"
        with _problem_of(place):
            lines = place.read_text(encoding="utf-8").splitlines()
        try:
            return [Issued.read(line) for line in lines]
        except (ValueError, TypeError, AttributeError) as error:
            raise InputError(Problem(str(place), f"has an unreadable line: {error}")) from None

    def last_of(self, uri: str) -> Issued | None:
        """Return the last certificate that a member was issued."""
        return next((each for each in reversed(self.issued()) if each.uri == uri), None)

    # ---- what it does ---------------------------------------------------------------------------

    def issue(
        self, role: str, name: str, folder: Path, *, days: float = DAYS, hosts: Sequence[str] = ()
    ) -> Identity:
        """Make a key and its certificate, and write both and the authority's into a folder.

        ``hosts`` are the addresses and names of a store.
        """
        owner = self._identity(role, name)
        if bool(hosts) != (role == "store"):
            what = "has no --host" if role == "store" else "has a --host"
            cure = "give only addresses of members of etcd"
            raise InputError(Problem(str(owner), what, cure))
        key = new_key()
        with self._locked():
            certificate = self._sign(owner, key.public_key(), days, hosts)
        with _problem_of(folder):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            new_files = (
                (replacing(folder / KEY, mode=OWNER_ONLY), key_pem(key)),
                (replacing(folder / CERTIFICATE), certificate),
            )
            with contextlib.ExitStack() as both:
                for replaced, content in new_files:
                    file = both.enter_context(replaced)
                    _give_to_owner(file.fileno(), folder)
                    file.write(content)
                    file.flush()  # A full disk shows here, before either is replaced.
        self.copy_public(folder)
        return owner

    def copy_public(self, folder: Path) -> None:
        """Copy what every machine has: the authority's certificate, and the revoked ones."""
        with _problem_of(folder):
            for name in (CA, REVOKED):
                _replace(folder / name, (self.folder / name).read_bytes())

    def enrol(self, request: bytes, owner: Identity | None, *, instance: str = "") -> bytes:
        """Sign the request for a certificate of an agent, or of a sailord that has a valid one.

        ``owner``: the holder of the valid certificate that it shows, if any; ``instance``: the
        number of the rented instance that it proved to be. Raises ``InputError`` for a request
        that is refused.
        """
        asked = SigningRequest.read(request)
        wanted = asked.wanted
        if wanted.role not in ("agent", "sailord") or wanted.cluster != self.cluster:
            what = f"asks for {wanted.uri}"
            raise InputError(Problem("body", what, f"ask for an agent of {self.cluster}"))
        if wanted.role == "sailord" and owner is None:
            # Every agent has the cluster's key, so it must not suffice for a sailord's certificate.
            what = "shows no valid certificate, and renews only by one"
            raise InputError(Problem(str(wanted), what, f"sailorctl ca issue {wanted} --out DIR"))
        if owner is not None and owner != wanted:
            raise InputError(Problem("body", f"asks for {wanted}, and is of {owner}"))
        with self._locked():
            last = self.last_of(wanted.uri)
            if owner is not None:
                instance = "" if last is None else last.instance
            elif last is not None and last.was_of_another(instance):
                last = self._revoke(wanted.uri, may_return=True)[-1]
            has_it = owner is not None
            if last is not None and last.revoked is None:
                # A request is repeated if our answer was lost.
                has_it |= (last.key, last.instance) == (hash_of_key(asked.public), instance)
            self._check_name(wanted, last, has_it=has_it)
            return self._sign(wanted, asked.public, DAYS, instance=instance)

    def _check_name(self, wanted: Identity, last: Issued | None, *, has_it: bool) -> None:
        """Refuse a name that was revoked, or that another certificate has."""
        if has_it and last is not None and last.revoked is not None:
            # A name may return, but not by showing its revoked certificate.
            raise InputError(Problem(str(wanted), "was revoked", "enrol without that certificate"))
        if has_it or last is None or last.may_return or last.state(time.time()) == "expired":
            return
        why = "was revoked" if last.revoked is not None else "has a valid certificate"
        cure = f"to let it return: sailorctl ca revoke {wanted} --may-return"
        raise InputError(Problem(str(wanted), why, cure))

    def revoke(self, which: str, *, may_return: bool = False) -> list[Issued]:
        """Revoke all certificates of a ``ROLE/NAME``, or one serial number."""
        role, _, name = which.partition("/")
        with self._locked():
            return self._revoke(
                self._identity(role, name).uri if name else which, may_return=may_return
            )

    def end_instance(self, name: str, instance: str) -> bool:
        """Revoke what a rented instance has that is no more; return whether there was anything.

        An operator's order stays as it is.
        """
        uri = self._identity("agent", name).uri
        with self._locked():
            last = self.last_of(uri)
            if last is None or last.instance != instance or last.state(time.time()) != "valid":
                return False
            self._revoke(uri, may_return=True)
        return True

    # ---- within ---------------------------------------------------------------------------------

    def _revoke(self, which: str, *, may_return: bool) -> list[Issued]:
        """Revoke all certificates of a URI, or one serial number."""
        before, now = self.issued(), time.time()
        hit = [each for each in before if which in (each.serial, each.uri)]
        if not hit:
            cure = "sailorctl ca list shows what was issued"
            raise InputError(Problem(which, "was never issued", cure))
        ended = [replace(each, revoked=each.revoked or now, may_return=may_return) for each in hit]
        new = {each.serial: each for each in ended}
        self._write([new.get(each.serial, each) for each in before])
        return ended

    def _identity(self, role: str, name: str) -> Identity:
        if role not in ROLES or not NAME.match(name):
            cure = f"give {', '.join(f'{each}/NAME' for each in ROLES)}, in lower case"
            raise InputError(Problem(f"{role}/{name}", "is not a member's name", cure))
        return Identity(self.cluster, next(each for each in ROLES if each == role), name)

    def _sign(
        self,
        owner: Identity,
        public: ec.EllipticCurvePublicKey,
        days: float,
        hosts: Sequence[str] = (),
        instance: str = "",
    ) -> bytes:
        ca, key, now = self._ca(), self._key(), dt.datetime.now(dt.UTC)
        until = min(now + dt.timedelta(days=days), ca.not_valid_after_utc)
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(owner.uri)]
        names += [x509.DNSName(each) for each in owner.server_names]
        names += [_host_name(each) for each in hosts]
        uses = [ExtendedKeyUsageOID.CLIENT_AUTH]
        if owner.role != "user":
            uses.append(ExtendedKeyUsageOID.SERVER_AUTH)
        made = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, str(owner)[:64])]))
            .issuer_name(ca.subject)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - AHEAD)
            .not_valid_after(until)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()),
                critical=False,
            )
            .sign(key, hashes.SHA256())
        )
        serial, key_hash = f"{made.serial_number:x}", hash_of_key(public)
        row = Issued(serial, owner.uri, until.timestamp(), instance=instance, key=key_hash)
        self._write([*self.issued(), row])
        return _pem(made)

    def _write(self, rows: list[Issued]) -> None:
        """Write the list of certificates, and that of the revoked ones, without what is over."""
        ca, key, now = self._ca(), self._key(), dt.datetime.now(dt.UTC)
        over = now.timestamp() - KEPT_S
        rows = [row for row in rows if row.until > over or row.is_shut_out]
        revoked = x509.CertificateRevocationListBuilder().issuer_name(ca.subject)
        # Valid as long as the authority: a list that was written while our clock was ahead would
        # otherwise shut all members out.
        revoked = revoked.last_update(ca.not_valid_before_utc).next_update(ca.not_valid_after_utc)
        for each in rows:
            if each.revoked is not None and each.until > over:
                at = dt.datetime.fromtimestamp(each.revoked, dt.UTC)
                entry = x509.RevokedCertificateBuilder().serial_number(int(each.serial, 16))
                revoked = revoked.add_revoked_certificate(entry.revocation_date(at).build())
        identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key())
        revoked = revoked.add_extension(identifier, critical=False)
        with _problem_of(self.folder):
            lines = "".join(each.line() for each in rows)
            _replace(self.folder / "issued.jsonl", lines.encode())
            signed = revoked.sign(key, hashes.SHA256())
            _replace(self.folder / REVOKED, signed.public_bytes(serialization.Encoding.PEM))

    def _ca(self) -> x509.Certificate:
        path = self.folder / CA
        with _problem_of(path):
            try:
                return x509.load_pem_x509_certificate(path.read_bytes())
            except ValueError:
                raise InputError(Problem(str(path), "is not a certificate")) from None

    def _key(self) -> ec.EllipticCurvePrivateKey:
        path = self.folder / "ca.key"
        check_mode(path)
        try:
            key = serialization.load_pem_private_key(path.read_bytes(), None)
        except (ValueError, TypeError):
            raise InputError(Problem(str(path), "is not a private key")) from None
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        return key

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Wait for other processes that issue; sailord and an operator may at the same time."""
        with _problem_of(self.folder):
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            lock = os.open(self.folder / "lock", flags, 0o600)
        try:
            _give_to_owner(lock, self.folder)
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)


def hosts_of(certificate: Path) -> list[str]:
    """Return the addresses and names of the store that a certificate is of."""
    found = x509.load_pem_x509_certificate(certificate.read_bytes())
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    own = names.get_values_for_type(x509.DNSName)
    addresses = map(str, names.get_values_for_type(x509.IPAddress))
    return [*addresses, *(each for each in own if not each.endswith(".sailor"))]


def _host_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if host.endswith(".sailor") or not _HOST.match(host):
        raise InputError(Problem("--host", f'"{host}" is not an address or a host name'))
    return x509.DNSName(host)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _replace(path: Path, content: bytes, *, mode: int | None = None) -> None:
    with replacing(path, mode=mode) as file:
        _give_to_owner(file.fileno(), path.parent)
        file.write(content)


def _give_to_owner(descriptor: int, folder: Path) -> None:
    """Give what root writes to the owner of the folder: sailord has to read and replace it."""
    if os.geteuid() == 0:
        owner = folder.stat()
        os.fchown(descriptor, owner.st_uid, owner.st_gid)


@contextlib.contextmanager
def _problem_of(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        place = str(error.filename or path)
        cure = NO_AUTHORITY if isinstance(error, FileNotFoundError) else ""
        raise InputError(Problem(place, error.strerror or str(error), cure)) from None
