"""Training runs by threads whose snapshots are sealed per emulated node and restored by other
plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from simulator.spec.job import Job
from simulator.spec.plan import Place, Plan
from tests.worker.checkpoint.fetching import restore_from
from tests.worker.threads import ThreadTransport, run_as_threads
from tests.worker.training_runs import SomeLabels
from worker.checkpoint.fetch import FetchReport
from worker.checkpoint.piece_sources import LocalSource, PieceSource
from worker.checkpoint.snapshots.snapshot_manager import SnapshotManager, SnapshotTarget
from worker.layout.tensor_table import tensors_of
from worker.training.full_tensors import TensorKey, merge_ranks, rank_tensors
from worker.training.step_report import StepReport
from worker.training.trainer import RankTrainer

NODES = ("n0", "n1", "n2")


def on_nodes(plan: Plan, draw: Random) -> Plan:
    """Return the plan with each device group on a random node."""
    pipelines = []
    for pipeline in plan.pipelines:
        nodes = [draw.choice(NODES) for _ in plan.owning_stages(pipeline)]
        stages = tuple(
            replace(stage, places=(Place("cpu", "m", "z", node=nodes[number % len(nodes)]),))
            for number, stage in enumerate(pipeline.stages)
        )
        pipelines.append(replace(pipeline, stages=stages))
    return replace(plan, pipelines=tuple(pipelines))


def node_of(plan: Plan, rank: int) -> str:
    ranks = [
        (stage.places[0].node or "")
        for pipeline in plan.pipelines
        for stage in plan.owning_stages(pipeline)
        for _ in range(stage.tp)
    ]
    return ranks[rank]


def target(root: Path, plan: Plan, rank: int, *, generation: int, **changes: Any) -> SnapshotTarget:
    node = node_of(plan, rank)
    zones = dict.fromkeys(NODES, "z")
    fixed = {"memory": root / node, "memory_every": 1, "persist_every": None, "zones": zones}
    return SnapshotTarget("job", generation, 1, node, **{**fixed, **changes})


@dataclass(frozen=True, slots=True)
class Generation:
    """The result of one generation."""

    number: int
    step: int
    reports: list[StepReport]
    state: dict[TensorKey, Any]


def train(
    job: Job,
    plan: Plan,
    root: Path,
    *,
    number: int,
    steps: int,
    after: Generation | None = None,
    sources: Sequence[PieceSource] | None = None,
    data: Any = None,
) -> Generation:
    """Restore what the previous generation sealed, train, and seal at a stop."""
    data = data or SomeLabels(job)

    def body(transport: ThreadTransport) -> Any:
        trainer = RankTrainer(job, plan, transport.rank, transport, data)
        if after is not None:
            restore(trainer, root, after, sources)
        keeper = SnapshotManager.open(
            trainer, target(root, plan, transport.rank, generation=number), transport
        )
        trainer.snapshot_hook = keeper
        keeper.replicated(10**9)
        reports = []
        for _ in range(steps):
            reports.append(replace(trainer.step(), seconds=0.0, data_wait_s=0.0))
            keeper.after_step()
        keeper.seal_at_stop(persist=False)
        keeper.close()
        return reports, rank_tensors(trainer.buffers.values()), trainer.progress

    done = run_as_threads(plan.device_count, body)
    assert all((reports, progress) == (done[0][0], done[0][2]) for reports, _, progress in done)
    state = merge_ranks([pieces for _, pieces, _ in done], tensors_of(job))
    return Generation(number, done[0][2].step, done[0][0], state)


def restore(
    trainer: RankTrainer,
    root: Path,
    after: Generation,
    sources: Sequence[PieceSource] | None = None,
) -> FetchReport:
    """Load a trainer from all nodes' folders."""
    return restore_from(trainer, sources or folders(root, after))


def folders(root: Path, after: Generation) -> list[PieceSource]:
    """Return each node's folder as a source."""
    return [
        replace(
            LocalSource.at(root / node, "job", generation=after.number, step=after.step), name=node
        )
        for node in NODES
    ]


def state_only(generation: Generation) -> dict[TensorKey, Any]:
    """Return the state without gradients, which snapshots do not hold."""
    return {key: values for key, values in generation.state.items() if key[2] != "gradient"}
