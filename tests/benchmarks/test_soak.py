"""Which series the soak calls rising, and which level; how it fills the store's history."""

from __future__ import annotations

from contextlib import aclosing

import pytest

from agents.store.interface import Changed, Delete, Put
from agents.store.sqlite_store import EmbeddedStore
from benchmarks.soak import MIB, judge, repeat_changes


def series(values):
    return [(at * 30.0, value * MIB) for at, value in enumerate(values)]


@pytest.mark.parametrize(
    ("values", "is_rising"),
    [
        ([40 + 0.05 * i for i in range(120)], True),
        ([40 + 0.05 * i + (i % 7) / 10 for i in range(120)], True),
        ([40 + (i % 7) / 10 for i in range(120)], False),
        ([40] * 50 + [48] * 70, False),
        ([40 + min(i, 60) * 0.05 for i in range(120)], False),
        ([40 - 0.05 * i for i in range(120)], False),
    ],
    ids=["rising", "rising noisily", "level", "a step", "a rise that ends", "falling"],
)
def test_series_that_levelled_off_is_not_rising(values, is_rising):
    verdict = judge(series(values), 1 * MIB)
    assert verdict is not None
    assert verdict.is_rising == is_rising


def test_a_rise_within_the_limit_is_level():
    values = series([40 + 0.001 * i for i in range(120)])
    assert not judge(values, 1 * MIB).is_rising
    assert judge(values, 0.05 * MIB).is_rising


def test_rise_is_reported_per_hour():
    verdict = judge(series([i / 10 for i in range(121)]), 1 * MIB)
    assert verdict.per_hour / MIB == pytest.approx(12.0, rel=0.02)


def test_too_few_samples_are_not_judged():
    assert judge(series([1] * 11), 1 * MIB) is None


async def test_the_history_is_filled_with_the_changes_of_the_cluster(tmp_path):
    store = await EmbeddedStore.open(tmp_path / "store.db", history_max=100)
    after = await store.put("/sailor/before", b"pin")
    long, short = Put("/sailor/a", b"x" * 900), Put("/sailor/b", b"y")
    for orders in ([long], [long, short], [Delete("/sailor/b")]):
        await store.transact([], orders)
    kept = (await store.snapshot("/sailor/")).entries
    await repeat_changes(store, after, 100)
    snapshot = await store.snapshot("")
    assert snapshot.entries == kept
    sizes = []
    async with aclosing(store.watch("", after=snapshot.revision - 100)) as news:
        for _ in range(99):
            told = await anext(news)
            assert isinstance(told, Changed)
            sizes.append([each.entry and len(each.entry.value) for each in told.changes])
    assert sizes == ([[900], [900, 1], [None]] * 34)[1:100]
    await store.close()
