"""The event estimator: schedules of all pipelines, messages between stages, and gradient sync.

Stage times come from their layers. Each pipeline runs its schedule with messages between
neighbouring stages; each layer's gradients are summed once all its holders are ready. So a
slow stage delays its own pipeline, and a slow pipeline delays the sync of the layers it shares.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from simulator.arrays import Floats, Ints, prefix_sums
from simulator.cluster.place_facts import PlaceFacts
from simulator.estimate.device_groups import DeviceGroups, GroupId
from simulator.estimate.dollars import iteration_money
from simulator.estimate.error_bar import iteration_provenance
from simulator.estimate.gradient_sync import HopTimes, SumOrder, SyncJob, SyncJobs
from simulator.estimate.machine_layout import MachineLayout, lay_out
from simulator.estimate.memory import MemoryModel, fullest_rows
from simulator.estimate.memory_advice import MemoryShortage, memory_shortages
from simulator.estimate.offload import OFFLOAD_NOTE, host_shortage
from simulator.estimate.optimizer_step import optimizer_seconds, vote_seconds
from simulator.estimate.outer_steps import LOSS_NOTE, OuterStep, inner_jobs
from simulator.estimate.result import Estimate, StageTime
from simulator.estimate.schedule_1f1b import PassDurations, run_1f1b
from simulator.estimate.schedule_replay import ScheduleReplay, replay
from simulator.estimate.stage_messages import MessageTimes, sent_whole, tensors_sent
from simulator.estimate.stage_times import (
    PipelineTimes,
    PlanTimes,
    equal_pipelines,
    pipeline_times,
    plan_times,
    with_slow_nodes,
)
from simulator.hardware.runtime_constants import platform_of
from simulator.layer_costs.layer_costs import LayerCosts
from simulator.layer_costs.shared_token_costs import SharedTokenCosts
from simulator.models.layers import Recompute
from simulator.network.network import Network
from simulator.spec.plan import Place, Plan, Stage


@dataclass(frozen=True, slots=True, eq=False)
class PassEnds:
    """When each device group ended its last backward, and all its passes and transfers."""

    last_backward: Floats
    free: Floats


@dataclass(frozen=True, slots=True)
class IterationDetails:
    """One iteration event by event; equal pipelines share one object of times and passes."""

    pipelines: tuple[PipelineTimes, ...]
    passes: tuple[ScheduleReplay, ...]
    sync: tuple[tuple[float, SyncJob], ...]
    """Each gradient sync with its start, in the order of execution."""
    optimizer_s: Mapping[GroupId, float]
    step_end: Mapping[GroupId, float]
    """When a device group's optimizer step ends; only broadcasts of weights may follow."""


class EventEstimator:
    """Estimates plans of one job on one cluster; caches are shared between plans."""

    name = "event"

    def __init__(self, costs: LayerCosts, network: Network, facts: PlaceFacts) -> None:
        self.costs, self.network, self.facts = costs, network, facts
        self._messages = MessageTimes(network, sends_whole=costs.runtime.sends_whole)
        self._hop_times = HopTimes(costs, network)

    def costs_of(self, plan: Plan) -> LayerCosts:
        """Return the layer costs of a plan."""
        if plan.zero is None or plan.zero == self.costs.job.zero:
            return self.costs_if(shares_tokens=plan.sequence_parallel)
        return self._with_other_zero.costs_if(shares_tokens=plan.sequence_parallel)

    def costs_if(self, *, shares_tokens: bool) -> LayerCosts:
        """Return the layer costs with or without sequence parallelism."""
        return self._shared_token_costs if shares_tokens else self.costs

    @cached_property
    def _shared_token_costs(self) -> SharedTokenCosts:
        return SharedTokenCosts(self.costs)

    @cached_property
    def _with_other_zero(self) -> EventEstimator:
        """The estimator of the same job under the other ZeRO stage."""
        return EventEstimator(self.costs.with_other_zero(), self.network, self.facts)

    def estimate(self, plan: Plan) -> Estimate:
        """Estimate a plan that ``check_plan`` has accepted."""
        return self.estimate_on(plan, {})

    def estimate_on(
        self,
        plan: Plan,
        spot: Mapping[str, bool],
        *,
        times_slower: Mapping[str, float] | None = None,
    ) -> Estimate:
        """Estimate a placed plan at the prices of its nodes; ``spot`` tells by id which are spot.

        The passes on some nodes may be slowed down by a factor (stragglers).
        """
        layout = lay_out(plan, self.facts.machines)
        groups = layout.groups
        costs = self.costs_of(plan)
        work = plan_times(layout, costs, self._messages)
        if times_slower:
            work = with_slow_nodes(work, times_slower)
        ends = self._run_pipelines(work)
        jobs = self._sync(layout)
        finish = self._finish(layout, ends, jobs)
        last = float(finish.step_end[groups.owning].max())
        iteration_s = last + max(platform_of(place.gpu).iteration_s for place in groups.place_kinds)
        vote_s = max(vote_seconds(layout, self.network, rows) for _, rows in groups.outer_parts)
        outer = self._outer_step(layout)
        outer_s = 0.0 if outer is None else outer.seconds / outer.every
        iteration_s += vote_s + outer_s
        stages = self._stage_times(work, finish, iteration_s, outer)
        computed = groups.sum_by_owner(groups.micro_batches * work.compute) + finish.optimizer
        memory = MemoryModel(plan, costs, self.facts.capacity_bytes, groups=groups)
        money = iteration_money(
            devices_by_place(groups),
            iteration_s=iteration_s,
            spot=spot,
            usd_per_hour=self.facts.usd_per_hour,
            egress_bytes=self._egress(groups, jobs, outer),
            egress_usd_per_byte=self.network.egress_usd_per_byte,
        )
        provenance, compute_error = iteration_provenance(
            work,
            costs,
            self.network,
            iteration_s=iteration_s,
            busiest_s=float(computed.max()),
            sums_s=float(finish.sync_busy.max()) + vote_s + outer_s,
        )
        return Estimate(
            estimator=self.name,
            iteration_s=iteration_s,
            samples_per_iteration=plan.samples_per_iteration,
            memory=memory.pipelines(),
            money=money,
            stages=stages,
            bottleneck=_bottleneck(plan, stages, iteration_s, float(ends.last_backward.max())),
            provenance=provenance,
            compute_error=compute_error,
            notes=(
                *self.costs.notes,
                *([] if outer is None else [LOSS_NOTE]),
                *([OFFLOAD_NOTE] if groups.offload.any() else []),
            ),
            host_shortage=host_shortage(groups, costs, self.facts),
        )

    def memory_shortages(self, plan: Plan) -> tuple[MemoryShortage, ...]:
        """Return the device groups that lack memory, with cures for each."""
        job, costs = self.costs.job, self.costs_of(plan)

        def wider_tp(stage: Stage) -> list[int]:
            machines = (self.facts.gpus_per_machine(place) for place in stage.places)
            return [
                tp
                for tp in range(stage.tp + 1, min(job.max_tp, *machines) + 1)
                if job.max_tp % tp == 0
                and not job.model.problems_with_tp(tp)
                and not (plan.sequence_parallel and job.sequence % tp)
            ]

        return memory_shortages(
            plan,
            lambda changed: MemoryModel(changed, costs, self.facts.capacity_bytes).pipelines(),
            wider_tp=wider_tp,
        )

    def details(self, plan: Plan) -> IterationDetails:
        """Return every pass, sync and optimizer step, for timelines and plots."""
        layout = lay_out(plan, self.facts.machines)
        pipelines = self.pipeline_times(plan, layout)
        different = {id(times): times for times in pipelines}
        replays = {key: self._replay(plan, times) for key, times in different.items()}
        passes = tuple(replays[id(times)] for times in pipelines)
        ends = PassEnds(
            np.concatenate([one.last_backward_end for one in passes]),
            np.concatenate([_free_s(one) for one in passes]),
        )
        finish = self._finish(layout, ends, self._sync(layout))
        owning = layout.groups.owning.tolist()
        return IterationDetails(
            tuple(pipelines),
            passes,
            finish.sync,
            {layout.groups.ids[row]: float(finish.optimizer[row]) for row in owning},
            {layout.groups.ids[row]: float(finish.updated[row]) for row in owning},
        )

    def bytes_between_zones(self, plan: Plan) -> dict[tuple[str, str], float]:
        """Return the bytes that an iteration sends from zone to zone, on average."""
        layout = lay_out(plan, self.facts.machines)
        return self._egress(layout.groups, self._sync(layout), self._outer_step(layout))

    @property
    def overlaps(self) -> bool:
        """Whether gradients are reduced layer by layer while backwards still run."""
        runtime, job = self.costs.runtime, self.costs.job
        return (job.gradient_sync if runtime.sync == "job" else runtime.sync) == "overlap"

    # -- durations ------------------------------------------------------------------------------

    def pipeline_times(self, plan: Plan, layout: MachineLayout) -> list[PipelineTimes]:
        """Return the times of every pipeline; equal pipelines share one object."""
        assert layout.groups.plan is plan, "the layout belongs to another plan"
        return pipeline_times(plan_times(layout, self.costs_of(plan), self._messages))

    def _outer_step(self, layout: MachineLayout) -> OuterStep | None:
        costs = self.costs_of(layout.groups.plan)
        return OuterStep.of(layout, costs, self.network, self._hop_times)

    def _sync(self, layout: MachineLayout) -> list[SyncJob]:
        """Return the gradient sums of an iteration."""
        if layout.groups.plan.outer_every is not None:
            return inner_jobs(layout, self.facts, self._sync)
        sync = SyncJobs(
            layout.groups.plan,
            layout,
            self.costs_of(layout.groups.plan),
            self.network,
            hop_times=self._hop_times,
        )
        return sync.jobs(per_layer=self.overlaps)

    # -- schedule -------------------------------------------------------------------------------

    def _run_pipelines(self, work: PlanTimes) -> PassEnds:
        """Run each distinct pipeline once; unsplit 1F1B pipelines of equal depth run together."""
        groups, plan = work.layout.groups, work.layout.groups.plan
        equal = equal_pipelines(work)
        ends = PassEnds(np.empty(len(groups)), np.empty(len(groups)))
        batches: defaultdict[int, list[int]] = defaultdict(list)
        others = []
        for p in dict.fromkeys(equal):
            if plan.schedule == "1f1b" and groups.is_chain[p]:
                batches[len(plan.pipelines[p].stages)].append(p)
            else:
                others.append(p)
        for stages, batch in sorted(batches.items()):
            rows = groups.bounds[batch] + np.arange(stages)[:, None]
            finish = run_1f1b(
                _durations(work, rows),
                micro_batches=[plan.pipelines[p].micro_batches for p in batch],
                messaging=self.costs.runtime.messaging,
            )
            ends.last_backward[rows], ends.free[rows] = finish.last_backward_end, finish.free
        if others:
            times = pipeline_times(work)
            for p in others:
                begin, end = groups.blocks[p]
                passes = self._replay(plan, times[p])
                ends.last_backward[begin:end] = passes.last_backward_end
                ends.free[begin:end] = _free_s(passes)
        # Copy the results to equal pipelines.
        like = groups.bounds[equal][groups.pipeline] - groups.bounds[groups.pipeline]
        rows = np.arange(len(groups)) + like
        return PassEnds(ends.last_backward[rows], ends.free[rows])

    def _replay(self, plan: Plan, times: PipelineTimes) -> ScheduleReplay:
        messaging = self.costs.runtime.messaging
        if messaging == "lockstep" and not (plan.schedule == "1f1b" and times.is_chain):
            messaging = "blocking"  # DeepSpeed has only unsplit 1F1B; its sends block.
        return replay(
            times.times,
            times.edges,
            schedule=plan.schedule,
            micro_batches=times.micro_batches,
            messaging=messaging,
            virtual_stages=plan.virtual_stages,
        )

    def _finish(
        self, layout: MachineLayout, ends: PassEnds, jobs: Sequence[SyncJob]
    ) -> _IterationEnds:
        """Run the sync jobs in order, then each group's optimizer step, then the broadcasts."""
        groups, owner = layout.groups, layout.groups.owner
        overlaps = self.overlaps
        ahead = self._backward_sums(groups) if overlaps else np.empty((0, 0))
        order = SumOrder(groups)
        for job in jobs:
            rows = job.rows
            at = ends.last_backward[rows] if overlaps else ends.free[rows]
            if overlaps and job.algorithm != "tied":
                # Layers run backward from the last: this gradient is complete before those of the
                # stage's earlier layers.
                layer, first, kind = job.layers[0], groups.first[rows], groups.timing[rows]
                kept = np.minimum(groups.kept_from[rows], layer)
                again = ahead[kind, 1, kept] - ahead[kind, 1, first]
                at = at - (again + (ahead[kind, 0, layer] - ahead[kind, 0, kept]))
            order.run(job, float(at.max()))
        optimizer = optimizer_seconds(groups, self.costs_of(groups.plan))
        done = np.maximum(np.maximum(ends.free, ends.last_backward), order.free)
        updated = done + optimizer
        for job in jobs:
            if job.broadcast is not None:
                order.run(job.broadcast, float(updated[owner[job.rows]].max()))
        end = np.maximum(updated, order.free)
        return _IterationEnds(updated, end, order.busy, optimizer, ends.free, tuple(order.runs))

    def _backward_sums(self, groups: DeviceGroups) -> Floats:
        """Return [timed kind, recomputation, layer]: the backward of all layers before it.

        Of a divided backward, its last part.
        """
        costs = self.costs_of(groups.plan)

        def sums(gpu: str, tp: int, samples: int, recompute: Recompute) -> Floats:
            if groups.plan.schedule == "zero-bubble":
                return prefix_sums(costs.weight_by_layer(gpu, tp=tp, samples=samples))
            return prefix_sums(
                costs.backward_by_layer(gpu, tp=tp, samples=samples, recompute=recompute)
            )

        return np.array([[sums(*kind, "none"), sums(*kind, "full")] for kind in groups.timed])

    # -- results --------------------------------------------------------------------------------

    def _stage_times(
        self,
        work: PlanTimes,
        finish: _IterationEnds,
        iteration_s: float,
        outer: OuterStep | None,
    ) -> tuple[tuple[StageTime, ...], ...]:
        """Return how each stage spends the iteration; of a split stage, its slowest group."""
        groups = work.layout.groups
        compute = groups.sum_by_owner(groups.micro_batches * work.compute)
        held = groups.sum_by_owner(groups.micro_batches * work.held_up)
        # Sync that overlapped with the last passes and messages delayed nothing.
        waited = finish.step_end - finish.optimizer - finish.free
        communication = held + np.minimum(finish.sync_busy, np.maximum(waited, 0.0))
        optimizer = finish.optimizer
        if outer is not None:
            communication = communication + outer.sums / outer.every
            optimizer = optimizer + outer.update / outer.every
        idle = iteration_s - (compute + communication + optimizer)
        table = np.stack([compute, communication, optimizer, idle])
        seen: dict[bytes, tuple[StageTime, ...]] = {}
        found = []
        for rows in fullest_rows(groups, compute):
            block = np.ascontiguousarray(table[:, rows])
            key = block.tobytes()
            if key not in seen:
                seen[key] = tuple(map(StageTime, *block.tolist()))
            found.append(seen[key])
        return tuple(found)

    def _egress(
        self, groups: DeviceGroups, jobs: Sequence[SyncJob], outer: OuterStep | None
    ) -> dict[tuple[str, str], float]:
        hops, names = groups.hops, groups.zones
        sizes = np.array([self.costs.output_bytes(n) for n in range(self.costs.layer_count)])
        moved = hops.samples * sizes[groups.end[hops.source] - 1]
        moved = moved * groups.micro_batches[hops.source]
        here, there = groups.zone[hops.source], groups.zone[hops.target]
        whole = sent_whole(groups, sends_whole=self.costs.runtime.sends_whole)
        ahead, back = (
            moved * tensors_sent(groups.tp[receivers], whole)
            for receivers in (hops.target, hops.source)
        )
        table = np.zeros((len(names), len(names)))
        np.add.at(table, (here, there), ahead)
        np.add.at(table, (there, here), back)
        totals: defaultdict[tuple[str, str], float] = defaultdict(float)
        for a, b in zip(*np.nonzero(table), strict=True):
            if a != b:
                totals[names[a], names[b]] += float(table[a, b])
        for job in [*jobs, *(job.broadcast for job in jobs if job.broadcast is not None)]:
            for zones, size in job.egress_bytes:
                totals[zones] += size
        if outer is not None:
            for zones, size in outer.egress:
                totals[zones] += size
        return dict(totals)


@dataclass(frozen=True, slots=True, eq=False)
class _IterationEnds:
    """The end of the iteration, by device group."""

    updated: Floats
    """When its optimizer step ended."""
    step_end: Floats
    """When it also had the weights that others updated."""
    sync_busy: Floats
    optimizer: Floats
    free: Floats
    sync: tuple[tuple[float, SyncJob], ...]


def devices_by_place(groups: DeviceGroups) -> dict[Place, int]:
    """Count the devices of each place that a plan uses."""
    rows = groups.owning
    counts = np.bincount(groups.place[rows], weights=groups.tp[rows], minlength=len(groups.places))
    return {
        place: int(count)
        for place, count in zip(groups.places, counts.tolist(), strict=True)
        if count
    }


TAIL_SHARE_MIN = 0.1
"""Share of an iteration from which the bottleneck text mentions sync and optimizer at its end."""


def _durations(work: PlanTimes, rows: Ints) -> PassDurations:
    """Return the durations of unsplit pipelines of equal depth as [stage, pipeline]."""
    hops, channels = work.layout.groups.hops, work.channels
    activation, gradient = np.zeros(len(work.seconds)), np.zeros(len(work.seconds))
    activation[hops.source] = channels.activation_s
    gradient[hops.target] = channels.gradient_s
    columns = (np.ascontiguousarray(work.seconds[rows, field]) for field in range(6))
    forward, backward, *messages = columns
    return PassDurations(forward, backward, activation[rows], gradient[rows], *messages)


def _free_s(passes: ScheduleReplay) -> Floats:
    return np.array([passes.free[device] for device in passes.device_of])


def _bottleneck(
    plan: Plan, stages: Sequence[Sequence[StageTime]], iteration_s: float, passes_s: float
) -> str:
    """Describe the busiest device group, what it spends most time on, and a long tail of sync."""
    spots = ((p, s) for p, row in enumerate(stages) for s in range(len(row)))
    p, s = min(spots, key=lambda at: stages[at[0]][at[1]].idle_s)
    stage, time = plan.pipelines[p].stages[s], stages[p][s]
    parts = {
        "compute": time.compute_s,
        "communication": time.communication_s,
        "the optimizer step": time.optimizer_s,
    }
    share = 1 - time.idle_s / iteration_s
    kinds_of = " + ".join(dict.fromkeys(f"{place.gpu} x{stage.tp}" for place in stage.places))
    most, seconds = max(parts.items(), key=lambda part: part[1])
    sentence = (
        f"pipeline {p} stage {s} (layers {stage.layers[0]}-{stage.layers[1] - 1}, "
        f"{kinds_of} in {stage.places[0].zone}) is busy {share:.0%} of the iteration, "
        f"{seconds / iteration_s:.0%} of it with {most}"
    )
    tail = 1 - passes_s / iteration_s
    if tail >= TAIL_SHARE_MIN:
        sentence += (
            f"; when all passes are done, gradient sync and optimizer take the last {tail:.0%}"
        )
    return sentence
