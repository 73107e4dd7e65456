"""A small sound story, for tests to forge violations in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.chaos.story import Change, Fault, File, Sample, Step, Story

JOB = "j"
AT = 1000.0
PHASES = ("detect", "plan", "quiesce", "fetch", "rebuild", "verify", "first_step")
LEADER = "/sailor/v1/c/leader"
GEN, DURABLE, STATE = (f"/sailor/v1/c/job/{JOB}/{part}" for part in ("gen", "durable", "state"))


def generation(revision: int, at: float, number: int, **about: Any) -> Change:
    """Return a generation record on nodes a and b."""
    said = {
        "number": number,
        "state": "open",
        "plan": f"plan {number}",
        "members": ["a.1", "b.1"],
        "restore": {"point": {"generation": 0, "step": 0}, "source": "start"},
        "term": 1,
        "reason": "nothing was planned yet",
        "usd_per_hour": 36.0,
    }
    return Change(revision, AT + at, GEN, 2, {**said, **about})


def restore(of: int, step: int) -> dict[str, Any]:
    return {"point": {"generation": of, "step": step}, "source": "memory"}


def durable(revision: int, at: float, of: int, step: int) -> Change:
    point = {"generation": of, "step": step}
    return Change(revision, AT + at, DURABLE, 4, {"point": point, "manifest": "m", "sha256": ""})


def state(revision: int, at: float, said: str = "running", usd: float = 0.1) -> Change:
    value = {"state": said, "reason": "", "bill": {"usd": usd, "usd_max": 1.0}}
    return Change(revision, AT + at, STATE, 3, value)


def loss(step: int) -> float:
    return 10.0 - step


def steps_done(of: int, first: int, last: int, begin: float) -> list[Step]:
    """Return steps of both nodes, one a second."""
    return [
        Step(node, of, step, AT + begin + step - first, loss(step), f"hash {step}")
        for step in range(first, last + 1)
        for node in ("a", "b")
    ]


def files(of: int, step: int, holders: str = "ab") -> tuple[File, ...]:
    """Return snapshot files: each rank holds a piece of its own and one that both have."""
    return tuple(
        File(
            holder=holder,
            writer=holder,
            rank="ab".index(holder),
            generation=of,
            step=step,
            keys=3,
            pieces={f"0.{'ab'.index(holder)}": f"sum {holder} {step}", "0.2": f"sum both {step}"},
            samples=16 * step,
            label_tokens=1024 * step,
        )
        for holder in holders
    )


def copies(of: int, step: int) -> tuple[File, ...]:
    """Return b's replicas of a's snapshots."""
    return tuple(replace(file, holder="b") for file in files(of, step, "a"))


def sample(at: float, *kept: File, a: int = 11, b: int = 12) -> Sample:
    return Sample(AT + at, {"a": ((a, 1),), "b": ((b, 1),)}, kept)


def move(number: int) -> dict[str, Any]:
    phases = [[name, 0.1] for name in PHASES]
    return {"generation": number, "predicted_s": 0.5, "phases": phases, "predicted": phases}


def sound_story() -> Story:
    """Two generations: b is preempted with notice, and returns at once."""
    return Story(
        job=JOB,
        changes=(
            Change(1, AT, LEADER, 1, {}),
            generation(2, 0.0, 1),
            state(3, 0.1),
            durable(4, 5.5, 1, 5),
            generation(5, 39.5, 1, state="stopping", reason="b is draining"),
            generation(6, 40.0, 2, restore=restore(1, 40), reason="b is draining"),
            state(7, 41.0),
            durable(8, 50.5, 2, 50),
        ),
        steps=(*steps_done(1, 1, 40, 0.0), *steps_done(2, 41, 60, 41.0)),
        reference={step: (loss(step), f"hash {step}") for step in range(1, 70)},
        final_step=60,
        faults=(
            Fault(AT + 22.0, "sailord away"),
            Fault(AT + 38.5, "notice", ("b",)),
            Fault(AT + 40.5, "taken", ("b",)),
        ),
        samples=(
            sample(21.0, *files(1, 20)),
            sample(23.0, *files(1, 21), *files(1, 22)),
            sample(30.0, *files(1, 29)),
            sample(59.0, *files(2, 59), b=13),
            sample(59.5, *files(2, 59), *copies(2, 59), b=13),
        ),
        commits=({"step": 5, "faults": []}, {"step": 50, "faults": []}),
        moves=(move(1), move(2)),
        failures=((AT, 0),),
    )


def with_changes(*more: Change) -> Story:
    """Return the story with the changes of these revisions replaced."""
    story = sound_story()
    found = {change.revision: change for change in (*story.changes, *more)}
    return replace(story, changes=tuple(found[revision] for revision in sorted(found)))
