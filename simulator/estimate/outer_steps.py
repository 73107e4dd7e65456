"""Outer steps: what one of them takes, and the groups of pipelines that iterate alone in between.

In an outer step all holders of a layer sum the change of its parameters since the last one, in
fp32 and by the algorithms of gradient sums; each then updates all that it holds (ADR 118).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from simulator.arrays import Floats, Ints
from simulator.cluster.place_facts import PlaceFacts
from simulator.estimate.device_groups import DeviceGroups
from simulator.estimate.gradient_sync import HopTimes, SumOrder, SyncJob, SyncJobs, ZonePair
from simulator.estimate.machine_layout import MachineLayout, lay_out
from simulator.estimate.optimizer_step import vote_seconds, whole_update_seconds
from simulator.layer_costs.layer_costs import LayerCosts
from simulator.network.network import Network

LOSS_NOTE = (
    "with outer steps the loss is not that of data parallelism; how it differs is not estimated"
)


@dataclass(frozen=True, slots=True, eq=False)
class OuterStep:
    """An outer step of a plan."""

    every: int
    """Iterations between two of them."""
    seconds: float
    sums: Floats
    """Seconds that each device group sums."""
    update: Floats
    """Seconds of each device group's update."""
    egress: tuple[tuple[ZonePair, float], ...]
    """Bytes from zone to zone, as a share of each iteration."""

    @classmethod
    def of(
        cls, layout: MachineLayout, costs: LayerCosts, network: Network, hop_times: HopTimes
    ) -> OuterStep | None:
        """Return the outer step of a plan; ``None`` if it takes none.

        It overlaps with nothing, so all layers with equal holders are summed at once.
        """
        groups, plan = layout.groups, layout.groups.plan
        if plan.outer_every is None:
            return None
        sync = SyncJobs(plan, layout, costs, network, hop_times=hop_times, of_weights=True)
        jobs, order = sync.jobs(per_layer=False), SumOrder(groups)
        for job in jobs:
            order.run(job, 0.0)
        update = whole_update_seconds(groups, costs)
        longest = float((order.free + update)[groups.owning].max())
        seconds = longest + vote_seconds(layout, network, groups.owning)
        every = plan.outer_every
        egress = tuple((zones, size / every) for job in jobs for zones, size in job.egress_bytes)
        return cls(every, seconds, order.busy, update, egress)


def inner_jobs(
    layout: MachineLayout, facts: PlaceFacts, jobs_of: Callable[[MachineLayout], list[SyncJob]]
) -> list[SyncJob]:
    """Return the gradient sums of an iteration between outer steps, group by group."""
    found = []
    for part, rows in layout.groups.outer_parts:
        alone = jobs_of(lay_out(part, facts.machines))
        found += [_in_whole(job, layout.groups, rows) for job in alone]
    return found


def _in_whole(job: SyncJob, groups: DeviceGroups, rows: Ints) -> SyncJob:
    sent = None if job.broadcast is None else _in_whole(job.broadcast, groups, rows)
    return replace(job, groups=groups, rows=rows[job.rows], broadcast=sent)
