"""Peak memory of each device: everything that is held when most of it is held."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from simulator.costs import LayerCosts
from simulator.estimate import DeviceMemory
from simulator.job import OPTIMIZER_MOMENTS
from simulator.plan import Place, Plan, Stage
from simulator.platform import platform_of
from simulator.schedule import Held, held_at_most

RESERVED_OVER_LIVE = 2.0
"""Memory that a caching allocator reserves for transients, over what of them lives at once.

Forward and backward ask for blocks of different sizes, and freed ones are kept. Fitted on the
peak memory of 13 runs of OPT-350M with Megatron-DeepSpeed (SOSP'25 artefact), together with the
context of the two platforms.
"""


class MemoryModel:
    """Memory of a plan's devices; equal stages are computed once."""

    def __init__(
        self, plan: Plan, costs: LayerCosts, capacity_bytes: Callable[[Place], float]
    ) -> None:
        self.plan, self.costs, self.capacity_bytes = plan, costs, capacity_bytes
        self._found: dict[object, DeviceMemory] = {}
        self.holders = np.array(plan.holder_counts(costs.layer_count))

    def pipelines(self) -> tuple[tuple[DeviceMemory, ...], ...]:
        """Per pipeline and device group, the device that is fullest."""
        seen: dict[tuple[int, int], tuple[DeviceMemory, ...]] = {}
        rows = []
        for pipeline in self.plan.pipelines:
            key = (pipeline.micro_batches, id(pipeline.stages))
            if key not in seen:
                owners = self.plan.group_count(pipeline)
                seen[key] = tuple(
                    self._group(pipeline.stages[s::owners], s, pipeline.micro_batches, owners)
                    for s in range(owners)
                )
            rows.append(seen[key])
        return tuple(rows)

    def _group(
        self, chunks: tuple[Stage, ...], s: int, micro_batches: int, owners: int
    ) -> DeviceMemory:
        """The fullest place of one device group, with all the chunks that it runs."""
        stage = chunks[0]
        held = held_at_most(
            self.plan.schedule,
            device=s,
            stages=owners * len(chunks),
            micro_batches=micro_batches,
            virtual_stages=self.plan.virtual_stages,
        )
        shapes = tuple((chunk.layers, chunk.recompute) for chunk in chunks)
        places = dict.fromkeys(
            zip(stage.samples(self.plan.micro_batch_size), stage.places, strict=True)
        )
        key = (stage.tp, tuple(places), shapes, held)
        if key not in self._found:
            options = [self._device(chunks, held, place, samples) for samples, place in places]
            self._found[key] = max(options, key=lambda m: m.total - m.capacity)
        return self._found[key]

    def _device(
        self, chunks: tuple[Stage, ...], held: tuple[Held, ...], place: Place, samples: int
    ) -> DeviceMemory:
        costs, job, runtime = self.costs, self.costs.job, self.costs.runtime
        platform = platform_of(place.gpu)
        tp = chunks[0].tp
        count = sharded = workspace = 0.0
        per_micro_batch = []
        for chunk in chunks:
            first, end = chunk.layers
            held_here = costs.parameters(tp)[first:end]
            count += float(held_here.sum())
            sharded += float((held_here / self.holders[first:end]).sum())
            kept = costs.kept_bytes(tp=tp, samples=samples, recompute=chunk.recompute)
            each = float(kept[first:end].sum())
            if runtime.keeps_stage_outputs and end < costs.layer_count:
                each += samples * costs.output_bytes(end - 1)
            per_micro_batch.append(each)
            work = costs.workspace_bytes(tp=tp, samples=samples, recompute=chunk.recompute)
            # The head's transients have other sizes than a block's, so that the allocator cannot
            # serve both from one reserve.
            head = end == costs.layer_count
            largest = float(work[first : end - head].max(initial=0.0))
            workspace = max(workspace, largest + (float(work[-1]) if head else 0.0))
        activations = max(
            sum(n * each for n, each in zip(counts, per_micro_batch, strict=True))
            for counts in held
        )
        if chunks[0].layers[0] == 0 and chunks[-1].layers[1] == costs.layer_count:
            # The tensor that embedding and head share stands here once.
            count -= costs.tied_parameters(tp)
            sharded -= costs.tied_parameters(tp) / self.holders[-1]
        full_precision = job.precision == "fp32"
        weight_bytes = 4 if full_precision else 2
        moments = OPTIMIZER_MOMENTS[job.optimizer] * 4 + (0 if full_precision else 4)
        return DeviceMemory(
            parameters=weight_bytes * count,
            gradients=4 * count,
            optimizer=moments * (sharded if job.zero == 1 else count),
            activations=activations,
            workspace=RESERVED_OVER_LIVE * workspace,
            communication=self._communication(chunks, samples, count),
            context=platform.context_bytes,
            fragmentation=platform.fragmentation * activations,
            capacity=self.capacity_bytes(place),
        )

    def _communication(self, chunks: tuple[Stage, ...], samples: int, count: float) -> float:
        """Buffers for what arrives and leaves, and for gradients on their way."""
        costs = self.costs
        buffers = 0.0
        for chunk in chunks:
            first, end = chunk.layers
            if first > 0:
                buffers = max(buffers, samples * costs.output_bytes(first - 1))
            if end < costs.layer_count:
                buffers = max(buffers, samples * costs.output_bytes(end - 1))
        if costs.runtime.flattens_gradients:
            buffers += min(costs.runtime.sync_bucket_bytes, 4 * count)  # Also for one replica.
        elif any((self.holders[slice(*chunk.layers)] > 1).any() for chunk in chunks):
            buffers += 2 * costs.runtime.sync_bucket_bytes
        return buffers
