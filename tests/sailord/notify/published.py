"""An announcer that writes nothing, and what it published."""

from __future__ import annotations

from typing import Any

from agents.protocol.store_keys import Keys
from sailord.cluster_records import Gateway
from sailord.notify.announcer import Announcer
from sailord.notify.feed import Feed
from sailord.notify.outbox import Outbox


class Published:
    """An announcer and the events that it published."""

    def __init__(self, **others: Any) -> None:
        gateway = Gateway(None, Keys("test"))  # type: ignore[arg-type] # nothing is written here
        self.announcer = Announcer(gateway, Feed(), Outbox(gateway), **others)

    def texts(self, kind: str) -> list[str]:
        return [each.text for each in self.announcer.feed.kept if each.kind == kind]
