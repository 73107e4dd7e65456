"""Long values of the store, packed: a thousand ranks are described in the same words.

What is short stays as it is, so that whoever looks into the store of a small cluster can read it.
"""

from __future__ import annotations

import zlib

from agents.protocol.codec import WireError

PACK_FROM = 16 << 10
UNPACKED_MAX = 256 << 20


def pack(text: bytes) -> bytes:
    """Return what is to stand in the store for a JSON object."""
    return text if len(text) < PACK_FROM else zlib.compress(text)


def unpack(value: bytes) -> bytes:
    """Return the JSON that was packed; ``WireError`` where nobody can."""
    if value[:1] in (b"{", b""):
        return value
    unpacking = zlib.decompressobj()
    try:
        text = unpacking.decompress(value, UNPACKED_MAX)
    except zlib.error as error:
        raise WireError(f"neither JSON nor packed: {error}") from None
    if not unpacking.eof:
        raise WireError("its end is missing, or it is too long")
    return text
