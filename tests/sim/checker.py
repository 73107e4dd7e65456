"""What must hold in the simulated world, whatever goes wrong in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from agents.protocol import GenerationRecord, NodeId, Point

if TYPE_CHECKING:
    from sailord.model import State
    from tests.sim.clock import Clock
    from tests.sim.storage import Store


@dataclass(frozen=True)
class Line:
    """Something that happened, for the account that a failing seed prints."""

    at: float
    text: str


class Checker:
    """Sees every decision, every step and every write; ``verify`` says what was broken."""

    def __init__(self, clock: Clock, store: Store) -> None:
        self.clock, self.store = clock, store
        self.lines: list[Line] = []
        self.steps: dict[int, list[tuple[float, int]]] = {}
        self.faults: list[tuple[float, str]] = []
        self.failures_max = 0
        self.pids = 0
        self._members: dict[int, tuple[NodeId, ...]] = {}

    def next_pid(self) -> int:
        self.pids += 1
        return self.pids

    def members(self, generation: int) -> tuple[NodeId, ...]:
        if generation not in self._members:
            for record in self._records():
                self._members[record.number] = record.members
        return self._members[generation]

    def _records(self) -> list[GenerationRecord]:
        return [v for *_, v in self.store.history if isinstance(v, GenerationRecord)]

    def noted(self, who: str, text: str) -> None:
        self.lines.append(Line(self.clock.now, f"{who}: {text}"))

    def struck(self, fault: str) -> None:
        self.faults.append((self.clock.now, fault.split(maxsplit=1)[0]))
        self.lines.append(Line(self.clock.now, f"---- {fault}"))

    def stepped(self, generation: int, step: int) -> None:
        self.steps.setdefault(generation, []).append((self.clock.now, step))

    def decided(self, who: str, before: State, after: State) -> None:
        if after.active is not None:
            self.failures_max = max(self.failures_max, after.active.failures)
        if before.term != after.term:
            self.lines.append(Line(self.clock.now, f"{who}: term {before.term} -> {after.term}"))

    def verify(self) -> None:
        """Safety over the whole history of the store and of the steps."""
        opened: dict[int, tuple[float, GenerationRecord]] = {}
        last: GenerationRecord | None = None
        for at, _, key, value in self.store.history:
            if key != "/job/gen":
                continue
            assert isinstance(value, GenerationRecord)
            if last is not None:
                assert value.term >= last.term, f"terms interleave: {last} then {value}"
                assert value.number >= last.number, f"a number comes again: {value}"
            if value.state == "open":
                assert value.number not in opened, f"generation {value.number} has two plans"
                assert last is None or value.number == last.number + 1
                self._verify_restore(at, last, value, opened)
                opened[value.number] = (at, value)
            last = value

    def _verify_restore(
        self,
        at: float,
        last: GenerationRecord | None,
        record: GenerationRecord,
        opened: dict[int, tuple[float, GenerationRecord]],
    ) -> None:
        point = record.restore.point
        if record.restore.source == "memory":
            done = [step for _, step in self.steps.get(point.generation, [])]
            is_start = point == opened[point.generation][1].restore.point
            assert point.step in done or is_start, f"{point} was never reached"
            assert self._is_ancestor(point, last, opened), f"{point} lies on a line that was left"
        if last is None:
            return
        reached = [step for when, step in self.steps.get(last.number, []) if when <= at]
        lost = max([*reached, last.restore.point.step]) - point.step
        recent = [kind for when, kind in self.faults if at - 40 <= when <= at]
        if last.state == "stopping" and not recent:
            assert lost <= 0, f"a planned change lost {lost} steps: {record}"
        if recent == ["power_off"]:
            assert lost <= 2, f"one lost machine cost {lost} steps: {record}"

    def _is_ancestor(
        self,
        point: Point,
        last: GenerationRecord | None,
        opened: dict[int, tuple[float, GenerationRecord]],
    ) -> bool:
        """Walk back from the last generation as it really went."""
        end = float("inf")
        number = 0 if last is None else last.number
        while number in opened:
            if point.generation == number:
                return point.step <= end
            restore = opened[number][1].restore
            end = min(end, restore.point.step)
            number = restore.point.generation
        return False

    def account(self) -> str:
        return "\n".join(f"{line.at:8.2f} {line.text}" for line in self.lines)
