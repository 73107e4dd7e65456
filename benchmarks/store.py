"""What the store costs: puts, watches and leases.

    python -m benchmarks.store [URL ...]

Without an address: an embedded store in a temporary folder, by itself and through its socket (both
ends in this one process). An etcd to measure is named by its address, ``etcd://127.0.0.1:2379``;
keys below ``/sailor-benchmark/`` are written there, under leases that end.

``put`` is one put after the other, the median and the 99th percentile. ``puts at once`` counts
puts a second with 32 under way. ``put to watch`` is the time from a put's call until a watch on a
connection of its own has told of it. ``leases`` is how long it takes to keep 2,000 leases alive
once, 100 at a time, as 2,000 agents do every 2.5 s.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import TypeVar

from agents.store.factory import open_store
from agents.store.interface import Changed, Store
from agents.store.socket_server import serve
from sailord.text.table import table

Input = TypeVar("Input")
Output = TypeVar("Output")
PREFIX = "/sailor-benchmark/"
VALUE = b"x" * 400  # About a node's record.
LEASES = 2_000
LEASES_AT_ONCE = 100


async def measure(store: Store, other: Store) -> tuple[float, ...]:
    """Put's median and 99th percentile (ms), puts a second, put to watch (ms), leases (s)."""
    lease = (await store.grant(600)).id

    async def put(number: int) -> float:
        begin_s = time.perf_counter()
        await store.put(f"{PREFIX}{number % 100}", VALUE, lease=lease)
        return 1e3 * (time.perf_counter() - begin_s)

    await at_once(put, range(50), width=1)
    alone_ms = await at_once(put, range(500), width=1)
    begin_s = time.perf_counter()
    await at_once(put, range(3_200), width=32)
    puts_per_s = 3_200 / (time.perf_counter() - begin_s)
    told_ms = await put_to_watch(store, other, lease)

    async def grant(_: int) -> int:
        return (await store.grant(600)).id

    leases = await at_once(grant, range(LEASES), width=LEASES_AT_ONCE)
    begin_s = time.perf_counter()
    kept = await at_once(store.keep, leases, width=LEASES_AT_ONCE)
    leases_s = time.perf_counter() - begin_s
    assert all(kept)
    await at_once(store.revoke, [*leases, lease], width=LEASES_AT_ONCE)
    percentile_ms = statistics.quantiles(alone_ms, n=100)[98]
    return statistics.median(alone_ms), percentile_ms, puts_per_s, told_ms, leases_s


async def put_to_watch(store: Store, other: Store, lease: int) -> float:
    """The median of a hundred."""
    after = (await store.snapshot(PREFIX)).revision
    times_ms = []
    async with aclosing(other.watch(PREFIX, after=after)) as news:
        for _ in range(100):
            begin_s = time.perf_counter()
            putting = asyncio.create_task(store.put(PREFIX, VALUE, lease=lease))
            assert isinstance(await anext(news), Changed)
            times_ms.append(1e3 * (time.perf_counter() - begin_s))
            await putting
    return statistics.median(times_ms)


async def at_once(
    call: Callable[[Input], Awaitable[Output]], inputs: Iterable[Input], *, width: int
) -> list[Output]:
    """Call for each input, ``at_once`` at a time."""
    rest = iter(inputs)
    found: list[Output] = []

    async def work() -> None:
        for each in rest:
            found.append(await call(each))

    await asyncio.gather(*(work() for _ in range(width)))
    return found


@asynccontextmanager
async def places(urls: list[str]) -> AsyncIterator[list[tuple[str, Store, Store]]]:
    """Each store with two ways to it, under the name that the table gives it."""
    with tempfile.TemporaryDirectory() as folder:
        found = [(url, await open_store(url), await open_store(url)) for url in urls]
        server = None
        if not urls:
            socket = Path(folder) / "socket"
            store = await open_store(f"embedded://{folder}/store.db")
            server = await serve(store, socket)
            ways = [await open_store(f"unix://{socket}") for _ in range(2)]
            found = [("embedded", store, store), ("embedded, socket", ways[0], ways[1])]
        yield found
        for store in itertools.chain.from_iterable(reversed([pair[1:] for pair in found])):
            await store.close()
        if server is not None:
            await server.close()


async def main(urls: list[str]) -> None:
    """Print the table."""
    columns = ("put ms", "p99 ms", "puts/s, 32", "put to watch ms", "2,000 leases s")
    formats, rows = (".2f", ".2f", ",.0f", ".2f", ".2f"), []
    async with places(urls) as found:
        for name, store, other in found:
            figures = await measure(store, other)
            rows.append([name, *map(format, figures, formats)])
    print(table(("store", *columns), rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("urls", nargs="*", metavar="URL")
    asyncio.run(main(parser.parse_args().urls))
