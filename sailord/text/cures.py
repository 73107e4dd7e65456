"""What cures a trouble, where several places say it."""

from __future__ import annotations

SPEND_MORE = (
    "submit it under another id with a larger max_usd_total; sailorctl checkpoint export and import"
    " copy its state"
)
