"""GPU time of rented instances equals the provider's bill, whenever leaders are killed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import given
from hypothesis import strategies as st

from agents.protocol.codec import decode, encode
from sailord.capacity.core import model
from sailord.capacity.core.decide import decide, record_of
from sailord.core.model.state import State
from sailord.goodput.core.ledger import Ledger, fold
from sailord.goodput.core.usage_sample import renting_of, sample_usage
from sailord.providers.interface import Instance, Observation, Pool
from tests.sailord.core.states import A as NODE_A
from tests.sailord.core.states import node, record

POOL = Pool("zone-a", "large", "gpu", 4, spot=True)
BEGAN = 1000.0
ACTS = ("rent", "end", "observe", "look", "reprice", "save", "save record", "kill")
steps = st.lists(
    st.tuples(st.sampled_from((0.0, 0.3, 1.0, 7.0, 150.0)), st.sampled_from(ACTS)), max_size=40
)


@dataclass
class Provider:
    """Instances with their creation and end; all agents register at once."""

    created: dict[str, float] = field(default_factory=dict)
    ended: dict[str, float] = field(default_factory=dict)

    def observation(self, at: float) -> Observation:
        there = tuple(
            Instance(id_, f"m{id_}", POOL, "running", created, "request", f"n{id_}")
            for id_, created in self.created.items()
            if id_ not in self.ended
        )
        return Observation(at, there, ended_at=dict(self.ended))

    def gpu_us(self, now: float) -> int:
        return POOL.gpus * sum(
            round(self.ended.get(id_, now) * 1e6) - round(created * 1e6)
            for id_, created in self.created.items()
        )


@dataclass
class Leaders:
    """One leader after the other, with what each stored of capacity and ledger."""

    provider: Provider = field(default_factory=Provider)
    now: float = BEGAN
    stored: bytes = encode(model.CapacityRecord())
    stored_ledger: bytes = encode(Ledger())
    number: int = 0

    def __post_init__(self) -> None:
        self.elect()

    def elect(self) -> None:
        """A leader that knows what is stored, and has observed the provider."""
        self.number += 1
        self.ledger = decode(Ledger, self.stored_ledger)
        books = decode(model.CapacityRecord, self.stored)
        self.capacity = model.CapacityState(model.CapacityPolicy())
        self.hear(model.TookOver(self.now, f"t{self.number}", books))
        self.hear(model.PricesRead(self.now, {POOL: 3.6}))
        self.observe()

    def hear(self, event: model.CapacityEvent) -> None:
        self.capacity, _ = decide(self.capacity, event)

    def observe(self) -> None:
        self.hear(model.Observed(self.now, self.provider.observation(self.now)))

    def look(self) -> None:
        """Fold what is seen; no node was given up yet, however long its instance is gone."""
        known = [
            replace(node(NODE_A), record=record(f"node-{id_}", name=f"n{id_}", gpus=POOL.gpus))
            for id_ in self.provider.created
        ]
        state = State(now=self.now, term=self.number, nodes={n.record.id: n for n in known})
        renting = renting_of(self.capacity, self.now)
        self.ledger = fold(self.ledger, sample_usage(state, lambda _: None, renting))

    def play(self, what: str) -> None:
        match what:
            case "rent":
                self.provider.created[str(len(self.provider.created))] = self.now
                self.observe()
                self.stored = encode(record_of(self.capacity))
            case "end":
                up = [i for i in self.provider.created if i not in self.provider.ended]
                if up:
                    self.provider.ended[up[0]] = self.now
            case "observe":
                self.observe()
            case "look":
                self.look()
            case "reprice":
                self.hear(model.PricesRead(self.now, {POOL: self.now}))
            case "save":
                self.stored_ledger = encode(self.ledger)
            case "save record":
                self.stored = encode(record_of(self.capacity))
            case "kill":
                self.elect()

    def off_us(self) -> int:
        """Booked beyond the bill."""
        booked = sum(each.gpu_us for each in self.ledger.accounts) - self.ledger.ahead_us
        return booked - self.provider.gpu_us(self.now)


def played(*story: tuple[float, str]) -> Leaders:
    leaders = Leaders()
    leaders.look()
    leaders.play("save")
    for seconds, what in story:
        leaders.now += seconds
        leaders.play(what)
    return leaders


@given(steps)
def test_gpu_time_is_the_bill_whenever_leaders_are_killed(story: list[tuple[float, str]]) -> None:
    leaders = played(*story, (1.0, "observe"), (0.0, "look"))
    assert leaders.off_us() == 0


def test_an_instance_that_ended_between_two_stored_ledgers_is_booked_to_its_end() -> None:
    begun = ((0.0, "rent"), (0.3, "look"), (0.0, "save"))
    # Its end is stored with the capacity record, and the leader is killed before the ledger is.
    ended = ((4.0, "end"), (0.1, "observe"), (0.0, "save record"), (5.0, "kill"), (0.3, "look"))
    leaders = played(*begun, *ended, (10.0, "look"))
    assert leaders.off_us() == 0
