"""Access tokens of people: a file with the name, role, expiry and hash of each.

A token has 256 random bits, so its plain hash tells nothing about it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import json
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

import structlog

from agents.protocol.names import NAME
from simulator.documents.problems import InputError, Problem
from worker.atomic_file import OWNER_ONLY, replacing

Role = Literal["viewer", "operator", "admin"]
ROLES: tuple[Role, ...] = get_args(Role)
"""From the fewest rights to the most; each includes those before it."""
log = structlog.get_logger("sailord.tokens")

PREFIX = "sailor_"
CURE = "make tokens with: sailorctl token create NAME --role viewer"


@dataclass(frozen=True, slots=True)
class Token:
    """A token as the file stores it."""

    name: str
    role: Role
    sha256: str
    expires: float | None
    """Seconds since 1970; ``None``: never."""

    def is_valid(self, now: float) -> bool:
        """Whether it has not expired."""
        return self.expires is None or now < self.expires


def may(role: Role, needed: Role) -> bool:
    """Whether a role includes another."""
    return ROLES.index(role) >= ROLES.index(needed)


def hash_of(token: str | bytes) -> str:
    """The hash under which a token is kept."""
    return hashlib.sha256(token.encode() if isinstance(token, str) else token).hexdigest()


def read_tokens(file: Path) -> tuple[Token, ...]:
    """Read a file of tokens; raises ``InputError``."""
    try:
        document = json.loads(file.read_bytes())
        found = tuple(Token(**each) for each in document["tokens"])
    except OSError as error:
        raise InputError(Problem(str(file), f"cannot be read: {error.strerror}", CURE)) from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise InputError(Problem(str(file), "is not a file of tokens", CURE)) from None
    for each in found:
        is_time = each.expires is None or isinstance(each.expires, int | float)
        if each.role not in ROLES or not isinstance(each.sha256, str) or not is_time:
            raise InputError(Problem(f"{file}: {each.name}", "is not a token", CURE))
    return found


def create_token(file: Path, name: str, role: Role, days: float | None) -> str:
    """Add a token to the file and return it: it is not kept anywhere."""
    if not NAME.match(name):
        cure = "use lower-case letters, digits and hyphens"
        raise InputError(Problem("NAME", f"{name!r} is not a name", cure))
    with _lock(file):
        known = read_tokens(file) if file.exists() else ()
        if any(each.name == name for each in known):
            cure = f"revoke it first: sailorctl token revoke {name}"
            raise InputError(Problem("NAME", f"there is a token {name} already", cure))
        token = PREFIX + secrets.token_urlsafe(32)
        expires = None if days is None else time.time() + days * 86_400
        _write(file, (*known, Token(name, role, hash_of(token), expires)))
    return token


def revoke_token(file: Path, name: str) -> None:
    """Remove a token from the file."""
    with _lock(file):
        known = read_tokens(file)
        left = tuple(each for each in known if each.name != name)
        if len(left) == len(known):
            raise InputError(Problem("NAME", f"there is no token {name}", "sailorctl token list"))
        _write(file, left)


@contextlib.contextmanager
def _lock(file: Path) -> Iterator[None]:
    """Keep others from changing the file between its reading and its writing."""
    lock = file.with_name(f".{file.name}.lock")
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise InputError(Problem(str(lock), f"cannot be opened: {error.strerror}")) from None
    try:
        if os.geteuid() == 0 and os.fstat(descriptor).st_uid == 0:
            # The service's own user has to be able to open it later.
            owner = (file if file.exists() else file.parent).stat()
            os.fchown(descriptor, owner.st_uid, owner.st_gid)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _write(file: Path, tokens: tuple[Token, ...]) -> None:
    document = {"version": 1, "tokens": [asdict(each) for each in tokens]}
    try:
        owner = file.stat() if file.exists() else None
        mode = OWNER_ONLY if owner is None else owner.st_mode & 0o777
        with replacing(file, mode=mode) as new:
            new.write((json.dumps(document, indent=1) + "\n").encode())
            if owner is not None and os.geteuid() == 0:
                os.fchown(new.fileno(), owner.st_uid, owner.st_gid)
    except OSError as error:
        raise InputError(Problem(str(file), f"cannot be written: {error.strerror}")) from None


class AccessTokenFile:
    """The tokens of a file, which is read again when it has changed."""

    def __init__(self, file: Path | None, own: bytes | None) -> None:
        """``own`` is the token of ``token_file``: an admin's, which never expires."""
        self._file = file
        self._own = () if own is None else (Token("admin", "admin", hash_of(own), None),)
        self._seen: tuple[int, int] | None = None
        self._tokens: tuple[Token, ...] = ()
        self.problem = ""
        """Why the file cannot be read; only the admin is known then."""

    def find(self, shown: bytes) -> Token | None:
        """The valid token that was shown."""
        self._look()
        shown_hash, found = hash_of(shown), None
        for each in (*self._own, *self._tokens):
            if hmac.compare_digest(each.sha256, shown_hash) and each.is_valid(time.time()):
                found = each
        return found

    def _look(self) -> None:
        if self._file is None:
            return
        try:
            about = self._file.stat()
            seen = about.st_mtime_ns, about.st_ino
            if seen != self._seen:
                self._tokens, self._seen, self.problem = read_tokens(self._file), seen, ""
        except (OSError, InputError) as error:
            if str(error) != self.problem:
                log.error("no token but the admin's is known", cause="InputError", error=str(error))
            self._tokens, self._seen, self.problem = (), None, str(error)
