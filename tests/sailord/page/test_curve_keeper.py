"""Curves are stored for the next leader, by the leader alone, and stay small."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from agents.protocol.codec import decode, encode
from agents.protocol.compression import pack, unpack
from agents.store.interface import Delete, Put
from sailord.cluster_records import Gateway
from sailord.page.curve_keeper import CurveKeeper
from sailord.page.training_curve import (
    SAMPLES_MAX,
    CurvePoint,
    StoredCurve,
    TrainingCurve,
    TrainingCurves,
)
from tests.sailord.core.states import JOB, NOW, TERM, A, B, node, report, state
from tests.sailord.led_store import TEST, in_a_store, lead


async def store(gateway: Gateway, term: int, its: TrainingCurves) -> None:
    """Store a curve as the leader of a term in which none was stored before."""
    keeper = CurveKeeper(gateway, its)
    await keeper.load(term)
    await keeper.save(term)


def curve(steps: int, *, since: float = NOW) -> TrainingCurves:
    return TrainingCurves({JOB: of_job(JOB, steps, since)})


def of_job(job: str, steps: int, since: float = NOW) -> TrainingCurve:
    loss = 1 / 3
    samples = [CurvePoint(since + s, 40 + s, loss / (s + 1), 1e6 / 7, 3) for s in range(steps)]
    return TrainingCurve(job, samples)


def test_the_next_leader_goes_on_with_the_stored_curve(tmp_path: Path) -> None:
    async def play(gateway: Gateway) -> TrainingCurves:
        term = await lead(gateway)
        await store(gateway, term, curve(5))
        mine = TrainingCurves()
        await CurveKeeper(gateway, mine).load(term)
        said = node(A, report(A, step=60, loss=0.25)), node(B, report(B, step=60))
        mine.observe([replace(state(None, *said, step=60), now=NOW + 20, term=TERM)])
        return mine

    found = in_a_store(tmp_path, play).of(JOB)
    assert [sample.step for sample in found.samples] == [40, 41, 42, 43, 44, 60]
    assert found.samples[1] == CurvePoint(NOW + 1, 41, 0.166667, 142857, 3)


def test_a_leader_that_is_elected_again_keeps_what_it_has_since(tmp_path: Path) -> None:
    async def play(gateway: Gateway) -> TrainingCurves:
        term, mine = await lead(gateway), curve(5)
        await store(gateway, term, curve(3))
        await CurveKeeper(gateway, mine).load(term)
        return mine

    assert len(in_a_store(tmp_path, play).of(JOB).samples) == 5


def test_a_former_leader_does_not_overwrite_the_curve(tmp_path: Path) -> None:
    async def play(gateway: Gateway) -> TrainingCurves:
        term, mine = await lead(gateway), TrainingCurves()
        await store(gateway, term, curve(5))
        await store(gateway, term - 1, curve(2, since=NOW + 100))
        await CurveKeeper(gateway, mine).load(term)
        return mine

    assert len(in_a_store(tmp_path, play).of(JOB).samples) == 5


def test_a_leader_elected_again_does_not_store_its_curve_before_it_has_read_the_last_ones(
    tmp_path: Path,
) -> None:
    async def play(gateway: Gateway) -> tuple[int, int]:
        term, mine = await lead(gateway), curve(2)
        keeper = CurveKeeper(gateway, mine)
        await keeper.load(term)
        await gateway.store.transact([], [Delete(TEST.leader)])
        await store(gateway, await lead(gateway), curve(5))
        await gateway.store.transact([], [Delete(TEST.leader)])
        again = await lead(gateway)
        await keeper.save(again)
        await keeper.load(again)
        return len(mine.of(JOB).samples), 5

    mine, others = in_a_store(tmp_path, play)
    assert mine == others


def test_curve_is_stored_only_if_it_has_grown_and_a_long_one_is_thinned(tmp_path: Path) -> None:
    async def play(gateway: Gateway) -> tuple[int, int, int]:
        term, mine = await lead(gateway), curve(SAMPLES_MAX)
        keeper = CurveKeeper(gateway, mine)
        await keeper.load(term)
        await keeper.save(term)
        first = await gateway.store.get(TEST.curve)
        await keeper.save(term)
        again = await gateway.store.get(TEST.curve)
        assert first is not None
        assert again is not None
        return len(first.value), first.modified, again.modified

    size, first, again = in_a_store(tmp_path, play)
    assert size < 16_000
    assert first == again


def test_an_unreadable_curve_is_left_alone(tmp_path: Path) -> None:
    async def play(gateway: Gateway) -> object:
        term = await lead(gateway)
        await gateway.store.transact([], [Put(TEST.curve, b"{]")])
        keeper = CurveKeeper(gateway, curve(5))
        await keeper.load(term)
        await keeper.save(term)
        entry = await gateway.store.get(TEST.curve)
        assert entry is not None
        return entry.value

    assert in_a_store(tmp_path, play) == b"{]"


def test_curves_of_all_jobs_that_run_are_stored_and_an_older_version_reads_the_last(
    tmp_path: Path,
) -> None:
    its = curve(5)
    its.by_job |= {"beside": of_job("beside", 3), "ended": of_job("ended", 2, NOW - 900)}
    its.running = frozenset({JOB, "beside"})

    async def play(gateway: Gateway) -> tuple[TrainingCurves, StoredCurve]:
        term, mine = await lead(gateway), TrainingCurves()
        await store(gateway, term, its)
        await CurveKeeper(gateway, mine).load(term)
        entry = await gateway.store.get(TEST.curve)
        assert entry is not None
        return mine, decode(StoredCurve, unpack(entry.value))

    mine, older = in_a_store(tmp_path, play)
    assert {job: len(each.samples) for job, each in mine.by_job.items()} == {JOB: 5, "beside": 3}
    assert (older.job, len(older.at)) == (JOB, 5)


def test_the_curve_of_an_older_version_is_read(tmp_path: Path) -> None:
    async def play(gateway: Gateway) -> TrainingCurves:
        term, mine = await lead(gateway), TrainingCurves()
        value = pack(encode(of_job(JOB, 4).columns()))
        await gateway.store.transact([], [Put(TEST.curve, value)])
        await CurveKeeper(gateway, mine).load(term)
        return mine

    assert len(in_a_store(tmp_path, play).of(JOB).samples) == 4
