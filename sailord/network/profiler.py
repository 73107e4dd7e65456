"""Has agents measure the network: on a schedule, and when an operator orders a round."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import deque
from dataclasses import dataclass, field

import structlog

from agents.daemon.clock import Clock
from agents.daemon.tasks import is_set_within
from agents.protocol.codec import WireError, decode, encode
from agents.protocol.link_records import LinkOrder, LinkTimes
from agents.protocol.records import NodeId
from agents.rpc.client import CallFailed
from sailord.config import Config
from sailord.controller.agent_client import AgentClient
from sailord.controller.cluster_state import ClusterState
from sailord.core.model.nodes import Node
from sailord.network.core.choose import PastMeasurements, choose, open_questions
from sailord.network.core.curve_fit import FittedCurve, fit_curves
from sailord.network.core.judge import Verdict, judge
from sailord.network.core.model import (
    Candidate,
    CurveToMeasure,
    Failure,
    Measurement,
    NextMeasurement,
    Site,
)
from sailord.network.history import MeasurementHistory
from sailord.network.network_document import network_document
from simulator.documents.problems import InputError
from worker.atomic_file import replace_file

log = structlog.get_logger("sailord")

PAUSE_S = 0.5
"""Between two measurements, and two looks whether one is due."""
ROUND_S_MAX = 900.0
"""An ordered round ends after this, whatever is still open."""
ANSWER_S = 15.0
"""How long an agent's answer may take beyond the seconds of the measurement."""
TCP_BYTES_PER_S = 3e9
"""A flow that is faster by the catalogue (RDMA) would show the agent's speed, not the link's."""
NOTHING = Verdict((), (), frozenset())


@dataclass(eq=False)
class NetworkProfiler:
    """Measures while this process is the leader."""

    config: Config
    cluster: ClusterState
    agents: AgentClient
    clock: Clock
    """It never jumps: a round would otherwise measure the same links again and again."""
    history: MeasurementHistory = field(init=False)
    failures: deque[Failure] = field(default_factory=lambda: deque(maxlen=200))
    verdict: Verdict = NOTHING
    curves: list[FittedCurve] = field(default_factory=list)
    ordered_at: float | None = None
    """When the round began that an operator ordered; ``None``: there is none."""
    unmeasured: int = 0
    """Curves that the last ordered round left out when its time was over."""
    _woken: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.history = MeasurementHistory(self.config.state / "network_history.jsonl")

    def order_round(self) -> None:
        """Measure every link once now, beside the budget."""
        if self.ordered_at is None:
            self.ordered_at = self.clock.now()
            self._woken.set()

    @property
    def open_questions(self) -> list[CurveToMeasure]:
        """What the ordered round has still to measure; empty without one."""
        if self.ordered_at is None:
            return []
        return open_questions(
            self.candidates,
            self._known,
            self.config.network,
            self.clock.now(),
            since=self.ordered_at,
        )

    @property
    def candidates(self) -> list[Candidate]:
        """The nodes that may be asked."""
        state = self.cluster.state
        # Those of jobs that train beside the first are among them, too.
        known = [*state.generations.values()]
        if state.active is not None and state.active.generation is not None:
            known.append(state.active.generation)
        members = {id_ for each in known if each.state == "open" for id_ in each.members}
        return [
            Candidate(id_, _site(node), node.record.gpus, is_training=id_ in members)
            for id_, node in state.nodes.items()
            if node.record.address and node.is_usable(is_member=True)
        ]

    async def run(self) -> None:
        """Run forever."""
        try:
            self.history.load()
        except OSError as error:
            log.warning("the network's history cannot be read", error=str(error))
        await self._evaluate()
        while True:
            pick = self._pick()
            if pick is not None:
                try:
                    await self._measure(pick)
                except OSError as error:  # A full disk must not end sailord.
                    log.warning("a measured link cannot be written", error=str(error))
            self._woken.clear()
            await is_set_within(self._woken, PAUSE_S)

    def _pick(self) -> NextMeasurement | None:
        if self.cluster.term is None:
            self.ordered_at = None
            return None
        policy, now = self.config.network, self.clock.now()
        if self.ordered_at is not None:
            is_late = now > self.ordered_at + ROUND_S_MAX
            if not is_late and self.open_questions:
                since = self.ordered_at
                return choose(self.candidates, self._known, policy, now, since=since)
            self.unmeasured = len(self.open_questions)
            log.info("network measured", curves=len(self.curves), unmeasured=self.unmeasured)
            self.ordered_at = None
        if not policy.seconds_per_hour:
            return None
        return choose(self.candidates, self._known, policy, now)

    async def _measure(self, pick: NextMeasurement) -> None:
        nodes, policy = self.cluster.state.nodes, self.config.network
        ends = [nodes.get(NodeId(each)) for each in (pick.sender, pick.receiver)]
        if ends[0] is None or ends[1] is None:
            return
        order = LinkOrder(
            peer=ends[1].record.address,
            name=ends[1].record.name,
            flows=pick.question.flows,
            both_ways=pick.question.both_ways,
            sizes_bytes=pick.sizes_bytes,
            bytes_max=pick.bytes_max,
            seconds_max=policy.seconds_each,
            quiet_bytes_per_s=policy.quiet_mbytes_per_s * 1e6,
            look_s=pick.look_s,
        )
        begun, at = time.monotonic(), self.clock.now()
        try:
            body = await self.agents.call(
                ends[0].record, "POST", "/v1/links/measure", encode(order),
                timeout_s=policy.seconds_each + ANSWER_S,
            )  # fmt: skip
            found = decode(LinkTimes, body)
        except (CallFailed, WireError) as error:
            found = LinkTimes(broken=f"the agent does not answer: {error}")
        took_s, pair = time.monotonic() - begun, (pick.sender, pick.receiver)
        why = found.busy or found.broken or ("" if found.times else "nothing could be measured")
        if why:
            is_busy = bool(found.busy)
            self.failures.append(Failure(at, *pair, pick.question, why, is_busy, took_s))
            about = {"sender": pick.sender, "receiver": pick.receiver, "why": why}
            (log.info if is_busy else log.warning)("link not measured", **about)
            return
        moved = min(max(found.bytes_moved, 0), pick.bytes_max)  # An agent may lie.
        self.history.add(
            Measurement(at, *pair, pick.question, found.round_trip_s, found.times, moved, took_s)
        )
        await self._evaluate()
        document = json.dumps(network_document(self.curves), indent=1)
        await asyncio.to_thread(replace_file, self.config.network_file, document)

    async def _evaluate(self) -> None:
        """Judge all measurements, and fit the curves; thousands of them take a while."""
        rates = {
            _site(node): rate
            for node in self.cluster.state.nodes.values()
            if (rate := self._nic_bytes_per_s(node)) is not None
        }
        measurements = self.history.all
        known = {each.measurement.at for each in self.verdict.flagged}
        self.verdict = await asyncio.to_thread(judge, measurements, rates.get)
        self.curves = await asyncio.to_thread(fit_curves, self.verdict.good)
        for each in self.verdict.flagged:
            if each.measurement.at not in known:
                log.warning("measurement not used", sender=each.measurement.sender,
                            receiver=each.measurement.receiver, why=each.why)  # fmt: skip

    @property
    def _known(self) -> PastMeasurements:
        flagged = [each.measurement for each in self.verdict.flagged]
        return PastMeasurements(
            self.verdict.good, self.failures, flagged, self.verdict.liars, self._too_fast()
        )

    def _too_fast(self) -> frozenset[tuple[Site, Site]]:
        """Return the sites whose own link is faster than TCP between agents."""
        catalogue, found = self.config.cluster.catalogue, set()
        for machine, site in {
            (node.record.machine, _site(node)) for node in self.cluster.state.nodes.values()
        }:
            with contextlib.suppress(InputError, KeyError):
                if catalogue.machine(machine).nic.flow_bytes_per_s > TCP_BYTES_PER_S:
                    found.add((site, site))
        return frozenset(found)

    def _nic_bytes_per_s(self, node: Node) -> float | None:
        if node.record.address.startswith("127."):
            return None  # No NIC carries this.
        with contextlib.suppress(InputError, KeyError):
            return self.config.cluster.catalogue.machine(node.record.machine).nic_bytes_per_s
        return None


def _site(node: Node) -> Site:
    return Site(node.record.zone, node.record.gpu)
