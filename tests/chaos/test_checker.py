"""The checker finds each violation in a forged story, and none in a sound one."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.chaos.checker import RULES, judge
from tests.chaos.forged_story import (
    AT,
    LEADER,
    durable,
    files,
    generation,
    move,
    restore,
    sample,
    sound_story,
    state,
    steps_done,
    with_changes,
)
from tests.chaos.story import Change, Fault, Story

SOUND = sound_story()


def other_pieces(holder: int) -> Story:
    """Return files in which the shared piece has two checksums."""
    one, two = files(2, 59)
    bad = replace(one, holder="b", rank=holder, pieces={**one.pieces, "0.2": "another sum"})
    return replace(SOUND, samples=(*SOUND.samples[:3], sample(59.0, one, two, bad, b=13)))


def without_steps(first: float, end: float) -> Story:
    """Return the story without the steps of a while."""
    kept = tuple(step for step in SOUND.steps if not AT + first < step.at < AT + end)
    return replace(SOUND, steps=kept)


def with_step(step: int, **other: object) -> Story:
    """Return the story with one step changed."""
    steps = (replace(s, **other) if s.step == step and s.node == "a" else s for s in SOUND.steps)
    return replace(SOUND, steps=tuple(steps))


OTHER_BATCH = tuple(replace(file, samples=8 * 59) for file in files(2, 59))
FORGED: dict[str, list[Story]] = {
    "I1": [
        with_changes(Change(5, AT + 39.0, LEADER, 5, {})),
        with_changes(generation(9, 60.0, 2, state="stopping", term=7, restore=restore(1, 40))),
    ],
    "I2": [
        with_changes(generation(9, 60.0, 4, restore=restore(2, 60))),
        with_changes(generation(9, 60.0, 1)),
        with_changes(generation(9, 60.0, 2, restore=restore(1, 40), plan="another")),
    ],
    "I3": [
        with_changes(durable(9, 60.0, 1, 55)),
        with_changes(generation(6, 40.0, 2, restore=restore(1, 45))),
    ],
    "I4": [
        with_changes(durable(9, 60.0, 2, 40)),
        replace(SOUND, commits=({"step": 50, "faults": ["piece 1 of layer 0 is damaged"]},)),
    ],
    "I5": [
        with_changes(generation(6, 40.0, 2, restore=restore(1, 4))),
        replace(
            with_changes(generation(6, 40.0, 2, restore=restore(1, 30))),
            faults=(Fault(AT + 38.5, "taken", ("b",)),),
        ),
        replace(
            with_changes(generation(6, 40.0, 2, restore=restore(1, 38))),
            faults=(Fault(AT + 38.5, "rank", ("b",)),),
        ),
    ],
    "I6": [with_changes(generation(6, 40.0, 2, restore=restore(1, 39), reason="b is draining"))],
    "I7": [
        with_step(7, sample_hash="another"),
        replace(SOUND, steps=tuple(s for s in SOUND.steps if (s.node, s.step) != ("a", 7))),
    ],
    "I8": [
        with_step(7, loss=3.0000000000000004),
        replace(SOUND, steps=(*steps_done(1, 7, 7, 0.0), *SOUND.steps[14:])),
        replace(SOUND, final_step=0),
        replace(with_step(7, loss=3.004), tolerance=1e-3),
        replace(with_step(7, loss=math.nan), tolerance=1e-3),
    ],
    "I9": [other_pieces(1)],
    "I10": [other_pieces(0)],
    "I11": [replace(SOUND, samples=(*SOUND.samples, sample(59.8, *OTHER_BATCH, b=13)))],
    "I12": [
        replace(SOUND, samples=(replace(SOUND.samples[0], workers={"a": ((1, 1), (2, 1))}),)),
    ],
    "I13": [
        replace(SOUND, samples=(sample(19.0, *files(1, 19)), sample(20.0, *files(1, 20, "a")))),
    ],
    "I14": [without_steps(22.4, 28.0)],
    "I15": [
        replace(SOUND, breaches=("left behind: /dev/shm/x",)),
        replace(SOUND, steps=(*steps_done(1, 1, 40, 0.0), *steps_done(2, 41, 60, 141.0))),
        replace(SOUND, faults=(*SOUND.faults, Fault(AT + 121.0, "rank", ("a",)))),
        with_changes(
            *(generation(9 + n, 60.0 + n, 3 + n, restore=restore(2, 60)) for n in range(9))
        ),
    ],
    "I16": [
        with_changes(
            generation(9, 60.0, 3, restore=restore(2, 60), members=["a.1"], reason="c is draining")
        ),
        with_changes(
            *(Change(9 + n, AT + 60 + n, "/sailor/v1/c/intent/x", 9, {"kind": "preempt"})
              for n in range(2)),
        ),
    ],
    "I17": [replace(SOUND, samples=(SOUND.samples[0], sample(23.0, *files(1, 22), b=99)))],
    "I18": [
        with_changes(state(9, 60.0, "failed")),
        replace(SOUND, holds=({"at": AT + 60, "reason": "5 attempts came to nothing"},)),
        replace(SOUND, failures=((AT, 0), (AT + 41.5, 1)), faults=SOUND.faults[1:]),
    ],
    "I19": [with_changes(state(9, 60.0, usd=1.2))],
    "I20": [
        replace(SOUND, moves=(move(1), {**move(2), "phases": [["plan", 1.0]]})),
        replace(SOUND, moves=(move(1), {**move(2), "predicted_s": None})),
        replace(SOUND, moves=(move(1), {**move(2), "predicted": [["plan", 1.0]]})),
        replace(SOUND, moves=(move(1),)),
        # The leader was elected before it was opened and saw all of it.
        replace(
            with_changes(
                Change(5, AT + 39.0, LEADER, 5, {}),
                generation(6, 40.0, 2, restore=restore(1, 40), term=5),
            ),
            moves=(move(1),),
        ),
    ],
}  # fmt: skip


def test_every_invariant_has_a_rule_and_a_breach():
    assert list(RULES) == list(FORGED) == [f"I{number}" for number in range(1, 21)]


def test_a_sound_story_has_no_violations():
    assert judge(SOUND).violations == ()


def test_a_loss_within_the_tolerance_is_accepted():
    assert judge(replace(with_step(7, loss=3.002), tolerance=1e-3)).violations == ()


def test_losses_after_the_last_compared_step_are_ignored():
    story = replace(with_step(7, loss=3.004), tolerance=1e-3)
    assert judge(replace(story, compared=6)).violations == ()
    assert judge(replace(story, compared=7)).violations != ()


@pytest.mark.parametrize(
    ("name", "story"),
    [(name, story) for name, stories in FORGED.items() for story in stories],
)
def test_a_breach_is_found(name: str, story: Story):
    assert any(RULES[name](story))


def test_every_rule_applies_to_the_sound_story():
    assert judge(SOUND).idle == []


@pytest.mark.parametrize(
    ("name", "story"),
    [
        ("I14", replace(SOUND, faults=SOUND.faults[1:])),
        ("I14", replace(SOUND, faults=(Fault(AT + 21.0, "rank", ("a",)), *SOUND.faults))),
        ("I17", replace(SOUND, faults=(Fault(AT + 21.0, "rank", ("a",)), *SOUND.faults))),
        ("I4", replace(SOUND, commits=(), changes=SOUND.changes[:3])),
    ],
)
def test_a_rule_that_never_applied_is_listed_as_idle(name: str, story: Story):
    assert name in judge(story).idle


def test_no_reconfiguration_timing_is_required_without_a_leader():
    story = replace(SOUND, moves=(move(1),))
    away = Fault(AT + 42.0, "sailord away", ())
    late = Fault(AT + 65.0, "sailord away", ())
    assert judge(replace(story, faults=(*story.faults, away))).violations == ()
    assert judge(replace(story, faults=(*story.faults, late))).violations != ()
