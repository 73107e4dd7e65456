"""A job that was paused while another had the cluster continues from what nodes kept of it."""

from __future__ import annotations

import pytest

from agents.protocol.records import GenerationRecord, JobRecord, Order, Saving
from tests.sim.planners import QuickPlanner
from tests.sim.workers import LAYERS
from tests.sim.world import JOB, OTHER, Faults, World

CALM = Faults(kinds=(), loss=0.0, planner_dies=0.0, worker_bug=0.0, stuck_gang=0.0, setup_fails=0.0)
PAUSED_S, RESUMED_S, END_S = 155.0, 170.0, 300.0


class TwoJobs(World):
    """One job is paused for another, and resumed before or after that one has ended."""

    def _submit_jobs(self) -> None:
        self.submit(JobRecord(JOB, "queued", layers=LAYERS, atoms=1, saving=Saving(memory_every=1)))
        other = JobRecord(OTHER, "queued", submitted_at=1.0, steps=10, layers=LAYERS, atoms=1)
        self.clock.after(PAUSED_S - 5.0, lambda: self.submit(other))
        self.clock.after(PAUSED_S, lambda: self.give_order(Order("pause", "pause", JOB)))
        self.clock.after(RESUMED_S, lambda: self.give_order(Order("resume", "resume", JOB)))


@pytest.mark.parametrize("seed", range(1, 9))
def test_a_resumed_job_loses_no_step_to_the_job_in_between(seed: int) -> None:
    """It names no place for checkpoints: only the memory of nodes holds its state."""
    world = TwoJobs(seed, CALM, QuickPlanner())
    world.clock.run_until(END_S)
    job, other = (world.store.get(f"/job/{id_}/state") for id_ in (JOB, OTHER))
    assert isinstance(job, JobRecord)
    assert isinstance(other, JobRecord)
    assert (other.state, job.state, job.reason) == ("done", "running", "next in the queue")
    last = world.store.get(f"/job/{JOB}/gen")
    assert isinstance(last, GenerationRecord)
    done = max(step for _, step in world.checker.steps[JOB, 1])
    assert (last.number, last.restore.source) == (2, "memory")
    assert last.restore.point.step == done
