"""Retention deletes garbage, and nothing that a job or an operator can still need."""

from __future__ import annotations

import asyncio

import pytest

from agents.protocol.records import (
    FIRST,
    Durable,
    GenerationRecord,
    JobId,
    JobRecord,
    Point,
    Saving,
)
from sailord.checkpoints.catalog import Checkpoints
from sailord.checkpoints.object_storage import ListedObject, Missing
from sailord.checkpoints.retention import discarded, folders_of, names_to_delete
from sailord.core.model.commands import CollectGarbage

J = JobId("j")


def entries(*names):
    return folders_of(ListedObject(name, 1) for name in names)


def point(generation, step):
    return Durable(Point(step, generation), f"{generation}-{step}", "")


def swept(names, chain, *, generation, restore=(0, 0), keep=1, referenced=None):
    gone = names_to_delete(
        J,
        entries(*names),
        [point(*each) for each in chain],
        generation=generation,
        restore=Point(restore[1], restore[0]),
        keep=keep,
        referenced=referenced or {},
    )
    return [name.removeprefix("j/") for name in gone]


def checkpoint(generation, step):
    return [f"{generation}-{step}/{name}" for name in ("0-n.snap", "manifest-3.json")]


def test_last_checkpoints_are_kept_and_older_ones_deleted_manifest_first():
    names = [*checkpoint(1, 10), *checkpoint(1, 20), *checkpoint(1, 30)]
    gone = swept(names, [(1, 30), (1, 20), (1, 10)], generation=1, keep=2)
    assert gone == ["1-10/manifest-3.json", "1-10/0-n.snap"]


@pytest.mark.parametrize(
    ("name", "generation", "goes"),
    [
        ("1-20/0-n.snap", 1, True),  # Below the durable step: never committed any more.
        ("1-40/0-n.snap", 1, False),  # The present generation may still commit it.
        ("1-40/0-n.snap", 2, True),  # Its generation is over, and it never was a checkpoint.
        ("1-40/manifest-3.json", 2, False),  # A rollback went back beyond it.
        ("1-20/manifest-3.json", 2, True),  # Training is past it again.
        ("notes/readme", 9, False),  # None of ours.
        ("3-x/0-n.snap", 9, False),
    ],
)
def test_abandoned_uploads_of_past_generations_are_deleted(name, generation, goes):
    names = [*checkpoint(1, 30), name]
    assert (name in swept(names, [(1, 30)], generation=generation)) is goes


def test_pinned_referenced_and_restored_checkpoints_are_kept():
    old = [*checkpoint(1, 10), "1-10/pin"]
    assert swept([*old, *checkpoint(1, 30)], [(1, 30)], generation=1) == []
    old = checkpoint(1, 10)
    assert swept([*old, *checkpoint(2, 30)], [(2, 30)], generation=2, restore=(1, 10)) == []
    named = {Point(10, 1): frozenset({"0-n.snap"})}
    kept = swept([*old, *checkpoint(2, 30)], [(2, 30)], generation=2, referenced=named)
    assert kept == ["1-10/manifest-3.json"]


def test_nothing_is_deleted_before_the_first_checkpoint():
    assert swept(["1-10/0-n.snap"], [], generation=5) == []


def test_pinning_fails_if_retention_has_deleted_the_checkpoint_meanwhile(tmp_path):
    from tests.sailord.checkpoints.made import JOB, chain  # noqa: PLC0415 - needs torch

    uri = f"file://{tmp_path}"
    old, newest = chain(tmp_path, 10, 20)
    record = GenerationRecord(JOB, 1, "open", "sha", (), FIRST, 3, "")
    collect = CollectGarbage(
        JobRecord(JOB, "running", saving=Saving(uri, keep=1)), record, newest.durable
    )

    async def pin_late():
        checkpoints = Checkpoints((uri,))
        found, _ = await checkpoints.find(JOB, uri, 10)
        assert found.point == old.manifest.point
        assert await checkpoints.collect_garbage(collect) > 0
        with pytest.raises(Missing, match="step 10 was deleted just now"):
            await checkpoints.pin(JOB, uri, found.point, is_pinned=True)
        await checkpoints.pin(JOB, uri, newest.durable.point, is_pinned=True)

    asyncio.run(pin_late())
    assert sorted(path.name for path in (tmp_path / "j").iterdir()) == ["1-20"]


def test_checkpoints_whose_steps_a_rollback_left_are_discarded():
    ten, twenty, thirty = (Point(step, 1) for step in (10, 20, 30))
    anew, later = Point(15, 2), Point(40, 2)
    parents = {ten: None, twenty: ten, thirty: twenty}
    assert discarded(parents, thirty) == frozenset()
    assert discarded(parents, ten) == {twenty, thirty}, "just rolled back"
    went_on = parents | {anew: ten, later: anew}
    assert discarded(went_on, later) == {twenty, thirty}, "also once it is past their steps"
    pinned = {Point(5, 1): None, later: anew}
    assert discarded(pinned, later) == frozenset(), "what led to it may have been deleted"
