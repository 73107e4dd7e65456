"""The protocol number of what an agent tells the fork server and the workers of its node.

They keep the code with which they were started until the node drains, so that an agent may be of
another version. A key that an older worker may pass over needs no new number. If one is renamed,
removed or means something else, ``SPEAKS`` grows, and ``NEEDS`` with it. Agents and sailord have a
number of their own (``agents.protocol.versions``).
"""

from __future__ import annotations

SPEAKS = 2
"""What workers of this version understand; those before there was a number: 0."""
PROVES_READS = 2
"""From here on workers prove what they read with a grant."""
NEEDS = 0
"""The least number of workers that can act on what an agent of this version tells them."""


def why_incompatible(speaks: int, needs: int) -> str:
    """Return why workers cannot act on an agent's orders, and the cure; empty: they can."""
    if speaks >= needs:
        return ""
    return (
        f"this node's workers speak protocol {speaks}, and its agent needs {needs}:"
        " drain the node, which starts them anew (sailorctl drain NODE)"
    )
