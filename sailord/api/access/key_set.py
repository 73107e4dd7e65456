"""The public keys that verify Google's tokens: from a file, or fetched and renewed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import aiohttp
import jwt
import structlog

from sailord.api.access.webhook_tokens import TokenError, parse_keys, read_keys

log = structlog.get_logger("sailord")

REFRESH_S = 3600.0
"""Fetched keys are renewed by the first token after this time."""
AGAIN_S = 60.0
"""A token with an unknown key renews them at most once in this time: strangers can name any key."""
KEEP_S = 86_400.0
"""Fetched keys are trusted this long without an answer: their owner may have revoked one."""
FETCH_S = 5.0
BYTES_MAX = 1 << 16


class KeySet:
    """A JSON Web Key Set, in a file that is read each time, or at an HTTPS address."""

    def __init__(self, source: Path | str, now: Callable[[], float] = time.monotonic) -> None:
        self._source = source
        self._now = now
        self._keys: dict[str, jwt.PyJWK] = {}
        self._fetched_at = self._asked_at = float("-inf")
        self._fetching: asyncio.Task[None] | None = None

    async def find(self, key_id: str) -> dict[str, jwt.PyJWK]:
        """Return the keys; fetch newer ones first if this key is not among them."""
        if isinstance(self._source, Path):
            return await asyncio.to_thread(read_keys, self._source)
        age_s = self._now() - self._fetched_at
        if age_s >= KEEP_S:
            self._keys = {}
        is_known = key_id in self._keys
        if (age_s >= REFRESH_S or not is_known) and self._now() - self._asked_at >= AGAIN_S:
            self._asked_at = self._now()
            self._fetching = asyncio.create_task(self._fetch(self._source))
        if self._fetching is not None and not is_known:
            # All tokens with new keys wait for one answer, also if a sender disconnects.
            await asyncio.shield(self._fetching)
        return self._keys

    async def _fetch(self, address: str) -> None:
        timeout = aiohttp.ClientTimeout(total=FETCH_S)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.get(address, allow_redirects=False) as answer,
            ):
                if answer.status != 200:
                    raise TokenError(f"HTTP status {answer.status}")
                raw = await answer.content.read(BYTES_MAX + 1)
                while len(raw) <= BYTES_MAX and not answer.content.at_eof():
                    raw += await answer.content.read(BYTES_MAX + 1 - len(raw))
            if len(raw) > BYTES_MAX:
                raise TokenError(f"more than {BYTES_MAX} bytes")
            self._keys = parse_keys(raw)
            self._fetched_at = self._now()
        except (aiohttp.ClientError, TimeoutError, TokenError) as error:
            told = str(error) or type(error).__name__
            log.warning("cannot renew the keys of Google's tokens", source=address, error=told)
