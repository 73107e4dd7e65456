"""Compression of long values in the store, where a thousand ranks repeat the same words.

Short values stay readable, so that the store of a small cluster can be inspected.
"""

from __future__ import annotations

import zlib

from agents.protocol.codec import WireError

PACK_FROM = 16 << 10
UNPACKED_MAX = 256 << 20


def pack(text: bytes) -> bytes:
    """Compress a JSON object if it is long."""
    return text if len(text) < PACK_FROM else zlib.compress(text)


def unpack(value: bytes) -> bytes:
    """Return the JSON; raises ``WireError`` if the value is neither JSON nor compressed JSON."""
    if value[:1] in (b"{", b""):
        return value
    unpacking = zlib.decompressobj()
    try:
        text = unpacking.decompress(value, UNPACKED_MAX)
    except zlib.error as error:
        raise WireError(f"neither JSON nor compressed: {error}") from None
    if not unpacking.eof:
        raise WireError("the compressed value is truncated or too long")
    return text
