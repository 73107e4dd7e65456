"""Who a certificate belongs to: ``sailor://CLUSTER/ROLE/NAME``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from agents.protocol.names import NAME

CallerRole = Literal["sailord", "agent", "user", "store"]
"""``store``: a member of etcd, which knows no roles but has addresses."""
ROLES: tuple[CallerRole, ...] = get_args(CallerRole)
MEMBER = "member"
"""Stands for a sailord or an agent, where the caller takes either."""
_URI = re.compile(r"sailor://([^/]+)/([^/]+)/([^/]+)\Z")


@dataclass(frozen=True, slots=True)
class Identity:
    """One member of a cluster."""

    cluster: str
    role: CallerRole
    name: str

    def __str__(self) -> str:
        return f"{self.role}/{self.name}"

    @property
    def uri(self) -> str:
        """The name in the certificate."""
        return f"sailor://{self.cluster}/{self.role}/{self.name}"

    @property
    def server_names(self) -> tuple[str, ...]:
        """The names under which a client may ask for this server."""
        wanted = (
            ()
            if self.role in ("user", "store")
            else (f"{self.name}.{self.role}", self.role, MEMBER)
        )
        return tuple(server_name(each, self.cluster) for each in wanted)


def server_name(wanted: str, cluster: str) -> str:
    """Return the name that a server's certificate must have, as a role or ``NAME.ROLE``."""
    return f"{wanted}.{cluster}.sailor"


def read_identity(uri: str) -> Identity | None:
    """Read the name in a certificate; ``None``: it is not one of ours."""
    form = _URI.match(uri)
    if form is None:
        return None
    cluster, role, name = form.groups()
    if role not in ROLES or not NAME.match(cluster) or not NAME.match(name):
        return None
    return Identity(cluster, role, name)


def identity_of(certificate: Mapping[str, Any]) -> Identity | None:
    """Return whose certificate it is, in the form of ``ssl.SSLSocket.getpeercert``."""
    named = [read_identity(value) for kind, value in certificate.get("subjectAltName", ())
             if kind == "URI"]  # fmt: skip
    return named[0] if len(named) == 1 else None
