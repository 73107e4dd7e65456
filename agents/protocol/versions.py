"""The protocol number of this version, and which versions understand each other (ADR 70).

A field that an older reader may pass over needs no new number. Anything else does: see the ADR.
"""

from __future__ import annotations

from dataclasses import dataclass

SPEAKS = 1
"""What this version writes; 0: the versions before there was a number."""
UNDERSTANDS_FROM = 0
"""The oldest protocol that it reads as its writer meant it."""
NEEDS = "needs"
"""The field of any record or message that says which protocol a reader must speak to act on it."""


@dataclass(frozen=True, slots=True)
class Protocol:
    """What a process writes and reads; as registered by sailord and agents."""

    speaks: int = 0
    understands_from: int = 0
    release: str = ""
    """The version of its package, for people to read; empty: of one that does not say."""


UNNUMBERED = Protocol()
"""Of a process of a version before there was a number."""


def own_protocol(release: str = "") -> Protocol:
    """Return the protocol of this version."""
    return Protocol(SPEAKS, UNDERSTANDS_FROM, release)


def why_incompatible(other: Protocol, *, other_is: str, this_is: str) -> str:
    """Return who must be upgraded first, in one sentence; empty if they understand each other."""
    own = own_protocol()
    if own.speaks < other.understands_from:
        return (
            f"{other_is} understands protocol {other.understands_from} and later, and {this_is} "
            f"speaks {own.speaks}: upgrade {this_is} first"
        )
    if other.speaks < own.understands_from:
        return (
            f"{other_is} speaks protocol {other.speaks}, and {this_is} understands "
            f"{own.understands_from} and later: upgrade {other_is} first"
        )
    return ""
