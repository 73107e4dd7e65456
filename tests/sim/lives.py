"""One life of the simulated cluster from its seed: faults, then calm, then checks."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

from agents.protocol.records import JobRecord
from sailord.core.model.phases import Held, Running
from sailord.core.model.state import State
from sailord.core.queries.job_queue import next_in_queue
from sailord.core.queries.restore_choice import unsaved_steps
from tests.sim.checker import Opened
from tests.sim.faults import FaultInjector
from tests.sim.planners import CHUNKED, MEMBERS_MIN, SPEC, Planner, QuickPlanner, RealPlanner
from tests.sim.world import (
    CONTROL_PLANE_FAULTS,
    JOB,
    MACHINE_FAULTS,
    SHARING,
    SLOW_SEALS,
    STRAGGLERS,
    WRONG_BITS,
    ZONES,
    Faults,
    World,
)

Wire = Callable[[Any], Any]
TROUBLE_S = 110.0
CALM_S = 150.0
LOOK_S = 5.0
RESTED_S = 15.0
"""The world must be settled for this time, so that messages in flight have arrived."""
FROZEN = re.compile(r"---- agent_frozen (?P<agent>\S+) (?P<seconds>\S+) s")


def faults_of(seed: int) -> Faults:
    """Return the faults of a life: most have all kinds; some one kind, with stricter checks."""
    slow = Faults(seals_slowly=True)
    special = {
        2: slow,
        3: STRAGGLERS,
        4: ZONES,
        5: CONTROL_PLANE_FAULTS,
        6: slow,
        8: SLOW_SEALS,
        9: WRONG_BITS,
    }
    return {0: MACHINE_FAULTS, **special}.get(seed % 10, Faults())


def planner_of(seed: int) -> Planner:
    """Return the real planner for some lives, else the quick one."""
    if seed % 15 != 7:
        return QuickPlanner()
    return RealPlanner(CHUNKED if seed % 2 else SPEC)


def _trouble(world: World) -> None:
    FaultInjector(world, until=TROUBLE_S)


def run_life(seed: int, wire: Wire | None = None, *, sharing: int = 0) -> World:
    """Run a world through faults and then calm, until it is at rest.

    ``wire``: what a reader makes of the records that another process wrote. ``sharing``: how
    many jobs share the cluster.
    """
    faults = SHARING if sharing else faults_of(seed)
    world = World(seed, faults, QuickPlanner() if sharing else planner_of(seed), sharing=sharing)
    if wire is not None:
        world.wire = world.store.wire = wire
    try:
        world.clock.after(10.0, lambda: _trouble(world))
        world.clock.run_until(TROUBLE_S)
        _settle(world)
        if faults is MACHINE_FAULTS:
            assert world.checker.failures_max == 0, "a lost machine counted as a failure"
        if faults is CONTROL_PLANE_FAULTS:
            _check_undisturbed(world)
        if faults is STRAGGLERS:
            _check_slow(world)
        if faults is WRONG_BITS:
            _check_quarantine(world)
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}\n{world.checker.account()}") from error
    return world


def _settle(world: World) -> None:
    """End all faults; the cluster must settle."""
    rested = 0.0
    while world.clock.now < TROUBLE_S + CALM_S:
        world.clock.run_until(world.clock.now + LOOK_S)
        rested = rested + LOOK_S if not why_unsettled(world) else 0.0
        if rested >= RESTED_S:
            return
    raise AssertionError(f"it does not settle: {why_unsettled(world)}")


def why_unsettled(world: World) -> str:
    """Return why the world is not settled; empty if one leader has the job running or held."""
    leaders = [head for head in world.heads.values() if head.state.term is not None]
    if len(leaders) != 1:
        return f"{len(leaders)} heads lead"
    parts = leaders[0].parts
    if parts.others:
        if parts.handover is not None or parts.recalled:
            return f"{parts.handover} is under way, {parts.recalled} are recalled"
        return next(filter(None, (_why_part_unsettled(world, each) for each in parts.all())), "")
    return _why_part_unsettled(world, parts.first)


def _why_part_unsettled(world: World, state: State) -> str:
    active = state.active
    if active is None:
        waiting = [job.id for job in state.jobs.values() if job.state == "queued"]
        return f"{waiting} wait for their turn" if waiting else ""
    if isinstance(active.phase, Held) and next_in_queue(state) is not None:
        return "" if unsaved_steps(state, active) else "a held job keeps the cluster for nothing"
    ready = {machine.id for machine in world.ready_machines()} & state.nodes.keys()
    if isinstance(active.phase, Held) or len(ready) < MEMBERS_MIN:
        return ""
    if not isinstance(active.phase, Running) and active.question is None:
        return f"stuck in {active.phase}"
    if active.generation is None:
        return "its first plan is being made"
    steps = world.checker.steps.get((active.job, active.generation.number), [(0.0, 0)])
    return "" if steps[-1][0] > world.clock.now - LOOK_S else f"no step since {steps[-1][0]:.1f}"


def _check_undisturbed(world: World) -> None:
    """Check that failures of the control plane did not interrupt the workers.

    Exceptions: a machine unknown when the job began may join it later; if the agent of such a
    machine is down for longer than its lease before the first step, the others continue without
    it; and so they do after the last step, when no step can show that its worker lives and its
    part of the last checkpoint may be missing. If the agents of all members are frozen for longer
    than their leases, a leader cannot tell their machines from dead ones. A
    leader elected during a stop knows only that a stop was ordered; one elected before the end of
    the job was stored opens a generation without steps.
    """
    checker = world.checker
    opened = [each for (job, _), each in checker.opened.items() if job == JOB]
    job = world.store.get(f"/job/{JOB}/state")
    assert isinstance(job, JobRecord)
    others, steps = [], job.steps
    for before, later in itertools.pairwise(opened):
        reason = later.record.reason
        if reason.startswith("the generation was told to stop"):
            stops = (line.text for line in checker.lines if before.at < line.at < later.at)
            reason = next((text for text in stops if ": stopping: " in text), reason)
        has_trained = (JOB, before.record.number) in checker.steps
        is_at_end = later.record.restore.point.step == steps
        if is_at_end and ("no step was done" in reason or reason == "a new leader took over"):
            continue
        if "no step was done" in reason and _nobody_reports(world, before, reason):
            continue
        if " could help" not in reason and ("its lease expired" not in reason or has_trained):
            others.append(reason)
    assert not others, f"generations without need: {others}"


def _nobody_reports(world: World, opened: Opened, reason: str) -> bool:
    """Return whether all members' agents had been frozen too long for their leases by then."""
    lines = world.checker.lines
    told = (line.at for line in lines if line.at > opened.at and reason in line.text)
    at = next(told, 0.0)
    silent = set()
    for line in lines:
        frozen = FROZEN.fullmatch(line.text)
        # An agent renews its lease every quarter of it.
        if frozen and line.at + 0.75 * world.lease_s < at <= line.at + float(frozen["seconds"]):
            silent.add(frozen["agent"])
    return silent.issuperset(opened.record.members)


def _check_slow(world: World) -> None:
    """Check that stragglers are left out up to the allowed share.

    Marks survive changes of leader, and no straggler counts as a failure.
    """
    assert world.checker.failures_max == 0, "a straggler counted as a failure"
    (leader,) = (head for head in world.heads.values() if head.state.term is not None)
    state, active = leader.state, leader.state.active
    marked = [node for node in state.nodes.values() if node.exclusion.slow]
    living = [node for node in state.nodes.values() if not node.is_lost]
    # Nodes marked earlier may be lost by now.
    assert len(marked) <= world.options.left_out_share * world.count, f"{len(marked)} are left out"
    if active is None or active.generation is None or not isinstance(active.phase, Running):
        return
    members = active.generation.members
    assert not [node for node in marked if node.record.id in members], "a straggler is a member"
    if active.slowness.speeds.generation != active.generation.number:
        return  # The generation has only just begun.
    if active.question is not None:
        return  # A plan without it is being made.
    crawling = active.slowness.speeds.found(state.now, world.options)
    unsaid = [id_ for id_ in crawling if id_ not in active.slowness.kept]
    assert not unsaid, f"stragglers {unsaid} of {len(living)} nodes are kept without a reason"


def _check_quarantine(world: World) -> None:
    """Check that no running generation has a member whose bits were contradicted.

    Each decision is checked not to choose one, too. Marks survive changes of leader.
    """
    (leader,) = (head for head in world.heads.values() if head.state.term is not None)
    active, nodes = leader.state.active, leader.state.nodes
    marked = {id_ for id_, node in nodes.items() if node.exclusion.wrong_bits}
    if active is not None and active.generation is not None and isinstance(active.phase, Running):
        assert not marked.intersection(active.generation.members), "a marked node is a member"
