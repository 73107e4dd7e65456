"""Checks who reads snapshots and checkpoints here: workers, whose agent has granted it."""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from aiohttp import web
from cryptography.exceptions import InvalidSignature

from agents.rpc.grants import ReadGrant, check_grant
from agents.rpc.signing import AGE_S_MAX, SignatureError, Verifier, check_ticket
from agents.rpc.strangers import note_authenticated
from agents.rpc.tls import Tls
from worker.checkpoint.reader import GRANT_HEADER, PROOF_HEADER, TICKET_HEADER, request_text

KEPT = 1_000
"""Most checked grants that are remembered."""
_PROOF = re.compile(r"time=(\d{1,12}\.\d{3}), signature=([0-9a-f]{128})\Z")


async def _nobody(_: str) -> bool:
    return False


@dataclass(eq=False)
class ReadAdmission:
    """Admits requests of workers, to one agent."""

    verifier: Verifier
    tls: Tls | None = None
    shows_tickets: Callable[[str], Awaitable[bool]] = _nobody
    """Whether the workers of a node of this name prove nothing yet: they are of an earlier
    version."""
    _checked: OrderedDict[tuple[str, str], ReadGrant] = field(default_factory=OrderedDict)

    async def admit(self, request: web.Request, job: str) -> None:
        """Raise an HTTP 401 unless the sender may read this job."""
        try:
            if GRANT_HEADER in request.headers:
                self._check_proof(request, self._grant(job, request.headers[GRANT_HEADER]))
            else:
                await self._check_ticket(job, request.headers.get(TICKET_HEADER))
        except UnicodeError:  # Of bytes in a header that are no text.
            raise web.HTTPUnauthorized(text="the grant or ticket is malformed\n") from None
        except SignatureError as error:
            raise web.HTTPUnauthorized(text=f"{error}\n") from None
        note_authenticated(request)

    def _grant(self, job: str, shown: str) -> ReadGrant:
        now, known = time.time(), self._checked.get((job, shown))
        if known is None:
            known = check_grant(self.verifier.key, self.tls, job, shown, at=now)
            self._checked[job, shown] = known
            while len(self._checked) > KEPT:
                self._checked.popitem(last=False)
        if now > known.until + AGE_S_MAX:
            raise SignatureError("the grant has expired")
        if self.tls is not None and known.serial is not None and self.tls.has_revoked(known.serial):
            raise SignatureError("the certificate of the grant is revoked")
        return known

    def _check_proof(self, request: web.Request, grant: ReadGrant) -> None:
        form = _PROOF.match(request.headers.get(PROOF_HEADER, ""))
        if form is None:
            raise SignatureError(f"the header {PROOF_HEADER} is missing or malformed")
        moment, signature = form.groups()
        if abs(time.time() - float(moment)) > AGE_S_MAX:
            raise SignatureError("the request is too old, or a clock is wrong")
        span = request.headers.get("Range", "")
        text = request_text(self.verifier.receiver(), request.raw_path, span, moment)
        try:
            grant.holder.verify(bytes.fromhex(signature), text)
        except InvalidSignature:
            raise SignatureError("the request is not of the holder of the grant") from None

    async def _check_ticket(self, job: str, shown: str | None) -> None:
        reader = check_ticket(self.verifier.key, job, shown, at=time.time())
        if not await self.shows_tickets(reader):
            raise SignatureError(f"a ticket is not enough for workers of {reader}: show a grant")
