"""Single decisions about checkpoints: commit, release, restore."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agents.protocol.records import FIRST, Durable, Holding, NodeId, Point, Restore, Sealed
from sailord.api.answers import render
from sailord.controller.step_rate import StepRate
from sailord.core.model.commands import (
    CheckDurable,
    CommitCheckpoint,
    ProbeAgent,
    WriteGeneration,
    WriteManifest,
)
from sailord.core.model.events import (
    CheckpointCommitted,
    DurableChecked,
    ManifestWritten,
    PlanFound,
    Reported,
    Ticked,
)
from sailord.core.model.phases import Opening
from sailord.core.model.state import Check, Commit, State
from sailord.core.queries.restore_choice import release_now
from sailord.core.queries.restore_point import (
    failure_domains,
    fallback_point,
    is_in_lineage,
    piece_holders,
    release_point,
    restore_point,
    safe_points,
    single_holders,
)
from sailord.core.rules.checkpoint_rules import covering
from tests.sailord.core.states import (
    FROM_NOTHING,
    JOB,
    KEPT,
    NOW,
    OPENING,
    A,
    B,
    C,
    G,
    act,
    active_of,
    durable,
    job,
    node,
    phase,
    proposal,
    report,
    state,
    uploaded,
)

LAYERS = job(saving=KEPT, layers=2)
HALVES = (uploaded(A, 40), uploaded(B, 40, layer=1))


def voted(*votes: object, **others: object) -> State:
    """Two layers, one on each node; these votes have been heard."""
    mine = [each for each in votes if each.uri.endswith("/a")]  # type: ignore[attr-defined] # votes have names
    theirs = [each for each in votes if each not in mine]
    nodes = (
        node(A, report(A, uploaded=tuple(mine))),
        node(B, report(B, uploaded=tuple(theirs))),
    )
    return state(None, *nodes, job=LAYERS, **others)


def test_complete_upload_gets_a_manifest_first() -> None:
    after, commands = act(voted(*HALVES), Ticked(NOW))
    assert commands == (WriteManifest(LAYERS, G, HALVES, Point(40, 3), None),)
    assert active_of(after).checkpointing.commit == Commit(Point(40, 3))


@pytest.mark.parametrize(
    "votes",
    [
        HALVES[:1],
        (uploaded(A, 40), uploaded(B, 39, layer=1)),
        (uploaded(A, 40, 2), uploaded(B, 40, 2, layer=1)),
    ],
    ids=["a half is missing", "of two steps", "of a generation that is over"],
)
def test_incomplete_upload_gets_no_manifest(votes: tuple[object, ...]) -> None:
    assert act(voted(*votes), Ticked(NOW))[1] == ()


def test_no_commit_starts_while_a_generation_opens() -> None:
    before = voted(*HALVES)
    opens = replace(before, active=replace(active_of(before), phase=OPENING))
    assert act(opens, Ticked(NOW))[1] == ()


def test_upload_not_later_than_the_last_checkpoint_is_not_committed() -> None:
    for step, is_late in ((40, True), (39, False)):
        before = replace(voted(*HALVES), durables={JOB: durable(step)})
        _, commands = act(before, Ticked(NOW))
        assert any(isinstance(each, WriteManifest) for each in commands) != is_late


def test_written_manifest_is_committed_once() -> None:
    before = voted(*HALVES, commit=Commit(Point(40, 3)))
    after, commands = act(before, ManifestWritten(NOW, JOB, durable(40)))
    assert commands == (CommitCheckpoint(durable(40), G),)
    assert act(after, ManifestWritten(NOW, JOB, durable(40)))[1] == ()
    assert act(before, ManifestWritten(NOW, JOB, durable(39)))[1] == ()


def test_no_generation_opens_while_a_commit_is_stored() -> None:
    on_its_way = Commit(Point(40, 3), durable(40), is_storing=True)
    before = state(FROM_NOTHING, job=job(saving=KEPT), commit=on_its_way)
    waits, commands = act(before, PlanFound(NOW, 4, proposal()))
    assert commands == ()
    after, _ = act(waits, CheckpointCommitted(NOW, JOB, durable(40)))
    assert isinstance(phase(after), Opening)
    assert after.durables == {JOB: durable(40)}


def test_suspects_are_probed_while_a_commit_is_stored() -> None:
    on_its_way = Commit(Point(40, 3), durable(40), is_storing=True)
    before = state(job=job(saving=KEPT), commit=on_its_way)
    broken = report(A, "broken", number=6, broken_peers=(B,))
    _, commands = act(before, Reported(NOW, broken))
    assert commands == (ProbeAgent(B),)


def test_durable_step_never_goes_back() -> None:
    before = replace(state(), durables={JOB: durable(40)})
    after, _ = act(before, CheckpointCommitted(NOW, JOB, durable(39)))
    assert after.durables == {JOB: durable(40)}


def test_duplicate_upload_is_used_once() -> None:
    again = replace(uploaded(A, 40), uri="3-40/z")
    assert covering((again, *HALVES), layers=2, atoms=1) == HALVES
    both = replace(uploaded(C, 40), holds=(Holding(0, 0, 1), Holding(1, 0, 1)))
    assert covering((both,), layers=2, atoms=1) == (both,)
    assert covering((uploaded(A, 40), both), layers=2, atoms=1) is None


# ---- going back -------------------------------------------------------------------------------


def held(*points: tuple[str, int, int]) -> list[tuple[NodeId, Sealed]]:
    """Node, step, generation: each has the one layer of the point."""
    whole = (Holding(0, 0, 1),)
    return [(NodeId(id_), Sealed(Point(step, of), whole)) for id_, step, of in points]


LINE = replace(G, lineage=(Point(4, 1),))
"""The third generation, from step 10 of the second, which came from step 4 of the first."""


@pytest.mark.parametrize(
    ("point", "expected"),
    [
        (Point(10, 3), True),
        (Point(9, 3), False),
        (Point(10, 2), True),
        (Point(11, 2), False),
        (Point(4, 1), True),
        (Point(5, 1), False),
        (Point(9, 4), False),
    ],
)
def test_steps_after_a_generation_was_abandoned_are_void(
    point: Point, expected: bool
) -> None:  # a column of the table
    assert is_in_lineage(point, LINE) == expected


@pytest.mark.parametrize(
    ("points", "kept", "expected"),
    [
        ([], None, FIRST),
        ([("a", 40, 3)], None, Restore(Point(40, 3), "memory")),
        ([("a", 40, 3), ("a", 41, 3)], None, Restore(Point(41, 3), "memory")),
        ([("a", 40, 3), ("a", 50, 2)], None, Restore(Point(40, 3), "memory")),
        ([("a", 40, 3)], durable(41), Restore(Point(41, 3), "durable")),
        ([("a", 40, 3)], durable(40), Restore(Point(40, 3), "memory")),
        ([("a", 50, 2)], durable(8, 2), Restore(Point(8, 2), "durable")),
    ],
)
def test_restore_point(
    points: list[tuple[str, int, int]], kept: Durable | None, expected: Restore
) -> None:
    found = restore_point(held(*points), layers=1, atoms=1, last=LINE, durable=kept)
    assert found == expected


def test_incomplete_point_is_not_restored() -> None:
    found = restore_point(held(("a", 40, 3)), layers=2, atoms=1, last=LINE, durable=None)
    assert found == FIRST


ZONES = {A: "z1", B: "z1", C: "z2"}
TWO_AND_TWO = [("a", 41, 3), ("b", 41, 3), ("a", 40, 3), ("c", 40, 3)]


@pytest.mark.parametrize(
    ("points", "there", "survive", "kept", "expected"),
    [
        ([("a", 40, 3), ("b", 40, 3)], "ab", "node", None, Point(40, 3)),
        ([("a", 40, 3)], "ab", "node", None, None),
        ([("a", 40, 3)], "a", "node", None, Point(40, 3)),
        ([("a", 40, 3), ("b", 40, 3)], "a", "node", None, Point(40, 3)),
        ([("a", 40, 2), ("b", 40, 2)], "ab", "node", None, None),
        ([("a", 10, 2), ("b", 10, 2)], "ab", "node", None, Point(10, 2)),
        ([("a", 10, 2)], "ab", "node", None, None),
        ([("a", 41, 3)], "ab", "node", durable(40), Point(40, 3)),
        ([], "ab", "node", durable(40, 2), None),
        (TWO_AND_TWO, "abc", "zone", None, Point(40, 3)),
        (TWO_AND_TWO, "abc", "node", None, Point(41, 3)),
        ([("a", 41, 3), ("b", 41, 3)], "abc", "zone", None, None),
        ([("a", 41, 3), ("b", 41, 3)], "ab", "zone", None, Point(41, 3)),
        ([("a", 41, 3), ("x", 41, 3)], "ab", "node", None, None),
    ],
    ids=[
        "two copies",
        "one copy beside an unused node",
        "the only node",
        "an absent node is no failure domain",
        "another generation's",
        "the one from which it began",
        "one copy of that",
        "durable",
        "durable before",
        "two zones",
        "two nodes",
        "two nodes of one zone, and an unused node of another",
        "two nodes of the only zone",
        "a copy on an unknown node",
    ],
)
def test_release_point(
    points: list[tuple[str, int, int]],
    there: str,
    survive: str,
    kept: Durable | None,
    expected: Point | None,
) -> None:
    domains = failure_domains({n: z for n, z in ZONES.items() if n in there}, survive)
    safe = safe_points(held(*points), 1, 1, durable=kept, domains=domains)
    assert release_point(safe, G) == expected


FROM_MEMORY = Restore(Point(41, 3), "memory")


@pytest.mark.parametrize(
    ("safe", "restore", "expected"),
    [
        ([Point(30, 3), Point(40, 3), Point(41, 3)], FROM_MEMORY, Point(41, 3)),
        ([Point(30, 3), Point(40, 3)], FROM_MEMORY, Point(40, 3)),
        ([Point(10, 2)], FROM_MEMORY, Point(10, 2)),
        ([], FROM_MEMORY, None),
        ([Point(11, 2)], FROM_MEMORY, None),
        ([], FIRST, Point(0, 0)),
        ([], Restore(Point(38, 3), "durable"), Point(38, 3)),
        ([Point(42, 3), Point(40, 3)], FROM_MEMORY, Point(40, 3)),
        ([Point(40, 3), Point(37, 3)], Restore(Point(38, 3), "durable"), Point(37, 3)),
    ],
    ids=[
        "the restore point is safe",
        "the newest of those before",
        "an older generation's",
        "none is safe: all are kept",
        "a void one",
        "from the start",
        "from a checkpoint with nothing in memory",
        "one after the restore point",
        "the restore point is a checkpoint",
    ],
)
def test_fallback_point(safe: list[Point], restore: Restore, expected: Point | None) -> None:
    assert fallback_point(set(safe), {}, restore, LINE) == expected


@pytest.mark.parametrize(
    ("complete", "before", "expected"),
    [
        ({41: "a", 40: "a", 10: "a"}, Point(10, 2), Point(10, 2)),
        ({41: "a", 40: "a", 39: "a"}, Point(10, 2), Point(40, 3)),
        ({41: "a"}, Point(10, 2), Point(10, 2)),
        ({41: "a", 40: "ab", 39: "b", 38: "c", 10: "a"}, Point(10, 2), Point(39, 3)),
        ({41: "a", 39: "b"}, Point(40, 3), Point(39, 3)),
        ({41: "a", 40: "a", 39: "b"}, None, None),
    ],
    ids=[
        "that of before",
        "that is gone",
        "none is here",
        "the newest with other single copies",
        "so if that of before is away",
        "an older leader's: all are kept",
    ],
)
def test_where_no_point_is_safe_one_with_other_single_copies_stays_or_the_last_fallback(
    complete: dict[int, str], before: Point | None, expected: Point | None
) -> None:
    """For each step: who alone has a piece of it."""
    last = replace(LINE, fallback=before)
    whole = {Point(step, 2 if step == 10 else 3): set(by) for step, by in complete.items()}
    assert fallback_point(set(), whole, FROM_MEMORY, last) == expected


def test_single_holders() -> None:
    """Of step 40 piece 0 is on node a alone; step 41 is incomplete."""
    both = [sealed(40, 3, 0, 2), sealed(39, 3, 0, 2)]
    there = [("a", each) for each in both] + [("b", sealed(40, 3, 1, 2)), ("b", both[1])]
    held_ = [(NodeId(node), each) for node, each in [*there, ("b", sealed(41, 3, 0, 1))]]
    assert single_holders(piece_holders(held_), 1, 2) == {
        Point(40, 3): {"a"},
        Point(39, 3): set(),
    }


def sealed(step: int, of: int, first: int, end: int) -> Sealed:
    return Sealed(Point(step, of), (Holding(0, first, end),))


def test_unused_node_counts_as_a_failure_domain() -> None:
    """The only member's snapshots may be released once another zone has a replica."""
    alone = replace(G, members=(A,))
    member = node(A, report(A, sealed=(40, 41)))
    other = node(C, report(C, sealed=(40,)))
    other = replace(other, record=replace(other.record, zone="elsewhere"))
    saving = replace(KEPT, survive="zone")
    both = state(None, member, other, job=job(saving=saving), generation=alone)
    assert release_now(both) == Point(40, 3)
    lonely = state(None, member, job=job(saving=saving), generation=alone)
    assert release_now(lonely) == Point(41, 3)
    joining = replace(other, record=replace(other.record, state="joining"))
    new = state(None, member, joining, job=job(saving=saving), generation=alone)
    assert release_now(new) == Point(41, 3), "a joining node holds no replica"


EMPTY = (node(A, report(A, sealed=())), node(B, report(B, sealed=())))


def lost_memory(**others: object) -> State:
    """Nothing is in memory; steps 20 and 30 are durable."""
    made = state(FROM_NOTHING, *EMPTY, job=job(saving=KEPT), **others)
    return replace(made, durables={JOB: durable(30)})


def test_checkpoint_is_checked_before_it_is_restored() -> None:
    looks, commands = act(lost_memory(), PlanFound(NOW, 4, proposal()))
    assert commands == (CheckDurable(job(saving=KEPT), durable(30), is_thorough=False),)
    assert act(looks, Ticked(NOW + 1))[1] == ()
    found = DurableChecked(NOW + 1, JOB, durable(30), durable(30))
    after, commands = act(looks, found)
    opening = phase(after)
    assert isinstance(opening, Opening)
    assert opening.record.restore == Restore(Point(30, 3), "durable")
    assert commands == (WriteGeneration(opening.record, replaces=G),)


def test_a_check_that_takes_long_is_noted() -> None:
    """Its storage may hang, and until it answers nothing else would say what the job waits for."""

    def trouble(known: State, later_s: float) -> str:
        view = render.active_view(known, StepRate(), None, {}, {}, known.now + later_s)
        assert view is not None
        return view.storage_trouble

    looks, _ = act(lost_memory(), PlanFound(NOW, 4, proposal()))
    assert trouble(looks, 59) == ""
    said = trouble(looks, 90)
    assert said.startswith("training has waited 90.0 s for the checkpoint of step 30 to be read")
    opened, _ = act(looks, DurableChecked(NOW + 90, JOB, durable(30), durable(30)))
    assert trouble(opened, 90) == ""


def test_check_of_an_older_checkpoint_does_not_count_for_the_newest() -> None:
    looks, _ = act(lost_memory(), PlanFound(NOW, 4, proposal()))
    after, commands = act(looks, DurableChecked(NOW + 1, JOB, durable(20), None, "it is torn"))
    assert phase(after) == phase(looks)
    assert commands == ()


def test_unreadable_checkpoint_is_replaced_by_the_one_before() -> None:
    before = lost_memory(check=Check(durable(30), durable(20)))
    after, commands = act(before, PlanFound(NOW, 4, proposal()))
    opening = phase(after)
    assert isinstance(opening, Opening)
    assert opening.record.restore == Restore(Point(20, 3), "durable")
    assert commands == (WriteGeneration(opening.record, replaces=G, lowers=durable(20)),)
