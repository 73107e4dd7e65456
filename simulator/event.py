"""The event estimator: every pipeline's real schedule, its messages, and the sync behind it.

Stages are timed from the layers that they hold; pipelines run their schedule with messages
between neighbouring stages; each layer's gradients are summed once all its holders are ready.
Stragglers stay where they are: a slow stage delays its own pipeline, and a slow pipeline the
sync of the layers that it shares, nothing else.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from simulator.costs import LayerCosts
from simulator.estimate import Estimate, StageTime
from simulator.fitting import Misfit, misfits
from simulator.gradients import GradientSync, SyncJob
from simulator.memory import MemoryModel
from simulator.messages import Contention, Messages, hops_of
from simulator.money import money_of
from simulator.network import Network
from simulator.pipeline import Durations, run_1f1b
from simulator.placement import GroupId, Layout, lay_out
from simulator.plan import Place, Plan, Stage
from simulator.platform import platform_of
from simulator.provenance import Provenance, weakest
from simulator.sites import Sites
from simulator.unrolled import Edge, Group, Unrolled, unroll


@dataclass(frozen=True, slots=True)
class Work:
    """One device group's seconds per micro batch on one stage."""

    forward: float
    backward: float
    receive_activation: float = 0.0
    receive_gradient: float = 0.0
    send_activation: float = 0.0
    send_gradient: float = 0.0

    @property
    def held_up(self) -> float:
        """Time per micro batch that messages take from the device."""
        return (
            self.receive_activation
            + self.receive_gradient
            + self.send_activation
            + self.send_gradient
        )


@dataclass(frozen=True, slots=True)
class PipelineWork:
    """A pipeline as its schedule sees it: groups with their work, and channels between them."""

    micro_batches: int
    groups: tuple[tuple[int, int], ...]
    """(stage, index within the split) of each group."""
    work: tuple[Work, ...]
    edges: tuple[Edge, ...]

    @property
    def is_chain(self) -> bool:
        return len(self.groups) == self.groups[-1][0] + 1


@dataclass(frozen=True, slots=True)
class Ends:
    """When the groups of a pipeline were done with their backwards, and free."""

    last_backward: tuple[float, ...]
    free: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Details:
    """One iteration event by event; equal pipelines share one and the same work and passes."""

    works: tuple[PipelineWork, ...]
    passes: tuple[Unrolled, ...]
    sync: tuple[tuple[float, SyncJob], ...]
    """Each gradient sync with its start, in the order in which they run."""
    optimizer_s: Mapping[GroupId, float]
    step_end: Mapping[GroupId, float]
    """When the optimizer step, the last thing that a device group does, is done."""


class EventEstimator:
    """Estimates plans of one job on one cluster; tables are shared between plans."""

    name = "event"

    def __init__(self, costs: LayerCosts, network: Network, sites: Sites) -> None:
        self.costs, self.network, self.sites = costs, network, sites
        self._work: dict[object, Work] = {}

    def estimate(self, plan: Plan) -> Estimate:
        """Time, memory and money of a plan that was checked before."""
        layout = lay_out(plan, self.sites.gpus_per_machine)
        works = self.pipeline_works(plan, layout)
        ends = self._run_pipelines(plan, works)
        sync = GradientSync(plan, layout, self.costs, self.network)
        jobs = sync.jobs(per_layer=self._overlaps)
        finish = self._finish(plan, works, ends, jobs)
        last = max(finish.step_end.values())
        iteration_s = last + max(platform_of(place.gpu).iteration_s for place in _places(plan))
        stages = self._stage_times(plan, works, finish, iteration_s)
        memory = MemoryModel(plan, self.costs, self.sites.capacity_bytes).pipelines()
        money = money_of(
            plan,
            iteration_s=iteration_s,
            price=self.sites.price_usd_per_gpu_hour,
            egress_bytes=self._egress(plan, jobs),
            egress_usd_per_byte=self.network.egress_usd_per_byte,
        )
        provenance = self._provenance(plan, layout)
        return Estimate(
            estimator=self.name,
            iteration_s=iteration_s,
            samples_per_iteration=plan.samples_per_iteration,
            memory=memory,
            money=money,
            stages=stages,
            bottleneck=_bottleneck(plan, stages, iteration_s),
            provenance=provenance,
            notes=self.costs.notes,
        )

    def misfits(self, plan: Plan) -> tuple[Misfit, ...]:
        """The device groups that are too full, with what would make each fit."""
        job = self.costs.job

        def tp_max(stage: Stage) -> int:
            machines = (self.sites.gpus_per_machine(place) for place in stage.places)
            return min(job.max_tp, *machines)

        return misfits(
            plan,
            lambda changed: MemoryModel(changed, self.costs, self.sites.capacity_bytes).pipelines(),
            tp_max=tp_max,
        )

    def details(self, plan: Plan) -> Details:
        """Every pass of every pipeline and what follows them, for timelines and plots."""
        layout = lay_out(plan, self.sites.gpus_per_machine)
        works = self.pipeline_works(plan, layout)
        different = {id(work): work for work in works}
        passes = {key: self._unroll(plan, work) for key, work in different.items()}
        unrolled = tuple(passes[id(work)] for work in works)
        jobs = GradientSync(plan, layout, self.costs, self.network).jobs(per_layer=self._overlaps)
        finish = self._finish(plan, works, [_ends_of(one) for one in unrolled], jobs)
        return Details(tuple(works), unrolled, finish.sync, finish.optimizer, finish.step_end)

    @property
    def _overlaps(self) -> bool:
        runtime, job = self.costs.runtime, self.costs.job
        return (job.gradient_sync if runtime.sync == "job" else runtime.sync) == "overlap"

    # -- what each group does -------------------------------------------------------------------

    def pipeline_works(self, plan: Plan, layout: Layout) -> list[PipelineWork]:
        """The durations of every pipeline; equal ones are one and the same object."""
        messages = Messages(self.network, layout, Contention.of(plan, layout))
        shared: dict[object, PipelineWork] = {}
        works = []
        for p in range(len(plan.pipelines)):
            work = self._pipeline_work(plan, p, messages)
            works.append(shared.setdefault(work, work))
        return works

    def _pipeline_work(self, plan: Plan, p: int, messages: Messages) -> PipelineWork:
        pipeline = plan.pipelines[p]
        groups: list[tuple[int, int]] = []
        index: dict[GroupId, int] = {}
        for s, stage in enumerate(pipeline.stages):
            for i in range(len(stage.places)):
                index[p, s, i] = len(groups)
                groups.append((s, i))
        gather_forward = [0.0] * len(groups)
        gather_backward = [0.0] * len(groups)
        edges = []
        for s in range(len(pipeline.stages) - 1):
            size = self.costs.output_bytes(pipeline.stages[s].layers[1] - 1)
            for hop in hops_of(plan, p, s):
                ahead = messages.channel(plan, hop, bytes_per_sample=size, forward=True)
                back = messages.channel(plan, hop, bytes_per_sample=size, forward=False)
                source, target = index[hop.source], index[hop.target]
                edges.append(Edge(source, target, ahead.transfer_s, back.transfer_s))
                gather_forward[target] = max(gather_forward[target], ahead.gather_s)
                gather_backward[source] = max(gather_backward[source], back.gather_s)
        works = []
        last = len(pipeline.stages) - 1
        for k, (s, i) in enumerate(groups):
            works.append(
                self._group_work(
                    plan,
                    pipeline.stages[s],
                    i,
                    s == 0,
                    s == last,
                    gather_forward[k],
                    gather_backward[k],
                )
            )
        return PipelineWork(pipeline.micro_batches, tuple(groups), tuple(works), tuple(edges))

    def _group_work(
        self,
        plan: Plan,
        stage: Stage,
        i: int,
        is_first: bool,
        is_last: bool,
        gather_forward: float,
        gather_backward: float,
    ) -> Work:
        samples = stage.samples(plan.micro_batch_size)[i]
        place = stage.places[i]
        key = (
            stage.layers,
            stage.tp,
            stage.recompute,
            place.gpu,
            samples,
            is_first,
            is_last,
            gather_forward,
            gather_backward,
        )
        found = self._work.get(key)
        if found is None:
            platform = platform_of(place.gpu)
            forward, backward = self.costs.stage_seconds(
                place.gpu,
                tp=stage.tp,
                samples=samples,
                layers=stage.layers,
                recompute=stage.recompute,
            )
            found = self._work[key] = Work(
                forward=forward + (platform.load_s if is_first else 0.0),
                backward=backward,
                receive_activation=0.0 if is_first else platform.message_s + gather_forward,
                receive_gradient=0.0 if is_last else platform.message_s + gather_backward,
                send_activation=0.0 if is_last else platform.message_s,
                send_gradient=0.0 if is_first else platform.message_s,
            )
        return found

    # -- when it is done ------------------------------------------------------------------------

    def _run_pipelines(self, plan: Plan, works: Sequence[PipelineWork]) -> list[Ends]:
        """Run each different pipeline once; chains under 1F1B of equal shape run together."""
        ends: dict[int, Ends] = {}
        batches: defaultdict[tuple[int, int], list[PipelineWork]] = defaultdict(list)
        for work in {id(work): work for work in works}.values():
            if plan.schedule == "1f1b" and work.is_chain:
                batches[work.micro_batches, len(work.groups)].append(work)
            else:
                ends[id(work)] = _ends_of(self._unroll(plan, work))
        for (micro_batches, _), batch in sorted(batches.items()):
            finish = run_1f1b(
                _durations(batch),
                micro_batches=micro_batches,
                messaging=self.costs.runtime.messaging,
            )
            for column, work in enumerate(batch):
                ends[id(work)] = Ends(
                    tuple(finish.last_backward_end[:, column].tolist()),
                    tuple(finish.free[:, column].tolist()),
                )
        return [ends[id(work)] for work in works]

    def _unroll(self, plan: Plan, work: PipelineWork) -> Unrolled:
        messaging = self.costs.runtime.messaging
        if messaging == "lockstep" and not (plan.schedule == "1f1b" and work.is_chain):
            messaging = "blocking"  # That engine has no other schedule; its sends do hold up.
        return unroll(
            [
                Group(
                    s,
                    w.forward,
                    w.backward,
                    w.receive_activation,
                    w.receive_gradient,
                    w.send_activation,
                    w.send_gradient,
                )
                for (s, _), w in zip(work.groups, work.work, strict=True)
            ],
            work.edges,
            schedule=plan.schedule,
            micro_batches=work.micro_batches,
            messaging=messaging,
            virtual_stages=plan.virtual_stages,
        )

    def _finish(
        self,
        plan: Plan,
        works: Sequence[PipelineWork],
        ends: Sequence[Ends],
        jobs: Sequence[SyncJob],
    ) -> _Finish:
        """Run the sync jobs in their order, then each group's optimizer step."""
        ready: dict[GroupId, float] = {}
        free: dict[GroupId, float] = {}
        for p, (work, end) in enumerate(zip(works, ends, strict=True)):
            for k, (s, i) in enumerate(work.groups):
                ready[p, s, i] = end.last_backward[k]
                free[p, s, i] = end.free[k]
        partial = self._ready_within_backward(plan, works) if self._overlaps else {}
        channel: dict[GroupId, float] = dict.fromkeys(ready, 0.0)
        busy: defaultdict[GroupId, float] = defaultdict(float)
        owner = {group: self._owner(plan, group) for group in ready}
        sync = []
        for job in jobs:
            start = 0.0
            for group in job.holders:
                earlier = partial.get((group, job.layers[0]), 0.0) if job.way != "tied" else 0.0
                at = ready[group] - earlier if self._overlaps else free[group]
                start = max(start, at, channel[owner[group]])
            sync.append((start, job))
            for group in job.holders:
                channel[owner[group]] = start + job.seconds
                busy[owner[group]] += job.seconds
        zero = self.costs.job.zero == 1
        holders = plan.holder_counts(self.costs.layer_count) if zero else None
        step_end = {}
        optimizer = {}
        for p, pipeline in enumerate(plan.pipelines):
            for s, stage in enumerate(plan.owning_stages(pipeline)):
                for i in range(len(stage.places)):
                    group = (p, s, i)
                    seconds = self._optimizer_seconds(plan, p, s, i, holders)
                    done = max(free[group], ready[group], channel[group])
                    optimizer[group] = seconds
                    step_end[group] = done + seconds
        return _Finish(step_end, busy, optimizer, free, tuple(sync))

    def _owner(self, plan: Plan, group: GroupId) -> GroupId:
        """The device group that runs a chunk."""
        p, s, i = group
        return (p, s % plan.group_count(plan.pipelines[p]), i)

    def _ready_within_backward(
        self, plan: Plan, works: Sequence[PipelineWork]
    ) -> dict[tuple[GroupId, int], float]:
        """How long before the end of a group's last backward each layer's gradient is complete."""
        found: dict[tuple[GroupId, int], float] = {}
        cache: dict[object, list[float]] = {}
        for p, (pipeline, work) in enumerate(zip(plan.pipelines, works, strict=True)):
            for s, i in work.groups:
                stage = pipeline.stages[s]
                samples = stage.samples(plan.micro_batch_size)[i]
                key = (stage.layers, stage.tp, stage.recompute, stage.places[i].gpu, samples)
                before = cache.get(key)
                if before is None:
                    row = self.costs.backward_by_layer(
                        stage.places[i].gpu,
                        tp=stage.tp,
                        samples=samples,
                        layers=stage.layers,
                        recompute=stage.recompute,
                    )
                    before = cache[key] = [0.0, *np.cumsum(row)[:-1].tolist()]
                for offset, seconds in enumerate(before):
                    found[(p, s, i), stage.layers[0] + offset] = seconds
        return found

    def _optimizer_seconds(
        self, plan: Plan, p: int, s: int, i: int, holders: Sequence[int] | None
    ) -> float:
        """The step over what a device holds; with ZeRO-1, ``holders`` share each layer's."""
        pipeline = plan.pipelines[p]
        chunks = pipeline.stages[s :: plan.group_count(pipeline)]
        place, tp = chunks[0].places[i], chunks[0].tp
        samples = chunks[0].samples(plan.micro_batch_size)[i]
        stepped = self.costs.parameters(tp)
        if holders is not None:
            stepped = stepped / holders
        count = sum(float(stepped[c.layers[0] : c.layers[1]].sum()) for c in chunks)
        if chunks[0].layers[0] == 0 and chunks[-1].layers[1] == self.costs.layer_count:
            # The tensor that embedding and head share stands here once.
            count -= self.costs.tied_parameters(tp) / (holders[-1] if holders is not None else 1)
        per_parameter = self.costs.times(place.gpu, tp=tp, samples=samples)
        return count * per_parameter.optimizer_s_per_parameter

    # -- what it comes to -----------------------------------------------------------------------

    def _stage_times(
        self,
        plan: Plan,
        works: Sequence[PipelineWork],
        finish: _Finish,
        iteration_s: float,
    ) -> tuple[tuple[StageTime, ...], ...]:
        """How each device group spends the iteration; of a split stage, its slowest group."""
        rows = []
        for p, (pipeline, work) in enumerate(zip(plan.pipelines, works, strict=True)):
            owners = plan.group_count(pipeline)
            compute: defaultdict[GroupId, float] = defaultdict(float)
            held: defaultdict[GroupId, float] = defaultdict(float)
            for (s, i), w in zip(work.groups, work.work, strict=True):
                compute[p, s % owners, i] += work.micro_batches * (w.forward + w.backward)
                held[p, s % owners, i] += work.micro_batches * w.held_up
            row = []
            for s in range(owners):
                i = max(range(len(pipeline.stages[s].places)), key=lambda i: compute[p, s, i])
                group = (p, s, i)
                optimizer = finish.optimizer[group]
                # What of the sync ran beside the last passes and messages held nobody up.
                waited = finish.step_end[group] - optimizer - finish.free[group]
                synced = min(finish.sync_busy[group], max(waited, 0.0))
                busy = compute[group] + held[group] + synced + optimizer
                row.append(
                    StageTime(compute[group], held[group] + synced, optimizer, iteration_s - busy)
                )
            rows.append(tuple(row))
        return tuple(rows)

    def _egress(self, plan: Plan, jobs: Sequence[SyncJob]) -> dict[tuple[str, str], float]:
        totals: defaultdict[tuple[str, str], float] = defaultdict(float)
        for p, pipeline in enumerate(plan.pipelines):
            for s in range(len(pipeline.stages) - 1):
                here, there = pipeline.stages[s], pipeline.stages[s + 1]
                size = self.costs.output_bytes(here.layers[1] - 1)
                for hop in hops_of(plan, p, s):
                    a = here.places[hop.source[2]].zone
                    b = there.places[hop.target[2]].zone
                    if a != b:
                        moved = hop.samples * size * pipeline.micro_batches
                        totals[a, b] += moved
                        totals[b, a] += moved
        for job in jobs:
            for zones, size in job.egress_bytes:
                totals[zones] += size
        return dict(totals)

    def _provenance(self, plan: Plan, layout: Layout) -> Provenance:
        """The weakest source among the times of all stages and the links between them."""
        parts: dict[object, Provenance] = {}
        for p, pipeline in enumerate(plan.pipelines):
            for s, stage in enumerate(pipeline.stages):
                for place, samples in zip(
                    stage.places, stage.samples(plan.micro_batch_size), strict=True
                ):
                    key = (place.gpu, stage.tp, samples)
                    if key not in parts:
                        parts[key] = self.costs.provenance(place.gpu, tp=stage.tp, samples=samples)
                if s + 1 < len(pipeline.stages):
                    pair = (stage.places[0], pipeline.stages[s + 1].places[0])
                    if pair not in parts and not layout.same_node((p, s, 0), (p, s + 1, 0)):
                        parts[pair] = self.network.between_nodes_source(*pair)
        firsts = sorted({pl.stages[0].places[0] for pl in plan.pipelines}, key=repr)
        for one, other in pairwise(firsts):
            parts[one, other] = self.network.between_nodes_source(one, other)
        return weakest(parts.values())


@dataclass(frozen=True, slots=True)
class _Finish:
    """When all is over, by device group."""

    step_end: dict[GroupId, float]
    sync_busy: dict[GroupId, float]
    optimizer: dict[GroupId, float]
    free: dict[GroupId, float]
    sync: tuple[tuple[float, SyncJob], ...]


def _durations(batch: Sequence[PipelineWork]) -> Durations:
    """Chains of equal length as columns."""

    def grid(name: str) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        return np.array([[getattr(w, name) for w in work.work] for work in batch]).T.copy()

    stages = len(batch[0].groups)
    activation = np.zeros((stages, len(batch)))
    gradient = np.zeros((stages, len(batch)))
    for column, work in enumerate(batch):
        for edge in work.edges:
            activation[edge.source, column] = edge.activation
            gradient[edge.target, column] = edge.gradient
    return Durations(
        forward=grid("forward"),
        backward=grid("backward"),
        activation=activation,
        gradient=gradient,
        receive_activation=grid("receive_activation"),
        receive_gradient=grid("receive_gradient"),
        send_activation=grid("send_activation"),
        send_gradient=grid("send_gradient"),
    )


def _ends_of(unrolled: Unrolled) -> Ends:
    return Ends(
        unrolled.last_backward_end,
        tuple(unrolled.free[device] for device in unrolled.device_of),
    )


def _places(plan: Plan) -> dict[Place, None]:
    return dict.fromkeys(
        place for p in plan.pipelines for stage in p.stages for place in stage.places
    )


def _bottleneck(plan: Plan, stages: Sequence[Sequence[StageTime]], iteration_s: float) -> str:
    """A sentence: which device group is busiest, and with what."""
    p, s = max(
        ((p, s) for p, row in enumerate(stages) for s in range(len(row))),
        key=lambda ps: (-stages[ps[0]][ps[1]].idle_s, -ps[0], -ps[1]),
    )
    stage, time = plan.pipelines[p].stages[s], stages[p][s]
    parts = Counter(
        {
            "compute": time.compute_s,
            "communication": time.communication_s,
            "the optimizer step": time.optimizer_s,
        }
    )
    share = 1 - time.idle_s / iteration_s
    place = stage.places[0]
    most, seconds = parts.most_common(1)[0]
    return (
        f"pipeline {p} stage {s} (layers {stage.layers[0]}-{stage.layers[1] - 1}, "
        f"{place.gpu} x{stage.tp} in {place.zone}) is busy {share:.0%} of the iteration, "
        f"{seconds / iteration_s:.0%} of it with {most}"
    )
