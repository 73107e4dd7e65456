"""Makes the signature of a webhook body, HMAC-SHA256 over time and body.

``api.handlers.webhook_message`` verifies those of incoming messages.
"""

from __future__ import annotations

import hashlib
import hmac

SIGNATURE_HEADER = "Sailor-Webhook"


def sign(secret: bytes, body: bytes, at: float) -> str:
    """Return the header's value: ``t=<seconds>,v1=<hex digest>``."""
    moment = str(int(at))
    mac = hmac.new(secret, moment.encode() + b"." + body, hashlib.sha256).hexdigest()
    return f"t={moment},v1={mac}"
