"""The simulated cloud with a queue: requests wait, are granted as a whole, refused or withdrawn."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from sailord.capacity.core import model
from sailord.providers.interface import InDoubt, InstanceRequest, Observation, Queued, Refused
from tests.gce.cloud_instance import FLEX
from tests.gce.simulated_cloud import KINDS, Run


@dataclass(eq=False)
class QueueingRun(Run):
    """One script in which some of what is wanted waits in a queue."""

    queue: dict[str, InstanceRequest] = field(default_factory=dict)
    ended: dict[str, Refused] = field(default_factory=dict)
    wish: int = 2
    """Machines that are wanted of the queue."""
    waited: int = 0
    """Requests that were granted after waiting, ..."""
    withdrawn: int = 0
    """... and those that were withdrawn."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.stock[FLEX] = 1000
        self.has_deadline = False

    def feed(self, event: model.CapacityEvent) -> None:
        if isinstance(event, model.TargetSet) and self.works and not self.state.stop:
            if not self.calm and self.chances.random() < 0.1:
                self.wish = self.chances.choice((0, 0, 1, 2, 3))
            event = replace(event, target={**event.target, FLEX: self.wish})
        super().feed(event)

    def create(self, ask: InstanceRequest) -> None:
        if not ask.pool.flex:
            super().create(ask)
            return
        self.sent[ask.request_id] += 1
        self.asked[ask.request_id] = ask
        luck, lag = self.chances.random(), self.chances.uniform(0.2, 20.0)
        doubt, waits = InDoubt(ask.request_id), Queued(ask.request_id)
        if self.is_storm():
            if luck < 0.5:
                self.put(ask)
            self.at(10.0, lambda: self.feed(model.RequestAnswered(self.now, doubt)))
        elif luck < 0.1 and not self.calm:
            refused = Refused(ask.request_id, "permission", "as scripted")
            self.at(lag, lambda: self.feed(model.RequestAnswered(self.now, refused)))
        else:
            answer = doubt if luck < 0.25 and not self.calm else waits
            self.put(ask)
            self.at(lag, lambda: self.feed(model.RequestAnswered(self.now, answer)))

    def put(self, ask: InstanceRequest) -> None:
        """Let a request wait, for minutes or longer than the script."""
        self.queue[ask.request_id] = ask
        waits_s = 60.0 if self.calm else self.chances.choice((5.0, 120.0, 900.0, 1e6))
        self.at(waits_s * self.chances.uniform(0.5, 1.5), lambda: self.decide_on(ask))

    def settle(self) -> None:
        """Decide on all that waits, some of it for longer than the script."""
        for ask in tuple(self.queue.values()):
            self.decide_on(ask)

    def decide_on(self, ask: InstanceRequest) -> None:
        """Grant a request that still waits, or end it with a cause."""
        if self.queue.pop(ask.request_id, None) is None:
            return
        if self.calm or self.chances.random() < 0.7:
            self.waited += 1
            self.make(ask, ask.count)
        else:
            kind = self.chances.choice(KINDS)
            self.ended[ask.request_id] = Refused(ask.request_id, kind, "as scripted")  # type: ignore[arg-type] # a KIND

    def cancel(self, ask: InstanceRequest) -> None:
        assert ask.pool == FLEX, f"{ask} does not wait"
        if self.is_storm() or (not self.calm and self.chances.random() < 0.2):
            return
        self.at(self.chances.uniform(0.2, 5.0), lambda: self.take_out(ask))

    def take_out(self, ask: InstanceRequest) -> None:
        """Withdraw a request that still waits."""
        if self.queue.pop(ask.request_id, None) is not None:
            self.withdrawn += 1
            self.ended[ask.request_id] = Refused(ask.request_id, "unknown", "cancelled")

    def observed(self, observation: Observation) -> Observation:
        if FLEX.zone in observation.unseen_zones:
            return observation
        refused = tuple(self.ended.values())
        return replace(observation, queued=dict(self.queue), refused=refused)
