"""Activations that wait in the hosts' memory: seconds of passes, and whether the hosts have room.

The layers of a pass are copied one after the other: in a forward pass each when it has ended, for a
backward pass from its beginning on, in the order in which they are needed. A pass ends when its
copies have ended, so a device holds one micro batch of the offloaded layers at most (ADR 124).
"""

from __future__ import annotations

import numpy as np

from simulator.arrays import Floats, prefix_sums
from simulator.cluster.place_facts import PlaceFacts
from simulator.estimate.device_groups import DeviceGroups, distinct_rows
from simulator.estimate.pass_order import held_at_most
from simulator.hardware.types import GIB
from simulator.layer_costs.layer_costs import LayerCosts
from simulator.spec.job import OPTIMIZER_MOMENTS, Job
from simulator.spec.plan import Place

OFFLOAD_NOTE = (
    "no runtime offloads activations yet; how fast they are copied to the hosts' memory is the"
    " catalogue's figure, and what that slows down was not measured"
)
SNAPSHOT_COPIES = 6
"""Copies of the state for which the memory of all hosts together is reserved, as in
``worker.checkpoint.capacity_check.usual_room``."""
SNAPSHOT_COPIES_MORE = 8
"""The same under ZeRO, and for jobs that must survive the loss of a zone."""


def copy_ends(
    costs: LayerCosts, gpu: str, *, tp: int, samples: int, first: int, kept_from: int, end: int
) -> tuple[Floats, Floats]:
    """Return the least seconds of a forward and a backward by the number of offloaded layers, from
    one up to all between ``kept_from`` and ``end``; the layers from ``first`` on are recomputed.
    """
    copies = prefix_sums(costs.copies_by_layer(gpu, tp=tp, samples=samples))
    times = costs.times(gpu, tp=tp, samples=samples)
    back = times.backward.copy()
    back[first:kept_from] += costs.again_by_layer(gpu, tp, samples)[first:kept_from]
    layers = np.arange(kept_from, end)

    def ends(work: Floats) -> Floats:
        # The copies from layer i on follow its forward. In a backward, read from its end, the
        # copies up to layer i come before the work of layer i and all below it.
        sums = prefix_sums(work)
        latest = np.maximum.accumulate(sums[layers + 1] - copies[layers])
        found: Floats = copies[layers + 1] + latest - sums[first]
        return found

    return ends(times.forward), ends(back)


def with_copies(
    groups: DeviceGroups, costs: LayerCosts, forward: Floats, backward: Floats
) -> tuple[Floats, Floats]:
    """Return forward and backward seconds of every group, of which some wait for copies."""
    rows = np.flatnonzero(groups.offload)
    if not len(rows):
        return forward, backward
    forward, backward = forward.copy(), backward.copy()
    columns = groups.timing, groups.first, groups.kept_from, groups.offload
    heads, kind = distinct_rows(*(column[rows] for column in columns))
    for number, head in enumerate(rows[heads].tolist()):
        timing, first, kept_from, count = (int(column[head]) for column in columns)
        gpu, tp, samples = groups.timed[timing]
        ahead, back = copy_ends(
            costs, gpu, tp=tp, samples=samples, first=first, kept_from=kept_from,
            end=kept_from + count,
        )  # fmt: skip
        alike = rows[kind == number]
        forward[alike] = np.maximum(forward[alike], ahead[-1])
        backward[alike] = np.maximum(backward[alike], back[-1])
    return forward, backward


def snapshot_bytes(job: Job) -> int:
    """Return the bytes that the snapshots of a job take on all hosts together."""
    needs_more = job.zero or job.checkpoint.survive == "zone"
    copies = SNAPSHOT_COPIES_MORE if needs_more else SNAPSHOT_COPIES
    return copies * 4 * (1 + OPTIMIZER_MOMENTS[job.optimizer]) * job.model.parameters


def host_room(job: Job, facts: PlaceFacts, place: Place, devices: int) -> float:
    """Return the bytes of its host's memory in which one of a plan's devices may keep activations.

    Infinite where the machine's memory is not known.
    """
    share = facts.host_bytes_per_gpu(place)
    return float("inf") if share is None else share - snapshot_bytes(job) / devices


def host_shortage(groups: DeviceGroups, costs: LayerCosts, facts: PlaceFacts) -> str:
    """Return which machines lack memory for what their devices offload; empty: none do."""
    rows, plan = np.flatnonzero(groups.offload), groups.plan
    if not len(rows):
        return ""
    columns = (
        *(groups.place_kind, groups.tp, groups.samples, groups.kept_from, groups.offload),
        *(groups.stage, groups.stage_count, groups.micro_batches),
    )
    found: dict[str, str] = {}
    for head in rows[distinct_rows(*(column[rows] for column in columns))[0]].tolist():
        kind, tp, samples, first, count, stage, stages, micro_batches = (
            int(column[head]) for column in columns
        )
        place = groups.place_kinds[kind]
        kept = costs.kept_bytes(tp=tp, samples=samples, recompute="none", gpu=place.gpu)
        ((held,),) = held_at_most(
            plan.schedule, device=stage, stages=stages, micro_batches=micro_batches
        )
        needed = held * float(kept[first : first + count].sum())
        room = host_room(costs.job, facts, place, plan.device_count)
        if needed > room:
            found[place.machine] = (
                f"{place.machine} has {max(room, 0.0) / GIB:.1f} GiB of host memory for each device"
                f" beside snapshots, and stage {stage} offloads {needed / GIB:.1f} GiB"
            )
    return "; ".join(found.values())
