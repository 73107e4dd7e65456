"""How long the messages between neighbouring stages take, and what they hold up.

The ranks of a stage share their machine's way out: each sends its share of the activation, and
the receiver's ranks gather the whole over the links inside their machine. Contention enters as
shares that depend on the plan alone, never on the moment.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from simulator.network import Network
from simulator.placement import GroupId, Layout, Node
from simulator.plan import Plan, Stage


@dataclass(frozen=True, slots=True)
class Channel:
    """One direction between two device groups: transfer, and the receiver's gather."""

    transfer_s: float
    gather_s: float


@dataclass(frozen=True, slots=True)
class Hop:
    """A pair of device groups that exchange the samples of a micro batch."""

    source: GroupId
    target: GroupId
    samples: int


def hops_of(plan: Plan, p: int, s: int) -> list[Hop]:
    """Which groups of stage ``s`` exchange how many samples with which of stage ``s + 1``."""
    here, there = plan.pipelines[p].stages[s], plan.pipelines[p].stages[s + 1]
    if len(here.split) == len(there.split) == 1:
        return [Hop((p, s, 0), (p, s + 1, 0), plan.micro_batch_size)]
    found = []
    ours, theirs = _ranges(here, plan), _ranges(there, plan)
    for i, (first, end) in enumerate(ours):
        for j, (begin, stop) in enumerate(theirs):
            samples = min(end, stop) - max(first, begin)
            if samples > 0:
                found.append(Hop((p, s, i), (p, s + 1, j), samples))
    return found


def _ranges(stage: Stage, plan: Plan) -> list[tuple[int, int]]:
    ranges, start = [], 0
    for samples in stage.samples(plan.micro_batch_size):
        ranges.append((start, start + samples))
        start += samples
    return ranges


@dataclass(slots=True)
class Contention:
    """How many flows of the plan use each machine's way out and each pair of zones at once.

    Activations and gradients of a stage alternate, so each is counted by itself; the flows of
    one direction of neighbouring stages that stand on one machine do run together.
    """

    out_of: Counter[Node] = field(default_factory=Counter)
    into: Counter[Node] = field(default_factory=Counter)
    between_zones: Counter[tuple[str, str]] = field(default_factory=Counter)

    @classmethod
    def of(cls, plan: Plan, layout: Layout) -> Contention:
        self = cls()
        for p, pipeline in enumerate(plan.pipelines):
            for s in range(len(pipeline.stages) - 1):
                flows = min(pipeline.stages[s].tp, pipeline.stages[s + 1].tp)
                for hop in hops_of(plan, p, s):
                    source, target = layout.node_of[hop.source], layout.node_of[hop.target]
                    if source != target:
                        self.out_of[source] += flows
                        self.into[target] += flows
                        self.between_zones[source[0], target[0]] += 1
        return self

    def flows(self, source: Node, target: Node) -> int:
        """Flows that share the busier end of a link, this one included."""
        return max(self.out_of[source], self.into[target])


@dataclass(slots=True)
class Messages:
    """Prices every channel of a plan once per kind of channel."""

    network: Network
    layout: Layout
    contention: Contention
    _cache: dict[object, Channel] = field(default_factory=dict)

    def channel(self, plan: Plan, hop: Hop, *, bytes_per_sample: float, forward: bool) -> Channel:
        """The channel of a hop: activations go forward, gradients back."""
        p, s, i = hop.source
        _, _, j = hop.target
        here, there = plan.pipelines[p].stages[s], plan.pipelines[p].stages[s + 1]
        source, target = self.layout.node_of[hop.source], self.layout.node_of[hop.target]
        shared = self.contention.flows(source, target)
        zones = (source[0], target[0])
        rivals = self.contention.between_zones[zones]
        size = bytes_per_sample * hop.samples
        same = source == target
        key = (here.places[i], here.tp, there.places[j], there.tp, size, same, shared, rivals,
               forward)  # fmt: skip
        found = self._cache.get(key)
        if found is None:
            sender, receiver = here.places[i], there.places[j]
            senders, receivers = here.tp, there.tp
            if not forward:
                sender, receiver, senders, receivers = receiver, sender, receivers, senders
            flows = min(senders, receivers)
            if same:
                transfer = self.network.within_node(sender, gpus=2 * flows, bytes_each=size / flows)
            else:
                # The pair's own flows carry the bytes; the others on the way out take their share.
                transfer = self.network.between_nodes(
                    sender,
                    receiver,
                    flows=max(shared, flows),
                    bytes_each=size / flows,
                    zone_bytes=rivals * size,
                )
            gather = self.network.all_gather(receiver, gpus=receivers, total_bytes=size)
            found = self._cache[key] = Channel(transfer, gather)
        return found
