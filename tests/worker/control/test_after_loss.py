"""What a rank announces of its last seal, and when."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from worker.control.after_loss import AfterLoss
from worker.distributed.interface import PeerLostError

LOST = PeerLostError(1, "vote")


@dataclass(eq=False)
class Rank:
    """A rank whose expected seal is set by the test; keeps what it reported."""

    expected: tuple[int, float] | None
    reported: list[dict[str, Any]] = field(default_factory=list)
    on_seal: Any = None
    rolled: Any = None
    logged: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        trainer: Any = SimpleNamespace(
            may_roll_forward=False,
            roll_forward=lambda: self.rolled,
            log=self.logged.append,
            progress=SimpleNamespace(step=5),
        )
        snapshots: Any = SimpleNamespace(
            expected_seal=lambda **_: self.expected,
            seal_if_complete=lambda: self.on_seal() if self.on_seal else None,
        )
        self.after = AfterLoss(
            restored_step=2,
            node_of=lambda rank: "ab"[rank],
            has_ended=lambda: False,
            report=lambda: self.reported.append(self.after.status),
            trainer=trainer,
            snapshots=snapshots,
        )


ANNOUNCED = {"sealing": {"step": 5, "ready_in_s": 3.0}, "broken_peers": ["b"]}


def test_seal_is_announced_with_the_lost_node():
    rank = Rank((5, 3.0))
    rank.after.announce(LOST)
    assert rank.reported == [ANNOUNCED]


def test_nothing_is_announced_of_the_step_that_was_restored():
    rank = Rank((2, 3.0))
    rank.after.announce(LOST)
    assert rank.reported == []


def test_announcement_is_withdrawn_once_the_update_is_known_to_be_interrupted():
    rank = Rank((5, 3.0))
    rank.after.announce(LOST)
    rank.expected = None
    rank.after.announce(LOST)
    assert rank.reported == [ANNOUNCED, {}]


def test_late_announcement_changes_nothing_while_the_state_is_saved():
    rank = Rank(None)
    rank.after.announce(LOST)

    def late() -> None:
        rank.expected = (5, 0.0)
        rank.after.announce(LOST)

    rank.on_seal = late
    rank.after.save(lambda _: None)
    assert rank.reported == []


def test_nothing_is_announced_after_the_end():
    rank = Rank((5, 3.0))
    rank.after.announce(LOST)
    rank.after.end()
    assert rank.after.status == {}
    rank.after.announce(LOST)
    assert rank.reported == [ANNOUNCED]


def test_step_that_is_finished_after_the_loss_reaches_the_scripts_loggers():
    rank = Rank((5, 3.0), rolled="step 5")
    rank.after.save(rank.logged.append)
    assert rank.logged == ["step 5", "step 5"], "the agent, then the loggers"


def test_loggers_get_a_step_that_is_finished_after_the_loss_once_it_is_sealed():
    """A service that does not answer would hold up the seal until the agent ends the rank."""
    rank = Rank((5, 3.0), rolled="step 5")
    rank.on_seal = lambda: rank.logged.append("sealed")
    rank.after.save(lambda _: None)
    assert rank.logged == ["sealed", "step 5"]
