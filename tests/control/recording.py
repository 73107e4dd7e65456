"""Records the counted steps and the generation records while daemons are killed."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from agents.protocol.codec import decode
from agents.protocol.records import GenerationRecord
from agents.protocol.store_keys import Keys
from agents.store.factory import open_store
from agents.store.interface import Changed, Entry, Store, StoreError
from tests.control.cluster import Cluster

LOOK_S = 0.02


@dataclass(eq=False)
class Recording:
    """Everything that was recorded, in order."""

    counts: list[tuple[float, int, int]] = field(default_factory=list)
    """Time, generation and step."""
    records: list[GenerationRecord] = field(default_factory=list)

    def check_steps(self) -> None:
        """Check that no step was lost or repeated."""
        for before, after in zip(self.counts, self.counts[1:], strict=False):
            assert before[1:] < after[1:], "a generation or a step decreased"
            assert before[2] <= after[2], "steps were lost"

    def longest_pause_s(self) -> float:
        """Return the longest time between two steps of one generation."""
        pairs = zip(self.counts, self.counts[1:], strict=False)
        return max((b[0] - a[0] for a, b in pairs if a[1] == b[1]), default=0.0)

    def check(self) -> None:
        """Check that no step was lost or repeated, and no generation number reused."""
        self.check_steps()
        for one, two in zip(self.records, self.records[1:], strict=False):
            assert one.term <= two.term, "a deposed leader wrote a record"
            if one.number == two.number:
                same = (one.plan, one.members, one.restore)
                assert same == (two.plan, two.members, two.restore), "a generation was reused"
                continue
            assert two.number == one.number + 1, "generation numbers did not grow by one"


@contextlib.contextmanager
def recording(cluster: Cluster) -> Iterator[Recording]:
    """Record the workers' counts and the store's records until the end of the block."""
    recorded, ended = Recording(), threading.Event()

    def look_at_counts() -> None:
        while not ended.wait(LOOK_S):
            count = cluster.count()
            if not recorded.counts or recorded.counts[-1][1:] != count:
                recorded.counts.append((time.monotonic(), *count))

    def note(_: int, key: str, entry: Entry | None) -> None:
        if entry is not None and key.endswith("/gen"):
            recorded.records.append(decode(GenerationRecord, entry.value))

    following = follow_store(cluster.heads[0].store_url, Keys("test").jobs, ended, note)
    threads = [
        threading.Thread(target=look_at_counts),
        threading.Thread(target=asyncio.run, args=(following,)),
    ]
    for thread in threads:
        thread.start()
    try:
        yield recorded
    finally:
        ended.set()
        for thread in threads:
            thread.join()


NoteChange = Callable[[int, str, Entry | None], None]
"""Takes the revision of a change, its key, and what the key has since; ``None``: it was deleted."""


async def follow_store(url: str, prefix: str, ended: threading.Event, note: NoteChange) -> None:
    """Tell what a store has, then what changes, until ``ended``."""
    store = await open_store(url)
    task = asyncio.create_task(_follow(store, prefix, note))
    while not ended.is_set() and not task.done():
        await asyncio.sleep(0.1)
    if task.done():
        task.result()
    task.cancel()
    await store.close()


async def _follow(store: Store, prefix: str, note: NoteChange) -> None:
    after = 0
    while True:
        with contextlib.suppress(
            StoreError
        ):  # The store is down; resume after the last revision seen.
            if not after:
                first = await store.snapshot(prefix)
                for entry in first.entries:
                    note(entry.modified, entry.key, entry)
                after = first.revision
            async for news in store.watch(prefix, after=after):
                if not isinstance(news, Changed):
                    after = 0  # Compacted, or the store is that of a backup: read it anew.
                    break
                after = news.revision
                for change in news.changes:
                    note(after, change.key, change.entry)
        await asyncio.sleep(0.1)
