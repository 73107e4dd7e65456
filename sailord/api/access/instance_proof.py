"""Checks the token with which an instance of Google Cloud proves which one it is."""

from __future__ import annotations

from dataclasses import dataclass

import jwt

from sailord.api.access.webhook_tokens import TokenError, verified_claims


@dataclass(frozen=True, slots=True)
class ProvenInstance:
    """What Google says of the instance that asked for a token."""

    id: str
    name: str


def check_proof(
    token: str, keys: dict[str, jwt.PyJWK], *, audience: str, project: str
) -> ProvenInstance:
    """Return the instance of this project whose token it is; raises ``TokenError``."""
    claims = verified_claims(token, keys, audience)
    try:
        said = claims["google"]["compute_engine"]
        proven = ProvenInstance(str(said["instance_id"]), str(said["instance_name"]))
        of = said["project_id"]
    except (KeyError, TypeError):
        raise TokenError("the token is not of an instance") from None
    if of != project:
        raise TokenError("the token is of an instance of another project")
    return proven
