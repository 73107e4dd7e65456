"""Whether memory, descriptors, threads, store and logs level off: ``python -m benchmarks.soak``.

Trains the small LLaMA on a local cluster, moves it off one node after the other and back, and
samples every process. Before, it gives as many orders as sailord keeps events, and fills the
history of its store with changes that this cluster writes, since both grow until then. A series
*rises* if it is higher in each quarter of the time after the warm-up than in the one before, by
more than a limit per hour; a step, or a rise that ends, is level. The exit status is 3 if anything
rises.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import csv
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents.daemon.process_cleanup import children_of
from agents.store.factory import open_store
from agents.store.interface import Changed, Delete, Operation, Put, Store
from agents.store.sqlite_file import HISTORY_MAX
from benchmarks.machine import TARGET_MISSED, report_stolen_time, wait_for
from sailord.client import ServerProblem
from sailord.local.cluster import LocalCluster
from sailord.local.paths import LocalFolders
from sailord.notify.feed import KEPT
from sailord.text.table import table

SAMPLE_S = 5.0
WARM_UP = 0.3
"""The share of the time that does not count: imports, caches, the first plans."""
QUARTERS = 4
JOB = "tale"
REPEATED = "/soaked/"
"""Prefix of the repeated changes, which nothing reads; it has the length of ``/sailor/``."""
MACHINES = (("large", "zone-a"), ("large", "zone-a"), ("large", "zone-b"), ("large", "zone-b"))
MIB = 2.0**20
LIMITS_PER_HOUR: Mapping[str, float] = {
    "private": 1 * MIB,
    "resident": 2 * MIB,
    "descriptors": 4,
    "threads": 2,
    "bytes": 4 * MIB,
}
BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one figure of one process or file."""

    first: float
    """The median of the first quarter after the warm-up."""
    last: float
    per_hour: float
    is_rising: bool


def judge(series: Sequence[tuple[float, float]], limit_per_hour: float) -> Verdict | None:
    """Judge a series of (seconds, value) after the warm-up; ``None``: it is too short."""
    if len(series) < 3 * QUARTERS:
        return None
    begin, end = series[0][0], series[-1][0]
    bounds = [begin + (end - begin) * i / QUARTERS for i in range(QUARTERS + 1)]
    quarters = [
        [value for at, value in series if low <= at < high or (at == end == high)]
        for low, high in itertools.pairwise(bounds)
    ]
    if not all(quarters):
        return None
    levels = [statistics.median(each) for each in quarters]
    hours = (end - begin) * (QUARTERS - 1) / QUARTERS / 3600
    per_hour = (levels[-1] - levels[0]) / hours
    is_ever_higher = all(after > before for before, after in itertools.pairwise(levels))
    return Verdict(levels[0], levels[-1], per_hour, is_ever_higher and per_hour > limit_per_hour)


def picture(values: Sequence[float], width: int = 24) -> str:
    """Return a line of bars between the least and the most."""
    picked = [values[i * len(values) // width] for i in range(min(width, len(values)))]
    low, high = min(picked), max(picked)
    steps = [0 if high == low else round((v - low) / (high - low) * 7) for v in picked]
    return "".join(BARS[step] for step in steps)


# ---- sampling ---------------------------------------------------------------------------------


def sample_process(pid: int) -> dict[str, float]:
    """Return the figures of a process; empty if it has ended."""
    found: dict[str, float] = {}
    folder = Path(f"/proc/{pid}")
    with contextlib.suppress(OSError):
        memory = {
            name: int(rest.split()[0]) * 1024
            for name, _, rest in (
                line.partition(":")
                for line in (folder / "smaps_rollup").read_text(encoding="ascii").splitlines()[1:]
            )
        }
        found["private"] = memory["Private_Clean"] + memory["Private_Dirty"]
        found["resident"] = memory["Rss"]
        found["descriptors"] = sum(1 for _ in (folder / "fd").iterdir())
        found["threads"] = sum(1 for _ in (folder / "task").iterdir())
    return found if "threads" in found else {}


def bytes_of(files: Iterable[Path]) -> float:
    """Return the bytes of all files that exist."""
    total = 0
    for file in files:
        with contextlib.suppress(OSError):
            total += file.stat().st_size
    return total


def processes(cluster: LocalCluster, head: int) -> Iterator[tuple[str, int]]:
    """Yield the name and number of each process of the cluster."""
    yield "sailord", head
    for i, pid in enumerate(sorted(children_of(head))):
        yield f"sailord's child {i}", pid
    for name, node in cluster.nodes.items():
        yield f"agent {name}", node.agent.pid
        yield f"fork server {name}", node.fork_server
        for pid in children_of(node.fork_server):
            yield f"worker {name}", pid


def files(cluster: LocalCluster) -> Iterator[tuple[str, float]]:
    """Yield the sizes of the store and of all logs."""
    folder = cluster.place.folder
    yield "store", bytes_of(folder.glob("head/store.db*"))
    yield "log of sailord", bytes_of(folder.glob("sailord.log*"))
    for name in cluster.nodes:
        yield f"log of agent {name}", bytes_of(folder.glob(f"{name}.log*"))
        yield f"logs of workers {name}", bytes_of(folder.glob(f"{name}/generation/*/*/*log*"))


@dataclass(eq=False)
class Soak:
    """A run and what it has measured."""

    cluster: LocalCluster
    head: int
    writer: Any
    begin_s: float
    """When the samples begin."""
    samples: dict[tuple[str, int, str], list[tuple[float, float]]]
    moves: int = 0

    def sample(self) -> None:
        """Measure everything once."""
        at = time.monotonic() - self.begin_s
        for name, pid in processes(self.cluster, self.head):
            for what, value in sample_process(pid).items():
                self._note(at, name, pid, what, value)
        for name, size in files(self.cluster):
            self._note(at, name, 0, "bytes", size)

    def _note(self, at: float, name: str, pid: int, what: str, value: float) -> None:
        self.samples.setdefault((name, pid, what), []).append((at, value))
        self.writer.writerow((f"{at:.1f}", name, pid, what, f"{value:.0f}"))

    def move(self) -> None:
        """Take the next node away from the job, or give the last one back."""
        name = list(self.cluster.nodes)[self.moves // 2 % len(self.cluster.nodes)]
        order = "drain" if self.moves % 2 == 0 else "withdraw"
        with contextlib.suppress(ServerProblem):
            self.cluster.client.ask("POST", f"/v1/nodes/{name}/{order}", {})
            self.moves += 1

    def report(self, minutes: float) -> bool:
        """Print the table; return whether everything levels off."""
        since = minutes * 60 * WARM_UP
        rising, judged = 0, 0
        rows = []
        for (name, _, what), series in sorted(self.samples.items()):
            late = [(at, value) for at, value in series if at >= since]
            if not late or late[-1][0] - late[0][0] < minutes * 60 * (1 - WARM_UP) / 2:
                continue  # The process or file was there for less than half of the time.
            verdict = judge(late, LIMITS_PER_HOUR[what])
            if verdict is None:
                continue
            judged, rising = judged + 1, rising + verdict.is_rising
            if what in ("private", "bytes") or verdict.is_rising:
                unit = MIB if what in ("private", "resident", "bytes") else 1.0
                mark = "RISES" if verdict.is_rising else "level"
                levels = (f"{level / unit:.2f}" for level in (verdict.first, verdict.last))
                shown = (f"{verdict.per_hour / unit:+.2f}", mark, picture([v for _, v in series]))
                rows.append([name, what, *levels, *shown])
        header = ("process or file", "figure", "after warm-up", "at the end", "per hour", "", "")
        print(table(header, rows))
        print(f"\n{judged} series (memory and files in MiB), {rising} rise; {self.moves} orders")
        return rising == 0


def fill(soak: Soak, every_s: float) -> None:
    """Fill what sailord and its store keep of the past, as hours of this run would."""
    cluster = soak.cluster
    ask, checkpoints = cluster.client.ask, f"/v1/jobs/{JOB}/checkpoints"
    found = wait_for(cluster, lambda: ask("GET", checkpoints)["checkpoints"], within_s=600.0)
    for order in (*["pin"] * KEPT, "unpin"):
        ask("POST", f"{checkpoints}/{found[-1]['step']}/{order}", {})
    asyncio.run(_fill_store(soak, every_s))


async def _fill_store(soak: Soak, every_s: float) -> None:
    store = await open_store(f"unix://{soak.cluster.place.folder}/head/store.sock")
    after = (await store.snapshot(REPEATED)).revision
    for _ in ("drain", "withdraw"):
        soak.move()
        until_s = time.monotonic() + every_s
        while time.monotonic() < until_s:
            soak.cluster.look_after()
            await asyncio.sleep(SAMPLE_S)
    await repeat_changes(store, after, HISTORY_MAX)
    await store.close()


async def repeat_changes(store: Store, after: int, revisions: int) -> None:
    """Write the changes since ``after`` again and again, under keys of their own."""
    last = until = (await store.snapshot(REPEATED)).revision
    mix: list[list[Operation]] = []
    async with contextlib.aclosing(store.watch("", after=after)) as news:
        while after < until:
            told = await anext(news)
            assert isinstance(told, Changed), "the store has forgotten what to repeat"
            after = told.revision
            keys = [REPEATED + each.key.removeprefix("/sailor/") for each in told.changes]
            entries = [each.entry for each in told.changes]
            mix.append(
                [
                    Delete(key) if entry is None else Put(key, entry.value)
                    for key, entry in zip(keys, entries, strict=True)
                ]
            )
    for orders in itertools.cycle(mix):
        if last - until >= revisions:
            break
        last = (await store.transact([], orders)).revision
    for entry in (await store.snapshot(REPEATED)).entries:
        await store.transact([], [Delete(entry.key)])


def run(minutes: float, every_s: float, out: Path) -> bool:
    """Run a cluster for ``minutes``; return whether everything levels off."""
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    with (
        LocalCluster(LocalFolders(folder / "c"), machines=MACHINES) as cluster,
        out.open("w", newline="", encoding="utf-8") as file,
    ):
        cluster.start()
        text = cluster.place.job("job.toml", persist_every=20)
        cluster.client.ask("POST", "/v1/jobs", {"job": text, "id": JOB})
        soak = Soak(cluster, cluster.head_pid, csv.writer(file), 0.0, {})
        fill(soak, every_s)
        begin_s = soak.begin_s = time.monotonic()
        soak.writer.writerow(("seconds", "name", "pid", "figure", "value"))
        moved_s = begin_s
        while (now := time.monotonic()) < begin_s + minutes * 60:
            for told in cluster.look_after():
                print(f"{(now - begin_s) / 60:.1f} min: {told}", flush=True)
            if now >= moved_s + every_s:
                moved_s = now
                soak.move()
            soak.sample()
            file.flush()
            time.sleep(SAMPLE_S)
        job = cluster.client.ask("GET", "/v1/status")["job"]
        print(f"{minutes:g} minutes: step {job['step']}, generation {job['generation']['number']}")
        return soak.report(minutes)


def main() -> None:
    parser = argparse.ArgumentParser(description="Watch what a training cluster takes over time.")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=60.0, help="seconds between two orders")
    parser.add_argument("--out", type=Path, default=Path("soak.csv"), help="all samples")
    given = parser.parse_args()
    with report_stolen_time():
        levels_off = run(given.minutes, given.every, given.out)
    sys.exit(0 if levels_off else TARGET_MISSED)


if __name__ == "__main__":
    main()
