"""What handlers may read of the cluster and ask of its controller."""

from __future__ import annotations

from agents.protocol.records import JobId, Leader, NodeId, Order
from planner.move_policy.node_lifetimes import LifetimeHistory
from sailord.controller.loop import Controller
from sailord.core.learn import lives_by_name
from sailord.core.model.state import State


class ControllerView:
    """The part of the controller that the API answers from, and passes orders and reports to."""

    def __init__(self, controller: Controller) -> None:
        cluster, announcer, effects = controller.cluster, controller.announcer, controller.effects
        self._cluster, self._announcer, self._effects = cluster, announcer, effects
        self.store, self.step_rate_of = cluster.store, cluster.step_rate_of
        self.lost_nodes = cluster.lost_nodes
        self.safe_point, self.durations = controller.safe_point, controller.durations
        self.plans = controller.writer.plans
        self.feed, self.outbox, self.risks = announcer.feed, announcer.outbox, announcer.risks
        self.moves_of, self.history_of = announcer.moves_of, announcer.history_in_memory
        self.planner, self.agents = effects.planner, effects.agents
        self.checkpoints, self.following = effects.checkpoints, effects.following
        self.put_report, self.answer_to = controller.inbox.put_report, controller.answer_to

    @property
    def leader(self) -> Leader | None:
        """The present leader, as last read; ``None``: none is elected."""
        return self._cluster.leader

    @property
    def state(self) -> State:
        """The state now; empty unless we are the leader."""
        return self._cluster.state

    def state_of(self, job: str) -> State:
        """The part of it that a job has; all of it unless it shares the cluster."""
        return self._cluster.parts.others.get(JobId(job), self.state)

    @property
    def last_led(self) -> State:
        """The last state in which we were the leader: what requests are answered from."""
        return self._cluster.last_led

    @property
    def led_parts(self) -> tuple[State, ...]:
        """The parts of that state: one for each job where several share the cluster."""
        return tuple(self._cluster.last_parts.all())

    def led_of(self, job: str) -> State:
        """The part of that state that a job has; all of it unless it shares the cluster."""
        return self._cluster.last_parts.others.get(JobId(job), self.last_led)

    @property
    def lifetimes(self) -> LifetimeHistory:
        """How long machines of each pool lived."""
        return self._cluster.lifetimes.history

    @property
    def plan_requests(self) -> int:
        """How often the planner was asked."""
        return self._effects.plan_requests

    def read_store_soon(self) -> None:
        """Have the store read at once: something was stored."""
        self._cluster.store_changed.set()

    def tell_order(self, order: Order) -> None:
        """Tell of a new order in the feed, and in the history of the job that it concerns."""
        self._announcer.tell_order(order, self._part_of(order.target))

    def tell_given(self, said: str, job: JobId | None) -> None:
        """Tell of an order that leaves no record."""
        self._announcer.tell_given(said, job, None, self._part_of(job or ""))

    def _part_of(self, target: str) -> State:
        """The part that has a job or a node, by its id or name; all of it for any other."""
        parts = self._cluster.parts
        if target not in parts.others:
            node = lives_by_name(self.state).get(target, NodeId(target))
            target = parts.key_of(node) or target
        return self.state_of(target)
