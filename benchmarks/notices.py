"""How soon a notice stands in the store: ``python -m benchmarks.notices [--flips N]``.

A real agent watches a metadata server of ours over HTTP, and its store is an embedded one on this
machine. Each time is from the flip of the flag to the intent, as a watch of the store sees it; the
flag goes back in between, which is another notice withdrawn.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import tempfile
import time
from pathlib import Path

from agents.notices import PREEMPTED
from tests.agents.running import PREFIX, Place, place, until
from tests.fakes.metadata import Metadata, metadata_server

MOODS: dict[str, dict[str, float]] = {
    "as it should be": {},
    "answers 0.5 s late": {"delay_s": 0.5},
    "breaks three connections": {"drops": 3},
    "answers 503 three times": {"fails": 3},
}


async def flip_and_wait(here: Place, server: Metadata, value: str) -> float:
    """Seconds from a flip to what follows from it in the store."""
    after = (await here.store.snapshot(f"{PREFIX}intent/")).revision
    async with contextlib.aclosing(here.store.watch(f"{PREFIX}intent/", after=after)) as changes:
        begun = time.perf_counter()
        await server.flip(PREEMPTED, value)
        await anext(aiter(changes))
        return time.perf_counter() - begun


async def measure(flips: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with metadata_server() as server, place(Path(folder)) as here:
            here.environment["GCE_METADATA_HOST"] = server.address
            here.start()
            await here.ready()
            print(f"{'the metadata server':28} {'flips':>5} {'median':>9} {'most':>9}")
            for mood, changes in MOODS.items():
                took_s = []
                for _ in range(flips):
                    server.delay_s = 0.0
                    await until(lambda: server.waiting == 2)
                    for name, value in changes.items():
                        setattr(server, name, value)
                    took_s.append(await flip_and_wait(here, server, "TRUE"))
                    server.delay_s = server.drops = server.fails = 0
                    await until(lambda: server.waiting == 2)
                    await flip_and_wait(here, server, "FALSE")
                median, most = statistics.median(took_s), max(took_s)
                print(f"{mood:28} {flips:5} {median * 1e3:6.1f} ms {most * 1e3:6.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description="From a notice to the store.")
    parser.add_argument("--flips", type=int, default=20)
    asyncio.run(measure(parser.parse_args().flips))


if __name__ == "__main__":
    main()
