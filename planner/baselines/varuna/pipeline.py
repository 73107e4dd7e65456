"""Varuna's simulation of one pipeline: its schedules, and their duration.

There are two schedules: 1F1B, as the published comparison ran it, and Varuna's own, in which every
stage but the last repeats a forward once its gradient has arrived, right before the backward.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, replace

from planner.compare.interface import Mode

PassOfBatch = tuple[str, int]
"""Forward ``F``, recomputation ``R`` or backward ``B``, and the micro batch."""

MICRO_BATCHES_MAX = 2048
"""Above this, the iteration time is extrapolated."""


@dataclass(frozen=True, slots=True)
class VarunaTimes:
    """The inputs of the simulation, in microseconds."""

    forward_us: tuple[float, ...]
    backward_us: tuple[float, ...]
    micro_batches: int
    send_us: float
    """A message to a stage on the same node."""
    long_send_us: float
    """A message to another node; 0 means ``send_us``."""
    gpus_per_node: int
    all_reduce_us: float
    recomputes: bool = False
    """Whether Varuna's own schedule is run, or 1F1B without recomputation."""

    @property
    def stages(self) -> int:
        return len(self.forward_us)


def turns(pipeline: VarunaTimes, stage: int, mode: Mode) -> list[PassOfBatch]:
    """1F1B: warm-up, one forward and one backward in turn, the remaining backwards."""
    behind, count = pipeline.stages - 1 - stage, pipeline.micro_batches
    warm_up = min(behind, count)
    order = [("F", m) for m in range(warm_up)]
    if mode == "published" and count < behind:
        return order  # Kept: it waits for the end of a warm-up that never comes.
    for m in range(count):
        if warm_up + m < count:
            order.append(("F", warm_up + m))
        order.append(("B", m))
    return order


def own_orders(pipeline: VarunaTimes) -> list[list[PassOfBatch]]:
    """Varuna's own schedule of all stages, computed on a clock where a forward takes one tick.

    A backward takes two ticks. Backward goes first, then recomputation, then forward; a stage may
    recompute once the first half of the next stage's backward is over.
    """
    last = pipeline.stages - 1
    # "H": the second half of a backward.
    waiting = [{kind: deque[int]() for kind in "HBRF"} for _ in range(pipeline.stages)]
    waiting[0]["F"].extend(range(pipeline.micro_batches))
    orders: list[list[PassOfBatch]] = [[] for _ in range(pipeline.stages)]
    while any(queue for stage in waiting for queue in stage.values()):
        tick = []
        for stage, queues in enumerate(waiting):
            kind = next((kind for kind in "HBRF" if queues[kind]), None)
            if kind is not None:
                tick.append((stage, kind, queues[kind].popleft()))
        for stage, kind, m in tick:
            if kind != "H":
                orders[stage].append((kind, m))
            if kind == "F" and stage < last:
                waiting[stage + 1]["F"].append(m)
            elif kind in "FR":
                waiting[stage]["B"].append(m)
            elif kind == "B":
                waiting[stage]["H"].append(m)
                if stage > 0:
                    waiting[stage - 1]["R"].append(m)
    return orders


def simulate_us(pipeline: VarunaTimes, mode: Mode = "fixed") -> float | None:
    """Iteration time by running every stage's passes; ``None`` for a deadlock.

    A pipeline with more micro batches than the limit is extrapolated at its steady pace.
    """
    more = pipeline.micro_batches - MICRO_BATCHES_MAX
    if more <= 0:
        return _Run(pipeline, mode).finish_us()
    long, half = (
        _Run(replace(pipeline, micro_batches=count), mode).finish_us()
        for count in (MICRO_BATCHES_MAX, MICRO_BATCHES_MAX // 2)
    )
    if long is None or half is None:
        return None
    return long + more * (long - half) / (MICRO_BATCHES_MAX - MICRO_BATCHES_MAX // 2)


class _Run:
    """One simulation; an event is the end of a pass (0) or the arrival of a message (1)."""

    def __init__(self, pipeline: VarunaTimes, mode: Mode) -> None:
        self.pipeline, self.mode = pipeline, mode
        self.left = [deque(order) for order in self._orders()]
        self.busy = [False] * pipeline.stages
        self.activations = [deque[int]() for _ in range(pipeline.stages)]
        self.activations[0].extend(range(pipeline.micro_batches))
        self.gradients = [deque[int]() for _ in range(pipeline.stages)]
        self.events: list[tuple[float, int, int, PassOfBatch]] = []

    def _orders(self) -> list[list[PassOfBatch]]:
        if self.pipeline.recomputes:
            return own_orders(self.pipeline)
        return [turns(self.pipeline, s, self.mode) for s in range(self.pipeline.stages)]

    def finish_us(self) -> float | None:
        now_us = 0.0
        self._start(0, now_us)
        while self.events:
            now_us, arrives, stage, (kind, m) = heapq.heappop(self.events)
            if arrives:
                (self.activations if kind == "F" else self.gradients)[stage].append(m)
            else:
                self.busy[stage] = False
                self._pass_on(stage, kind, m, now_us)
            self._start(stage, now_us)
        if any(self.left):
            assert self.mode == "published", "the fixed simulation cannot deadlock"
            return None
        return now_us + self.pipeline.all_reduce_us

    def _pass_on(self, stage: int, kind: str, m: int, now_us: float) -> None:
        if kind == "F" and stage == self.pipeline.stages - 1:
            self.gradients[stage].append(m)
        elif kind == "F":
            at_us = now_us + self._send_us(stage)
            heapq.heappush(self.events, (at_us, 1, stage + 1, ("F", m)))
        elif kind == "B" and stage > 0:
            at_us = now_us + self._send_us(stage - 1)
            heapq.heappush(self.events, (at_us, 1, stage - 1, ("B", m)))

    def _send_us(self, stage: int) -> float:
        """A message to or from the next stage; messages overlap with passes."""
        node, size = stage // self.pipeline.gpus_per_node, self.pipeline.gpus_per_node
        if node == (stage + 1) // size or self.pipeline.long_send_us == 0:
            return self.pipeline.send_us
        return self.pipeline.long_send_us

    def _start(self, stage: int, now_us: float) -> None:
        """Start the next pass if the stage is idle and the pass has its inputs."""
        order = self.left[stage]
        if self.busy[stage] or not order:
            return
        if order[0][0] == "R" and order[0][1] not in self.gradients[stage]:
            # Run the next forward rather than wait for a gradient.
            ahead = next((one for one in order if one[0] == "F"), None)
            if ahead is not None:
                order.remove(ahead)
                order.appendleft(ahead)
        kind, m = order[0]
        if not self._is_ready(stage, kind, m):
            return
        order.popleft()
        if kind != "R":
            (self.activations if kind == "F" else self.gradients)[stage].remove(m)
        self.busy[stage] = True
        took_us = (self.pipeline.backward_us if kind == "B" else self.pipeline.forward_us)[stage]
        heapq.heappush(self.events, (now_us + took_us, 0, stage, (kind, m)))

    def _is_ready(self, stage: int, kind: str, m: int) -> bool:
        waiting = (self.activations if kind == "F" else self.gradients)[stage]
        last = stage == self.pipeline.stages - 1
        if self.mode == "published" and kind == "B" and not last and not self.pipeline.recomputes:
            # Kept: gradients queue newest first, so that with two of them waiting the stage
            # looks at the wrong one, forever.
            return bool(waiting) and waiting[-1] == m
        return m in waiting
