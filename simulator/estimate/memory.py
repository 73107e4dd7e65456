"""Peak memory of each device: parameters, gradients, optimizer, activations, buffers, context."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from itertools import pairwise

import numpy as np

from simulator.arrays import Bools, Floats, Ints
from simulator.estimate.device_groups import DeviceGroups, distinct_rows, range_maxima, range_sums
from simulator.estimate.pass_order import held_at_most
from simulator.estimate.result import DeviceMemory
from simulator.estimate.stage_messages import shares_sent
from simulator.estimate.zero1_owners import owned_most
from simulator.hardware.runtime_constants import Runtime, platform_of, uses_gloo
from simulator.layer_costs.layer_costs import LayerCosts
from simulator.models.layers import Precision, Recompute
from simulator.spec.job import OPTIMIZER_MOMENTS, Job
from simulator.spec.plan import Place, Plan

RESERVED_OVER_LIVE = 2.0
"""Transient memory that a caching allocator reserves, relative to the live transients.

Forward and backward request blocks of different sizes, and the allocator keeps freed ones.
Fitted on the peak memory of 13 runs of OPT-350M with Megatron-DeepSpeed (SOSP'25 artefact),
together with the context memory of the two platforms.
"""

OUTER_BYTES = 8
"""Bytes per parameter that outer steps need, in fp32: the weights after the last outer step, and
their momentum. The change since then takes the place of the gradients."""


def bytes_per_parameter(job: Job, precision: Precision | None = None) -> tuple[int, int, int, int]:
    """Bytes of weight, gradient, fp32 copy of a 16-bit weight, and moments.

    ``precision`` is that of the device, if it is not the job's.
    """
    weight, copy = (4, 0) if (precision or job.precision) == "fp32" else (2, 4)
    return weight, 4, copy, 4 * OPTIMIZER_MOMENTS[job.optimizer]


def state_bytes(
    per_parameter: tuple[int, ...] | Ints, count: Floats, copied: Floats, with_moments: Floats
) -> tuple[Floats, Floats, Floats]:
    """Bytes of weights, gradients and optimizer state of ``count`` parameters on a device, which
    has fp32 copies of some, and moments of some."""
    weight, gradient, copy, moments = per_parameter
    return weight * count, gradient * count, copy * copied + moments * with_moments


def state_bytes_per_parameter(job: Job) -> int:
    """Bytes of weight, gradient and optimizer state."""
    return sum(bytes_per_parameter(job))


def gradient_buffer_bytes(runtime: Runtime, parameters: Floats, is_copied: Bools) -> Floats:
    """Bytes of buffers for gradients in transit.

    ``is_copied``: whether gradients are copied to be summed with those of replicas.
    """
    if runtime.flattens_gradients:  # The flat buffer exists even with one replica.
        flat: Floats = np.minimum(runtime.sync_bucket_bytes, 4 * parameters)
        return flat
    copied: Floats = np.where(is_copied, 2 * runtime.sync_bucket_bytes, 0.0)
    return copied


@cache
def largest_part(tp: int, degrees: tuple[int, ...]) -> float:
    """Return the largest part of its share of a layer that a rank of degree ``tp`` sums apart from
    the rest, since ranks of other ``degrees`` hold other shares; 0: no share is divided."""
    atoms = math.lcm(tp, *degrees)
    cuts = sorted({at for each in degrees for at in range(0, atoms + 1, atoms // each)})
    most, each = 0, atoms // tp
    for begin in range(0, atoms, each):
        own = [begin, *(at for at in cuts if begin < at < begin + each), begin + each]
        if len(own) > 2:
            most = max(most, *(b - a for a, b in pairwise(own)))
    return most / each


class MemoryModel:
    """Computes the peak memory of all device groups of a plan as numpy columns."""

    def __init__(
        self,
        plan: Plan,
        costs: LayerCosts,
        capacity_bytes: Callable[[Place], float],
        *,
        groups: DeviceGroups | None = None,
        is_outer_group: bool = False,
    ) -> None:
        """With ``is_outer_group``, the plan is that of an outer group of a larger one."""
        self.is_outer_group = is_outer_group
        self.plan, self.costs, self.capacity_bytes = plan, costs, capacity_bytes
        self.groups = groups or DeviceGroups.of(plan)
        # Avoid a division by zero for layers that no stage of an invalid plan holds.
        self.holders = np.maximum(self.groups.holders(costs.layer_count), 1)
        own = [
            costs.precision_on(place.gpu) == costs.job.precision
            for place in self.groups.place_kinds
        ]
        self.widened = np.array([int(not is_own) for is_own in own])[self.groups.place_kind]
        """1 for the groups that compute in fp32, as they have no bf16."""

    def pipelines(self) -> tuple[tuple[DeviceMemory, ...], ...]:
        """Return, per pipeline and stage, the memory of its fullest device."""
        if self.plan.outer_every is not None:
            return self._by_outer_group()
        table = self._table()
        rows = fullest_rows(self.groups, table[:-1].sum(axis=0) - table[-1])
        seen: dict[bytes, tuple[DeviceMemory, ...]] = {}
        found = []
        for near in rows:
            block = np.ascontiguousarray(table[:, near])
            key = block.tobytes()
            if key not in seen:
                seen[key] = tuple(map(DeviceMemory, *block.tolist()))
            found.append(seen[key])
        return tuple(found)

    def _by_outer_group(self) -> tuple[tuple[DeviceMemory, ...], ...]:
        """Return ``pipelines``, each with the others of its outer group."""
        found: dict[int, tuple[DeviceMemory, ...]] = {}
        for numbers, (part, _) in zip(self.plan.outer_groups, self.groups.outer_parts, strict=True):
            model = MemoryModel(part, self.costs, self.capacity_bytes, is_outer_group=True)
            found |= zip(numbers, model.pipelines(), strict=True)
        return tuple(found[p] for p in range(len(self.plan.pipelines)))

    def _table(self) -> Floats:
        """Return the fields of ``DeviceMemory`` as rows and the device groups as columns."""
        groups, job = self.groups, self.costs.job
        count, sharded, frozen_bytes = self._parameters()
        copied = with_moments = count
        if self.costs.has_owners:
            with_moments = owned_most(groups, self.costs).kept
        elif job.zero == 1:
            copied = with_moments = sharded
        activations, workspace = self._activations()
        per_parameter = [
            bytes_per_parameter(job, self.costs.precision_on(place.gpu))
            for place in groups.place_kinds
        ]
        each = np.array(per_parameter)[groups.place_kind].T
        states = state_bytes(each, count, copied, with_moments)
        platforms = [platform_of(place.gpu) for place in groups.place_kinds]
        context = np.array([platform.context_bytes for platform in platforms])
        fragmentation = np.array([platform.fragmentation for platform in platforms])
        capacity = np.array([self.capacity_bytes(place) for place in groups.place_kinds])
        outer = OUTER_BYTES if self.is_outer_group else 0
        copies = self._largest_copies()
        communication = self._communication(count, copies)
        if self.costs.has_owners:
            # In an update weights on their way, gradient and moments are copied, and activations
            # and transients are freed.
            most = (3 + OPTIMIZER_MOMENTS[job.optimizer]) * copies
            room = activations + RESERVED_OVER_LIVE * workspace
            communication = np.maximum(communication, most - room)
        columns = {
            "parameters": states[0] + frozen_bytes,
            "gradients": states[1],
            "optimizer": states[2] + outer * count,
            "activations": activations,
            "workspace": RESERVED_OVER_LIVE * workspace,
            "communication": communication,
            "context": context[groups.place_kind],
            "fragmentation": fragmentation[groups.place_kind] * activations,
            "capacity": capacity[groups.place_kind],
        }
        return np.stack([columns[field.name] for field in fields(DeviceMemory)])

    def _parameters(self) -> tuple[Floats, Floats, Floats]:
        """Return the parameters on each device, its share if each holder has an equal one, and
        the bytes of those that are frozen.
        """
        groups, costs = self.groups, self.costs
        count, sharded, tied, frozen_bytes = np.zeros((4, len(groups)))
        heads, kind = distinct_rows(groups.tp, self.widened)
        for number, row in enumerate(heads.tolist()):
            rows = np.flatnonzero(kind == number)
            tp, gpu = int(groups.tp[row]), groups.place_kinds[groups.place_kind[row]].gpu
            held = costs.parameters(tp)
            first, end = groups.first[rows], groups.end[rows]
            count[rows] = range_sums(held, first, end)
            sharded[rows] = range_sums(held / self.holders, first, end)
            frozen_bytes[rows] = range_sums(costs.frozen_bytes(tp, gpu=gpu), first, end)
            tied[rows] = costs.tied_parameters(tp)
        count, sharded, frozen_bytes = map(groups.sum_by_owner, (count, sharded, frozen_bytes))
        # A group with embedding and head holds their shared tensor once.
        both = groups.holds_both_ends(costs.layer_count)
        return count - both * tied, sharded - both * tied / self.holders[-1], frozen_bytes

    def _activations(self) -> tuple[Floats, Floats]:
        """Return the activations kept for later backwards, and the largest transient."""
        groups, costs, runtime = self.groups, self.costs, self.costs.runtime
        kept_each, in_transit, for_weights, workspace = np.zeros((4, len(groups)))
        heads, kind = distinct_rows(groups.tp, groups.samples, self.widened)
        for number, row in enumerate(heads.tolist()):
            rows = np.flatnonzero(kind == number)
            tp, samples = int(groups.tp[row]), int(groups.samples[row])
            gpu = groups.place_kinds[groups.place_kind[row]].gpu
            end = groups.end[rows]
            head = end == costs.layer_count
            most, last_work = np.zeros(len(rows)), 0.0
            parts: dict[Recompute, tuple[Ints, Ints]] = {
                "full": (groups.first[rows], groups.kept_from[rows]),
                "none": (groups.kept_from[rows], end),
            }
            for recompute, (first, last) in parts.items():
                if (first == last).all():
                    continue
                kept = costs.kept_bytes(tp=tp, samples=samples, recompute=recompute, gpu=gpu)
                # One micro batch of what is offloaded is on its way at most.
                away = groups.offload[rows] * (recompute == "none")
                in_transit[rows] += range_sums(kept, first, first + away)
                kept_each[rows] += range_sums(kept, first + away, last)
                work = costs.workspace_bytes(tp=tp, samples=samples, recompute=recompute, gpu=gpu)
                body = np.minimum(last, end - head)
                most = np.maximum(most, range_maxima(work, first, body))
                last_work = float(work[-1])
            if self.plan.schedule == "zero-bubble":
                later = costs.kept_for_weights(tp=tp, samples=samples, gpu=gpu)
                for_weights[rows] = range_sums(later, groups.first[rows], end)
            # The head's transients differ in size from a block's, so the allocator cannot reuse
            # one's blocks for the other.
            workspace[rows] = most + head * last_work
        if runtime.keeps_stage_outputs:
            own = groups.tp if self.plan.sequence_parallel else 1
            kept_each += self._output_bytes(groups.end - 1, groups.end) / own
        most = np.zeros(len(groups))
        np.maximum.at(most, groups.owner, workspace)
        return self._in_flight(kept_each, for_weights) + in_transit, most

    def _in_flight(self, kept_each: Floats, for_weights: Floats) -> Floats:
        """Return the activations of all micro batches in flight at each group's peak."""
        groups, plan = self.groups, self.plan
        owning = groups.owning
        columns = groups.stage[owning], groups.stage_count[owning], groups.micro_batches[owning]
        heads, kind = distinct_rows(*columns)
        found = np.zeros(len(groups))
        for number, (device, stages, micro_batches) in enumerate(
            zip(*(column[heads].tolist() for column in columns), strict=True)
        ):
            peaks = held_at_most(
                plan.schedule,
                device=device,
                stages=stages,
                micro_batches=micro_batches,
                virtual_stages=plan.virtual_stages,
            )
            rows = owning[kind == number]
            counts = np.array(peaks, dtype=float).T
            if plan.schedule == "zero-bubble":
                both = np.stack([kept_each[rows], for_weights[rows]], axis=1)
                found[rows] = (both @ counts).max(axis=1)
                continue
            # A device group's chunks are as many rows apart as the pipeline has device groups.
            chunks = rows[:, None] + stages // plan.virtual_stages * np.arange(len(peaks[0]))
            found[rows] = (kept_each[chunks] @ counts).max(axis=1)
        return found

    def _communication(self, count: Floats, largest_copies: Floats) -> Floats:
        """Return the buffers for stage inputs and outputs, and for gradients in transit."""
        groups, runtime, hops = self.groups, self.costs.runtime, self.groups.hops
        arriving = self._output_bytes(groups.first - 1, groups.first)
        leaving = self._output_bytes(groups.end - 1, groups.end)
        if self.plan.sequence_parallel:
            alike = shares_sent(groups)
            arriving[hops.target] /= np.where(alike, groups.tp[hops.target], 1)
            leaving[hops.source] /= np.where(alike, groups.tp[hops.source], 1)
        buffers = np.zeros(len(groups))
        np.maximum.at(buffers, groups.owner, np.maximum(arriving, leaving))
        shared = range_maxima(self.holders, groups.first, groups.end) > 1
        shared |= self.is_outer_group
        anywhere = np.zeros(len(groups), dtype=bool)
        np.logical_or.at(anywhere, groups.owner, shared)
        in_place = np.array([uses_gloo(place.gpu) for place in groups.place_kinds])[
            groups.place_kind
        ]
        in_transit = gradient_buffer_bytes(runtime, count, anywhere & ~in_place)
        # One copy is summed, and the library still keeps the one before it.
        return buffers + np.maximum(in_transit, 2 * largest_copies)

    def _largest_copies(self) -> Floats:
        """Return the bytes of the largest part of a layer that each group copies.

        Ranks whose replicas divide a layer differently sum its parts one by one, and each is
        scattered over their buffers. A tensor that layers share is summed when activations are
        freed, so it does not count.
        """
        groups, costs = self.groups, self.costs
        found = np.zeros(len(groups))
        degrees = np.unique(groups.tp).tolist()
        if len(degrees) == 1:
            return found
        layers = np.arange(costs.layer_count)
        held = np.empty((costs.layer_count, len(degrees)), dtype=bool)
        for number, tp in enumerate(degrees):
            rows = groups.tp == tp
            first, end = groups.first[rows, None], groups.end[rows, None]
            held[:, number] = ((first <= layers) & (layers < end)).any(axis=0)
        kinds, kind = distinct_rows(*held.T)
        # A rank has a share of the split parameters, and all others.
        low, high = degrees[0], degrees[-1]
        split = (costs.parameters(low) - costs.parameters(high)) / (1 / low - 1 / high)
        for tp in degrees:
            share = np.array([
                largest_part(tp, tuple(itertools.compress(degrees, held[row].tolist())))
                for row in kinds.tolist()
            ])  # fmt: skip
            parts = 4 * split / tp * share[kind]
            rows = np.flatnonzero(groups.tp == tp)
            most = range_maxima(parts, groups.first[rows], groups.end[rows])
            np.maximum.at(found, groups.owner[rows], most)
        return found

    def _output_bytes(self, layer: Ints, boundary: Ints) -> Floats:
        """Return the bytes of a micro batch after a layer; 0 at the two ends of the model."""
        sizes = np.array([self.costs.output_bytes(n) for n in range(self.costs.layer_count)])
        inside = (boundary > 0) & (boundary < self.costs.layer_count)
        found: Floats = np.where(inside, self.groups.samples * sizes[layer], 0.0)
        return found


def fullest_rows(groups: DeviceGroups, load: Floats) -> list[Ints]:
    """Return, per pipeline, one row for each stage: of a split stage, the most loaded one."""
    found = []
    for (begin, end), is_chain in zip(groups.blocks, groups.is_chain, strict=True):
        rows = np.arange(begin, end)
        rows = rows[groups.owner[rows] == rows]
        if not is_chain:
            # Sort by stage, then by descending load, then by index within the split.
            order = np.lexsort((groups.index[rows], -load[rows], groups.stage[rows]))
            _, heads = np.unique(groups.stage[rows][order], return_index=True)
            rows = rows[order][heads]
        found.append(rows)
    return found
