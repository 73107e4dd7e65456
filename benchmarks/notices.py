"""How soon a lost machine is detected: ``python -m benchmarks.notices [--flips N] [--rounds N]``.

First the time from a notice to the store. A real agent watches a fake metadata server over HTTP,
with an embedded store on this machine. Each time is from the flip of the flag until a watch of the
store shows the order; between flips the notice is withdrawn.

Then the time until a real sailord reacts to a notice, and until it detects a silent death (all
processes of a node are killed at once). Each time ends when a client of the API gets the event.
The exit status is 3 if the longest time exceeds its target.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
from pathlib import Path

from agents.cloud.notices import PREEMPTED
from benchmarks.machine import TARGET_MISSED, report_stolen_time
from sailord.text.table import table
from tests.agents.running import PREFIX, Place, place
from tests.control.cluster import LEASE_S
from tests.fakes.metadata import Metadata, metadata_server
from tests.gce.detection_cluster import (
    DECIDED_S,
    MISSED_S,
    DetectionCluster,
    detection_cluster,
    is_lost,
    is_noticed,
    is_stopping,
)
from tests.processes import until

SERVER_FAULTS: dict[str, dict[str, float]] = {
    "no fault": {},
    "answers 0.5 s late": {"delay_s": 0.5},
    "breaks three connections": {"drops": 3},
    "answers 503 three times": {"fails": 3},
}


async def flip_s(here: Place, server: Metadata, value: str) -> float:
    """Flip the flag; return the seconds until the store shows the effect."""
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
            rows = []
            for fault, changes in SERVER_FAULTS.items():
                took_s = []
                for _ in range(flips):
                    server.delay_s = 0.0
                    await until(lambda: server.waiting == 2)
                    for name, value in changes.items():
                        setattr(server, name, value)
                    took_s.append(await flip_s(here, server, "TRUE"))
                    server.delay_s = server.drops = server.fails = 0
                    await until(lambda: server.waiting == 2)
                    await flip_s(here, server, "FALSE")
                shown = (f"{s * 1e3:.1f} ms" for s in (statistics.median(took_s), max(took_s)))
                rows.append([fault, str(flips), *shown])
            print(table(("the metadata server", "flips", "median", "max"), rows))


TARGETS_S = {
    "notice: the event is sent": DECIDED_S,
    "notice: a new plan is ready, the old one stops": DECIDED_S,
    "silent death of an unused node": MISSED_S,
    "silent death of the job's node": MISSED_S,
}


async def measure_sailord(rounds: int) -> bool:
    """Print the detection times; return whether all are within their targets."""
    took_s: dict[str, list[float]] = {}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            async with detection_cluster(Path(folder)) as here:
                for what, seconds in zip(TARGETS_S, await measure_once(here), strict=True):
                    took_s.setdefault(what, []).append(seconds)
    rows = []
    for what, each in took_s.items():
        shown = (statistics.median(each), max(each), TARGETS_S[what])
        rows.append([what, str(len(each)), *(f"{seconds:.2f} s" for seconds in shown)])
    title = f"to sailord, with a lease of {LEASE_S:g} s"
    print("", table((title, "times", "median", "max", "target"), rows), sep="\n")
    return all(max(each) < TARGETS_S[what] for what, each in took_s.items())


async def measure_once(here: DetectionCluster) -> tuple[float, ...]:
    """Measure a notice, the death of an unused node, and the death of the job's node."""
    known = await here.event_delays_s(lambda: here.flip("TRUE"), is_noticed, is_stopping)
    await asyncio.to_thread(here.wait_until_moved)
    idle_s = await here.until_gone(here.taken.kill_node)
    (lost,) = await here.event_delays_s(here.kept.kill_node, is_lost)
    return *known, idle_s, lost


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Measure detection times, in the store and in sailord."
    )
    parser.add_argument("--flips", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5, help="of a notice and two deaths")
    given = parser.parse_args()
    with report_stolen_time():
        asyncio.run(measure(given.flips))
        is_soon = asyncio.run(measure_sailord(given.rounds))
    if not is_soon:
        sys.exit(TARGET_MISSED)


if __name__ == "__main__":
    main()
